"""What each runtime can do: one literal table, by which the contract suite is parametrised and which the docs print."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from podium.errors import UnsupportedByRuntime

Capability: TypeAlias = Literal[
    "own_processes", "collectives", "timeouts", "environment", "restart", "worker_env", "detached", "exit_codes"
]


@dataclass(frozen=True)
class Capabilities:
    """What may be asked of a runtime; asking for what is False raises UnsupportedByRuntime."""

    own_processes: bool
    """Ranks run at the same time, and one that dies takes neither its peers nor the driver with it."""
    collectives: bool
    """torch.distributed between more than one rank."""
    timeouts: bool
    """A call that takes too long is ended, and its silent ranks with it."""
    environment: bool
    """RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set in the worker."""
    restart: bool
    """A broken group can be made ready again."""
    worker_env: bool
    """The caller may set environment variables of the workers."""
    detached: bool
    """A group may outlive its driver."""
    exit_codes: bool
    """The exit code or signal of a dead rank is told."""


CAPABILITIES: dict[str, Capabilities] = {
    "inline": Capabilities(
        own_processes=False,
        collectives=False,
        timeouts=False,
        environment=False,
        restart=False,
        worker_env=False,
        detached=False,
        exit_codes=False,
    ),
    "ray": Capabilities(
        own_processes=True,
        collectives=True,
        timeouts=True,
        environment=True,
        restart=True,
        worker_env=True,
        detached=True,
        exit_codes=False,  # Ray does not report them
    ),
}


def require(runtime: str, capability: Capability, asked_for: str) -> None:
    """UnsupportedByRuntime, naming the runtimes that can, unless this one has the capability."""
    if runtime in CAPABILITIES and getattr(CAPABILITIES[runtime], capability):
        return
    able = [name for name, capabilities in CAPABILITIES.items() if getattr(capabilities, capability)]
    remedy = f"use runtime {' or '.join(map(repr, able))}" if able else "no runtime offers it yet"
    raise UnsupportedByRuntime(f"runtime {runtime!r} has no {asked_for}: {remedy}")

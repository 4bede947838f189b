"""The runtimes, by name: where each is implemented and what it can do.

This table is the only place that knows their names. Everything else asks for a capability: the checks of the configuration, the
trainers, the contract suite, which is parametrised by it, and the docs, which print it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from podium.errors import ConfigError, UnsupportedByRuntime, check_kind, unknown_name

Capability: TypeAlias = Literal[
    "own_processes", "nodes", "collectives", "timeouts", "environment", "restart", "worker_env", "detached", "exit_codes"
]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What may be asked of a runtime; asking for what is False raises UnsupportedByRuntime."""

    implementation: str
    """Where its class is, `module:Class`; imported when the runtime is chosen."""
    package: str | None = None
    """The package that it needs, which is also the name of Podium's extra that installs it."""
    own_processes: bool
    """Ranks run at the same time, and one that dies takes neither its peers nor the driver with it."""
    nodes: bool
    """Ranks may be on several machines."""
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
    """The exit code or signal of a dead rank is reported."""


CAPABILITIES: dict[str, Capabilities] = {
    "inline": Capabilities(
        implementation="podium.single_controller.runtime.inline:InlineRuntime",
        own_processes=False,
        nodes=False,
        collectives=False,
        timeouts=False,
        environment=False,
        restart=False,
        worker_env=False,
        detached=False,
        exit_codes=False,
    ),
    "ray": Capabilities(
        implementation="podium.single_controller.runtime.ray:RayRuntime",
        package="ray",
        own_processes=True,
        nodes=True,
        collectives=True,
        timeouts=True,
        environment=True,
        restart=True,
        worker_env=True,
        detached=True,
        exit_codes=False,  # Ray does not report them
    ),
}
"""In the order of preference: where no runtime is named, the first that can do what is needed."""


def capabilities_of(runtime: str) -> Capabilities:
    """The row of that name. ConfigError with the nearest name where there is none."""
    check_kind("runtime", runtime, str, "the name of a runtime")
    if runtime not in CAPABILITIES:
        raise ConfigError(unknown_name("runtime", runtime, CAPABILITIES))
    return CAPABILITIES[runtime]


def runtimes_with(capability: Capability) -> list[str]:
    """The names of the runtimes that have the capability."""
    return [name for name, can in CAPABILITIES.items() if getattr(can, capability)]


def runtime_for(num_ranks: int) -> str:
    """The runtime of a run that names none: ranks that are more than one need collectives."""
    return next(iter(CAPABILITIES)) if num_ranks == 1 else runtimes_with("collectives")[0]


def require(runtime: str, capability: Capability, asked_for: str) -> None:
    """UnsupportedByRuntime, with the runtimes that can, unless this one has the capability."""
    if runtime in CAPABILITIES and getattr(CAPABILITIES[runtime], capability):
        return
    able = runtimes_with(capability)
    remedy = f"use runtime {' or '.join(map(repr, able))}" if able else "no runtime offers that yet"
    raise UnsupportedByRuntime(f"runtime {runtime!r} does not offer {asked_for}: {remedy}")

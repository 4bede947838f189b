"""The seam between group calls and the place where ranks run.

A runtime starts ranks, hands a call to one of them, waits, kills. It takes no decision: what a failure means, how long to
wait for whom and what to tell the caller is `pending_call`'s work, the same for every runtime.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from podium.errors import ConfigError, ResourceError, WorkerError, unknown_name
from podium.single_controller.context import RankContext
from podium.single_controller.resource_pool import ResourcePool

if TYPE_CHECKING:
    from podium.single_controller.worker import Worker

CONSTRUCTOR = "__init__"


@dataclass(frozen=True)
class GroupSpec:
    """What to start: `worker_class(*args, **kwargs)` on every rank of the pool."""

    name: str
    worker_class: type[Worker]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pool: ResourcePool
    threads_per_rank: int
    """torch threads of each rank; 0 is the machine's cores divided by the ranks on it."""

    def __post_init__(self) -> None:
        if self.threads_per_rank < 0:
            raise ResourceError(f"threads_per_rank is a number of threads or 0 for the default, got {self.threads_per_rank}")

    def contexts(self, runtime: str) -> list[RankContext]:
        """The place of each rank, without a rendezvous."""
        places = zip(self.pool.local_rank_list(), self.pool.local_world_size_list(), strict=True)
        return [
            RankContext(
                group=self.name,
                runtime=runtime,
                rank=rank,
                world_size=self.pool.world_size,
                local_rank=local_rank,
                local_world_size=local_world_size,
                threads=self.threads_per_rank or max(1, num_cores() // local_world_size),
            )
            for rank, (local_rank, local_world_size) in enumerate(places)
        ]


@dataclass(frozen=True)
class RankCall:
    """One method call on one rank."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answers: bool
    """Whether the result is wanted; if not, the rank answers None and sends no data."""


@dataclass(frozen=True)
class Answer:
    """What a rank returned. The value is the caller's own: changing it changes nothing in the worker."""

    value: Any


Outcome: TypeAlias = Answer | WorkerError
Ticket: TypeAlias = Any  # what a runtime gives for a call that it took; only that runtime knows what is inside


class Runtime(ABC):
    """The ranks of one group. Calls of a rank run in the order of `submit`, on the thread of its constructor."""

    @abstractmethod
    def start(self, spec: GroupSpec) -> dict[int, Ticket]:
        """Begin to build every rank's worker; the tickets are of the constructors, which may fail like any call."""

    @abstractmethod
    def submit(self, rank: int, call: RankCall) -> Ticket:
        """Send a call to a rank. The arguments are copied: the worker may change its own."""

    @abstractmethod
    def wait(self, tickets: Mapping[int, Ticket], timeout_s: float) -> dict[int, Outcome]:
        """The outcomes by rank, as soon as all are there, one of them is a failure, or the time is over; 0 only looks."""

    @abstractmethod
    def kill(self, ranks: Iterable[int]) -> None:
        """End these ranks now, whatever they are doing."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything; the last call on a runtime, harmless when repeated."""


RUNTIMES: dict[str, str] = {
    "inline": "podium.single_controller.runtime.inline:InlineRuntime",
    "ray": "podium.single_controller.runtime.ray:RayRuntime",
}


def build_runtime(name: str) -> Runtime:
    """A runtime for one group. ConfigError for an unknown name, MissingExtraError when its package is not installed."""
    if name not in RUNTIMES:
        raise ConfigError(unknown_name("runtime", name, RUNTIMES))
    module, _, class_name = RUNTIMES[name].partition(":")
    runtime: Runtime = getattr(import_module(module), class_name)()
    return runtime


def num_cores() -> int:
    """The cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

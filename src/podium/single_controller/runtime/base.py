"""The seam between group calls and the place where ranks run.

A runtime starts ranks, sends them calls, waits, diagnoses a rank from outside, kills. It takes no decision: what a failure
means, how long to wait for whom and what to report to the caller is `pending_call`'s work, the same for every runtime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from podium.cores import num_cores
from podium.errors import ConfigError, ResourceError, UnsupportedByRuntime, WorkerError, check_kind
from podium.runtimes import capabilities_of
from podium.single_controller.placement.resource_pool import ResourcePool
from podium.single_controller.rank.context import RankContext
from podium.single_controller.runtime.diagnostics import Diagnostics

CONSTRUCTOR = "__init__"
START_TIMEOUT_S = 120.0
"""A rank without a place and a process by then seldom gets one; an environment that Ray installs may take longer."""
START_TIMEOUT_S_PER_RANK = 1.0
"""Many processes import the same files from one disk, and register with one Ray."""
NUM_PORTS = 65536
DEVICES: dict[bool | None, Literal["cpu", "cuda"] | None] = {None: None, False: "cpu", True: "cuda"}
"""By a pool's `use_gpu`; a runtime that reserves devices knows better where it is None."""


@dataclass(frozen=True)
class GroupSpec:
    """What to start: `worker_class(*args, **kwargs)` on every rank of the pool."""

    name: str
    worker_class: type
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pool: ResourcePool
    threads_per_rank: int = 0
    """torch threads of each rank; 0 is the cores that it may use on its node divided by the ranks there."""
    worker_env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the ranks' processes, there from their start."""
    detached: bool = False
    """Whether the ranks outlive the driver."""
    name_prefix: str | None = None
    """What the ranks' names in the cluster begin with; None leaves them nameless, but for detached ones."""
    master_addr: str | None = None
    """The address that the ranks meet at, one of rank 0's node; None lets the runtime choose."""
    master_port_range: tuple[int, int] | None = None
    """The ports [low, high) one of which the ranks meet at; None takes any that is free."""
    start_timeout_s: float | None = None
    """How long the ranks may take to get their places and processes, before their constructors run; None: `start_limit_s`."""
    call_timeout_s: float | None = None
    """The limit of a call, unless it has its own."""
    node_setup: Callable[[], object] | None = None
    """Run by the first rank of each node, before any worker is built: what it raises says why the node cannot be used."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What only one runtime understands (Ray's own actor options)."""

    def __post_init__(self) -> None:
        check_kind("the pool of a group", self.pool, ResourcePool, "a ResourcePool")
        check_kind("name", self.name, str, "text")
        check_kind("name_prefix", self.name_prefix, (str, NoneType), "text or None")
        check_kind("threads_per_rank", self.threads_per_rank, int, "a number of threads")
        if self.start_timeout_s is not None:
            checked_start_timeout(self.start_timeout_s)
        if self.threads_per_rank < 0:
            raise ResourceError(f"threads_per_rank must be a number of threads or 0 for the default, got {self.threads_per_rank}")
        if self.master_port_range is not None:
            low, high = self.master_port_range
            if not 1 <= low < high <= NUM_PORTS:
                raise ConfigError(
                    f"master_port_range [low, high) must have ports of 1 to {NUM_PORTS - 1}, at least one, got [{low}, {high}): "
                    "for example (29500, 29600), or None for any that is free"
                )

    def contexts(self, runtime: str) -> list[RankContext]:
        """The place of each rank, without a rendezvous."""
        places = zip(self.pool.local_rank_list(), self.pool.local_world_size_list(), strict=True)
        cores = num_cores()
        return [
            RankContext(
                group=self.name,
                runtime=runtime,
                rank=rank,
                world_size=self.pool.world_size,
                local_rank=local_rank,
                local_world_size=local_world_size,
                threads=self.threads_on(cores, local_world_size),
                device_type=DEVICES[self.pool.use_gpu],
                call_timeout_s=self.call_timeout_s if capabilities_of(runtime).timeouts else None,
            )
            for rank, (local_rank, local_world_size) in enumerate(places)
        ]

    @property
    def start_limit_s(self) -> float:
        """`start_timeout_s`, and where it is None 120 s, or a second for each rank where that is more."""
        default = max(START_TIMEOUT_S, START_TIMEOUT_S_PER_RANK * self.pool.world_size)
        return default if self.start_timeout_s is None else self.start_timeout_s

    def threads_on(self, cores: int, local_world_size: int) -> int:
        """torch threads of each of the ranks on a node with so many cores."""
        return self.threads_per_rank or max(1, cores // local_world_size)


def nodes_not_ready(group: str, failures: Mapping[str, str], num_nodes: int) -> ResourceError:
    """The error for nodes on which `node_setup` failed: by the node's name, why."""
    listed = "".join(f"\n  {node}: {reason}" for node, reason in failures.items())
    return ResourceError(f"group {group!r} cannot start, {len(failures)} of {num_nodes} nodes are not ready:{listed}")


def checked_start_timeout(seconds: object) -> float:
    """The value of `start_timeout_s`. ConfigError unless it is a number of seconds, more than 0."""
    check_kind("start_timeout_s", seconds, (int, float), "a number of seconds")
    if not cast(float, seconds) > 0:
        raise ConfigError(f"start_timeout_s must be more than 0 seconds, got {seconds:g}")
    return cast(float, seconds)


class Reply(Enum):
    """What ranks send back."""

    VALUE = "value"
    """The result, as whatever travels best; only the runtime's `wait` can read it."""
    PLAIN = "plain"
    """The result itself, for a caller who takes it without us."""
    NOTHING = "nothing"
    """None: the result is not wanted."""
    REFERENCE = "reference"
    """Rows stay where they were made, and outlive their rank: the reply is `RemoteRows`. The value of any other result."""

    __hash__ = object.__hash__  # every call of every rank looks one up, and Enum's own is Python's


class RankCall(NamedTuple):
    """One method call on the ranks that are sent the same arguments, which travel once."""

    ranks: Sequence[int]
    role: str | None
    """Which of the workers that share the rank's process; None is the one that the group was made of."""
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_joined: bool = False
    """Whether rows of the answers will be joined. That copies them, so they may be views of a message's memory until then."""


def by_rank(calls: Iterable[RankCall]) -> dict[int, RankCall]:
    """The call of each rank, in rank order."""
    return dict(sorted((rank, call) for call in calls for rank in call.ranks))


class Answer(NamedTuple):
    """What a rank returned. The value is the caller's own: changing it changes nothing elsewhere."""

    value: Any


Outcome: TypeAlias = Answer | WorkerError
Ticket: TypeAlias = Any  # what a runtime gives for a call that it took; only that runtime knows what is inside


class Runtime(ABC):
    """The ranks of one group. Calls of a rank run in the order of `submit`, on the thread of its constructor."""

    @abstractmethod
    def start(self, spec: GroupSpec) -> dict[int, Ticket]:
        """Begin to build every rank's worker; the tickets are of the constructors, which may fail like any call.

        A second start, after `close`, builds them anew.
        """

    @abstractmethod
    def submit(self, calls: Sequence[RankCall], reply: Reply, quiet: Collection[int] = ()) -> dict[int, Ticket]:
        """Send one call to each rank; `quiet` ranks answer None whatever the reply. Arguments are copied.

        Among the arguments may be `RemoteRows`: the rank reads them from where they lie.
        """

    @abstractmethod
    def wait(self, tickets: Mapping[int, Ticket], timeout_s: float) -> dict[int, Outcome]:
        """The outcomes by rank, as soon as all are there, one of them is a failure, or the time is over; 0 only looks."""

    @abstractmethod
    def reference(self, ticket: Ticket) -> Any:
        """What stands for the result of a call with a plain reply in a `FutureList`."""

    @abstractmethod
    def diagnostics(self, ranks: Iterable[int], *, stacks: bool = False) -> dict[int, Diagnostics]:
        """What is known of these ranks; takes a second or two when stacks are asked for."""

    @abstractmethod
    def kill(self, ranks: Iterable[int]) -> None:
        """End these ranks now, whatever they are doing."""

    @abstractmethod
    def close(self) -> None:
        """End every rank and let go of everything, harmless when repeated."""

    def workers(self, keeper: object = None) -> Sequence[Any]:
        """Handles of the ranks' workers, by rank, for a caller who talks to them without us.

        Where ranks are processes, each handle keeps `keeper` alive, if one is given; the runtime itself does not hold these.
        """
        return ()

    def address(self) -> Any:
        """What another process gives to `reach`, of ranks that are processes."""
        raise UnsupportedByRuntime("ranks of this runtime cannot be called by another process")

    def reach(self, worker_class: type, address: Any) -> GroupSpec:
        """Take over the ranks of an `address`, instead of `start`; does not wait for them."""
        raise UnsupportedByRuntime("ranks of this runtime cannot be called by another process")

    def worker_names(self) -> list[str]:
        """The ranks' names in the cluster, by rank; none where ranks have no names."""
        return []

    def attach(
        self,
        worker_class: type,
        name_prefix: str | None,
        worker_names: Sequence[str] | None,
        handles: Sequence[Any] | None,
        timeout_s: float,
    ) -> GroupSpec:
        """Take over ranks that another driver has started as detached ones, instead of `start`.

        By names or handles, the ranks are those that are given: of one group or of several, all of them or some. Groups stand
        in the order in which they are given, the ranks of each in their own order.
        `timeout_s` is how long they may take to answer.
        """
        raise UnsupportedByRuntime("groups of this runtime end with their driver")


def build_runtime(name: str) -> Runtime:
    """A runtime for one set of worker processes. ConfigError for an unknown name, MissingExtraError without its package."""
    module, _, class_name = capabilities_of(name).implementation.partition(":")
    runtime: Runtime = getattr(import_module(module), class_name)()
    return runtime

"""`WorkerGroup`: workers of one class on the ranks of a pool, called as if they were one local object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

from podium.errors import ConfigError, GroupClosedError, RegistrationError, nearest
from podium.single_controller.group_call import GroupCall, Method, group_call
from podium.single_controller.mesh import Mesh
from podium.single_controller.pending_call import PendingCall
from podium.single_controller.registration import registration_of
from podium.single_controller.resource_pool import ResourcePool
from podium.single_controller.runtime.base import CONSTRUCTOR, GroupSpec, RankCall, Ticket, build_runtime
from podium.single_controller.runtime.capabilities import require
from podium.single_controller.worker import Worker

P = ParamSpec("P")
W = TypeVar("W", bound=Worker)

DEFAULT_CALL_TIMEOUT_S = 3600.0
"""Every wait has a limit. An hour is longer than any step, so it ends hangs and nothing else."""


class Init(Generic[W]):
    """A worker class with its constructor's arguments. TypeError at once when they do not fit."""

    def __init__(self, cls: Callable[P, W], /, *args: P.args, **kwargs: P.kwargs) -> None:
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise TypeError(f"a group is made of a subclass of Worker, got {cls!r}")
        try:
            inspect.signature(cls.__init__).bind(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}(): {error}") from None
        self.cls: type[Worker] = cls
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs


class WorkerGroup(Generic[W]):
    """One worker per rank of the pool, and a callable for each of their registered methods.

    `group.update(batch)` finds methods by name; `group.call.update(batch)` is the same, checked by type checkers. A group
    is ready, then perhaps broken (a rank died or had to be killed), then closed. Use it in a `with` block or `close()` it.
    """

    def __init__(
        self,
        pool: ResourcePool,
        init: Init[W] | type[W],
        *,
        runtime: str = "inline",
        name: str | None = None,
        threads_per_rank: int = 0,
        call_timeout_s: float | None = None,
    ) -> None:
        """Build every rank's worker; returns when all are built, raises what a constructor raised (WorkerError).

        threads_per_rank: torch threads of each rank, 0 for the machine's cores divided by the ranks on it.
        call_timeout_s: limit of each call and of the construction, None for an hour (inline knows no limit).
        """
        made = init if isinstance(init, Init) else Init(init)
        self.name = name or made.cls.__name__
        self.pool = pool
        self.runtime_name = runtime
        self._call_timeout_s = self._checked_timeout(call_timeout_s) or DEFAULT_CALL_TIMEOUT_S
        self._worker_class = made.cls
        self._calls = {method.name: group_call(self, method) for method in _registered_methods(made.cls)}
        self._meshes: dict[str | None, Mesh] = {None: Mesh.flat(pool.world_size)}
        self._ended: str | None = None
        self._runtime = build_runtime(runtime)
        self._start(GroupSpec(self.name, made.cls, made.args, made.kwargs, pool, threads_per_rank))

    @property
    def world_size(self) -> int:
        return self.pool.world_size

    @property
    def call(self) -> type[W]:
        """The group's methods, which a type checker sees as those of the worker class."""
        return cast(type[W], _Calls(self))

    def mesh(self, name: str | None) -> Mesh:
        """A mesh of the workers: they are asked at the first use. None is the one where every rank has its own shard."""
        if name not in self._meshes:
            self._meshes[name] = Mesh.from_rows(str(name), self._calls["_query_dispatch_info"](name))
        return self._meshes[name]

    def submit(self, method: str, calls: Mapping[int, RankCall], timeout_s: float | None) -> PendingCall:
        """Send a call to each of the ranks; `timeout_s` None is the group's own limit. GroupClosedError after the end."""
        if self._ended is not None:
            raise GroupClosedError(f"group {self.name!r} cannot run {method!r}: it {self._ended}")
        limit = self._checked_timeout(timeout_s)
        return self._pending(method, {rank: self._runtime.submit(rank, call) for rank, call in calls.items()}, limit)

    def close(self) -> None:
        """End the ranks. Harmless when repeated; every later call raises GroupClosedError."""
        self._ended = "was closed"
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __getattr__(self, name: str) -> GroupCall[..., Any]:
        calls: dict[str, GroupCall[..., Any]] = self.__dict__.get("_calls", {})  # absent while copy and pickle probe us
        if name in calls:
            return calls[name]
        raise AttributeError(self._why_not_callable(name, calls), name=name, obj=self)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._calls})

    def __repr__(self) -> str:
        state = f"it {self._ended}" if self._ended else "ready"
        return f"<WorkerGroup {self.name!r}: {self.world_size} x {self._worker_class.__name__} on {self.runtime_name!r}, {state}>"

    def _start(self, spec: GroupSpec) -> None:
        try:
            self._pending(CONSTRUCTOR, self._runtime.start(spec)).finish()
        except BaseException:  # Ctrl-C included: no rank stays behind without its group
            self.close()
            raise

    def _pending(self, method: str, tickets: Mapping[int, Ticket], timeout_s: float | None = None) -> PendingCall:
        limit = self._call_timeout_s if timeout_s is None else timeout_s
        return PendingCall(self._runtime, self.name, method, tickets, limit, on_broken=self._break)

    def _break(self, reason: str) -> None:
        self._ended = self._ended or f"is broken since {reason}"

    def _checked_timeout(self, timeout_s: float | None) -> float | None:
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"a time limit is more than 0 seconds, got {timeout_s:g}")
        if timeout_s is not None:
            require(self.runtime_name, "timeouts", f"time limit for calls (asked for: {timeout_s:g} s)")
        return timeout_s

    def _why_not_callable(self, name: str, calls: Mapping[str, object]) -> str:
        owner = self.__dict__.get("_worker_class", Worker)
        if callable(inspect.getattr_static(owner, name, None)):
            return f"{owner.__name__}.{name} exists but is not registered; decorate it with @register(dispatch_mode=...)"
        public = [known for known in calls if not known.startswith("_")]
        return f"{owner.__name__} has no method {name!r}{nearest(name, public)}; registered are: {', '.join(public) or 'none'}"


class _Calls:
    """A group's methods without the group's own names."""

    def __init__(self, group: WorkerGroup[Any]) -> None:
        self._group = group

    def __getattr__(self, name: str) -> GroupCall[..., Any]:
        return WorkerGroup.__getattr__(self._group, name)


def _registered_methods(worker_class: type[Worker]) -> list[Method]:
    # getattr_static: looking for methods must not run properties
    found = {name: inspect.getattr_static(worker_class, name) for name in dir(worker_class)}
    methods = [Method.of(member, registered) for member in found.values() if (registered := registration_of(member))]
    hidden = sorted(method.name for method in methods if hasattr(WorkerGroup, method.name))
    if hidden:
        names = ", ".join(hidden)
        raise RegistrationError(f"{worker_class.__name__} registers {names}, a name that WorkerGroup has itself; rename it")
    return methods

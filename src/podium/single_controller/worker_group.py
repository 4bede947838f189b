"""`WorkerGroup`: workers of one class on the ranks of a pool, called as if they were one local object."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from podium.errors import DispatchError, RegistrationError, nearest, unknown_name
from podium.single_controller.colocation import ColocatedWorker
from podium.single_controller.crew import Crew
from podium.single_controller.futures import FutureList, GroupFuture
from podium.single_controller.group_call import GroupCall, Invocation, Method, group_call
from podium.single_controller.init import Init, class_of
from podium.single_controller.mesh import Mesh
from podium.single_controller.modes import Dispatch, Execute
from podium.single_controller.registration import Registration, registration_of
from podium.single_controller.resource_pool import ResourcePool
from podium.single_controller.runtime.base import GroupSpec
from podium.single_controller.status import GroupStatus
from podium.single_controller.supervision import SLOW_AFTER_S

W = TypeVar("W")


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
        slow_after_s: float = SLOW_AFTER_S,
        auto_padding: bool = False,
        worker_env: Mapping[str, str] | None = None,
        name_prefix: str | None = None,
        detached: bool = False,
        master_addr: str | None = None,
        master_port_range: tuple[int, int] | None = None,
    ) -> None:
        """Build every rank's worker; returns when all are built, raises what a constructor raised (WorkerError).

        threads_per_rank: torch threads of each rank, 0 for the machine's cores divided by the ranks on it.
        call_timeout_s: limit of each call and of the construction, None for an hour (inline knows no limit).
        slow_after_s: when a call that still runs names its stragglers in the log, and where they are.
        auto_padding: batches are padded to shards of equal size, and results trimmed; else shards may be uneven.
        worker_env: environment variables of the ranks' processes. name_prefix: begins the ranks' names in the cluster.
        detached: the ranks outlive the driver; `from_detached` finds them by that prefix.
        master_addr, master_port_range: the address, and ports [low, high) one of which, the ranks meet at.
        """
        made = init if isinstance(init, Init) else Init(init)
        methods = _methods_by_role(made.cls)
        spec = GroupSpec(
            name=name or made.cls.__name__,
            worker_class=made.cls,
            args=made.args,
            kwargs=made.kwargs,
            pool=pool,
            threads_per_rank=threads_per_rank,
            worker_env=dict(worker_env or {}),
            detached=detached,
            name_prefix=name_prefix,
            master_addr=master_addr,
            master_port_range=master_port_range,
            options=dict(made.options),
        )
        crew = Crew(spec, runtime, call_timeout_s=call_timeout_s, slow_after_s=slow_after_s, auto_padding=auto_padding)
        self._become(crew, made.cls, None, methods)
        crew.start()

    @classmethod
    def from_detached(
        cls,
        init: Init[W] | type[W],
        *,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        runtime: str = "ray",
        **options: Any,
    ) -> Self:
        """The group of ranks that another driver started with `detached=True`, by their prefix, names or handles.

        `close()` lets go of them; `end()` ends them and gives back what they held.
        """
        group = cls.__new__(cls)
        group._attach(class_of(init), name_prefix, worker_names, worker_handles, options, runtime)
        return group

    def _attach(
        self,
        worker_class: type,
        name_prefix: str | None,
        worker_names: Sequence[str] | None,
        worker_handles: Sequence[Any] | None,
        options: Mapping[str, Any],
        runtime: str = "ray",
    ) -> None:
        crew = Crew.attached(worker_class, runtime, name_prefix, worker_names, worker_handles, options)
        self._become(crew, worker_class, None, _methods_by_role(worker_class))

    def _become(self, crew: Crew, worker_class: type, role: str | None, methods: Mapping[str | None, list[Method]]) -> None:
        self.crew = crew
        self._worker_class = worker_class
        self._role = role
        self._methods = methods
        self._fused: dict[str, WorkerGroup[Any]] = {}
        self._calls = {method.name: group_call(self, method) for method in methods[role]}

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.crew.name if self._role is None else f"{self.crew.name}.{self._role}"

    @property
    def pool(self) -> ResourcePool:
        return self.crew.spec.pool

    @property
    def runtime_name(self) -> str:
        return self.crew.runtime_name

    @property
    def world_size(self) -> int:
        return self.crew.world_size

    @property
    def auto_padding(self) -> bool:
        return self.crew.auto_padding

    @property
    def workers(self) -> Sequence[Any]:
        """The ranks' own handles, in rank order: on Ray its actors, inline the workers themselves."""
        return self.crew.runtime.workers()

    @property
    def worker_names(self) -> list[str]:
        """The ranks' names in the cluster, in rank order; by them `from_detached` finds a detached group."""
        return self.crew.runtime.worker_names()

    def mesh(self, name: str | None) -> Mesh:
        """A mesh of the workers: they are asked at the first use. None is the one where every rank has its own shard."""
        if name is None:
            return self.crew.flat_mesh
        key = (self._role, name)
        if key not in self.crew.meshes:
            self.crew.meshes[key] = Mesh.from_rows(name, self._call_named("_query_dispatch_info")(name))
        return self.crew.meshes[key]

    # -- its methods --------------------------------------------------------------------------------------------------

    @property
    def call(self) -> type[W]:
        """The group's methods, which a type checker sees as those of the worker class."""
        return cast(type[W], _Calls(self))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> FutureList[Any]:
        """Call any method, registered or not, on every rank; does not wait. Arguments are copied, `PerRank` ones scattered."""
        return cast(FutureList[Any], self._invocation(method_name, Execute.ALL, args, kwargs).future())

    execute_all_async = execute_all

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all`, waiting for every rank's result."""
        return self.execute_all(method_name, *args, **kwargs).get()

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> GroupFuture[Any]:
        """Call any method, registered or not, on rank 0; does not wait."""
        return cast(GroupFuture[Any], self._invocation(method_name, Execute.RANK_ZERO, args, kwargs).future())

    execute_rank_zero_async = execute_rank_zero

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero`, waiting for the result."""
        return self.execute_rank_zero(method_name, *args, **kwargs).get()

    def _invocation(self, name: str, execute: Execute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
        static = inspect.getattr_static(self._worker_class, name, None)
        if not callable(static):
            known = [member for member in dir(self._worker_class) if not member.startswith("_")]
            message = f"{self._worker_class.__name__} has no method {name!r}{nearest(name, known)}"
            raise AttributeError(message, name=name, obj=self)
        registration = Registration(Dispatch.ONE_TO_ALL, execute, blocking=False, materialize_futures=True, is_async=False)
        method = Method(name, self._role, registration, inspect.Signature(), None)
        return Invocation(self, method, args, kwargs, timeout_s=None)

    # -- colocated workers --------------------------------------------------------------------------------------------

    def spawn(self, prefix_set: Collection[str] | None = None) -> dict[str, WorkerGroup[Any]]:
        """A group for each of these roles (None: all) of a colocated class, on the same processes and sharing their life."""
        roles = [role for role in self._methods if role is not None]
        asked = roles if prefix_set is None else list(prefix_set)
        for role in asked:
            if role not in roles:
                raise DispatchError(f"group {self.name!r}: {unknown_name('role', role, roles)}")
        return {role: self._view(role) for role in asked}

    spawn_fused = spawn

    def fuse(self, prefix_set: Collection[str] | None = None) -> None:
        """Make the roles' groups attributes of this one: `group.actor.update(batch)` beside `group.method(batch)`."""
        groups = self.spawn(prefix_set)
        hidden = [role for role in groups if hasattr(type(self), role)]
        if hidden:
            names = ", ".join(map(repr, hidden))
            raise RegistrationError(
                f"a group has {names} itself, so no role can be an attribute of that name: use spawn(), or rename"
            )
        self._fused.update(groups)

    def _view(self, role: str) -> WorkerGroup[Any]:
        view: WorkerGroup[Any] = type(self).__new__(type(self))
        view._become(self.crew, self._worker_class.raw_cls_dict[role].cls, role, {role: self._methods[role]})  # type: ignore[attr-defined]
        return view

    # -- its life -----------------------------------------------------------------------------------------------------

    def status(self, *, stacks: bool = False) -> GroupStatus:
        """Its state, the calls that are not over and what is known of every rank; `stacks` asks the ranks where they are."""
        return self.crew.status(stacks=stacks)

    def restart(self) -> None:
        """End every rank and build it anew, after it broke or before; colocated groups restart together."""
        self.crew.restart()

    def close(self) -> None:
        """End the ranks (of an attached group: let go of them). Harmless when repeated; later calls raise GroupClosedError.

        A call that failed and that nobody has read is raised, once all is given back.
        """
        self.crew.close()

    def end(self) -> None:
        """End the ranks, also those that another driver started."""
        self.crew.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.crew.close_quietly()  # what happened in the block is the news

    # -- finding a method ---------------------------------------------------------------------------------------------

    def _call_named(self, name: str) -> GroupCall[..., Any]:
        calls: dict[str, GroupCall[..., Any]] = self.__dict__.get("_calls", {})  # absent while copy and pickle probe us
        if name in calls:
            return calls[name]
        if aliased := [method for method in self._aliases() if f"{method.role}_{method.name}" == name]:
            return self._only(name, aliased)
        raise AttributeError(self._why_not_callable(name, calls), name=name, obj=self)

    def _only(self, name: str, methods: list[Method]) -> GroupCall[..., Any]:
        if len(methods) > 1:
            meant = " or ".join(f"spawn()[{method.role!r}].{method.name}" for method in methods)
            raise AttributeError(f"{name!r} could mean {meant}: say which", name=name, obj=self)
        self._calls[name] = group_call(self._view(cast(str, methods[0].role)), methods[0])
        return self._calls[name]

    def _aliases(self) -> Iterator[Method]:
        """The methods of roles, which this group also has as `<role>_<method>`."""
        for role, methods in self.__dict__.get("_methods", {}).items():
            if role is not None and role != self._role:
                yield from methods

    def __getattr__(self, name: str) -> Any:
        fused: dict[str, WorkerGroup[Any]] = self.__dict__.get("_fused", {})
        return fused[name] if name in fused else self._call_named(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._calls, *self._fused})

    def __repr__(self) -> str:
        life = self.crew.life
        state = life.state.value + (f" since {life.reason}" if life.reason else "")
        what = f"{self.world_size} x {self._worker_class.__name__} on {self.runtime_name!r}"
        return f"<{type(self).__name__} {self.name!r}: {what}, {state}>"

    def _why_not_callable(self, name: str, calls: Mapping[str, object]) -> str:
        owner = self.__dict__.get("_worker_class", object)
        if callable(inspect.getattr_static(owner, name, None)):
            return f"{owner.__name__}.{name} exists but is not registered; decorate it with @register(dispatch_mode=...)"
        public = [known for known in calls if not known.startswith("_")]
        roles = [role for role in self.__dict__.get("_methods", {}) if role not in (None, self.__dict__.get("_role"))]
        if name in roles:
            return f"{name!r} is a role: spawn()[{name!r}] is its group, fuse() makes it an attribute"
        return f"{owner.__name__} has no method {name!r}{nearest(name, public)}; registered are: {', '.join(public) or 'none'}"


class _Calls:
    """A group's methods without the group's own names."""

    def __init__(self, group: WorkerGroup[Any]) -> None:
        self._group = group

    def __getattr__(self, name: str) -> GroupCall[..., Any]:
        return self._group._call_named(name)


def _methods_by_role(worker_class: type) -> dict[str | None, list[Method]]:
    roles = worker_class.raw_cls_dict if issubclass(worker_class, ColocatedWorker) else {}
    return {None: _registered_methods(worker_class, None)} | {
        role: _registered_methods(init.cls, role) for role, init in roles.items()
    }


def _registered_methods(worker_class: type, role: str | None) -> list[Method]:
    # getattr_static: looking for methods must not run properties
    found = {name: inspect.getattr_static(worker_class, name) for name in dir(worker_class)}
    methods = [Method.of(member, registered, role) for member in found.values() if (registered := registration_of(member))]
    hidden = sorted(method.name for method in methods if hasattr(WorkerGroup, method.name))
    if hidden:
        names = ", ".join(hidden)
        raise RegistrationError(f"{worker_class.__name__} registers {names}, a name that WorkerGroup has itself; rename it")
    return methods

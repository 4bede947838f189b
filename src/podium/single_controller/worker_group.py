"""`WorkerGroup`: workers of one class on the ranks of a pool, called as if they were one local object."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from podium.errors import DispatchError, RegistrationError, unknown_name
from podium.single_controller.calls.futures import FutureList, GroupFuture
from podium.single_controller.calls.group_call import GroupCall, Invocation, group_call
from podium.single_controller.init import Init, class_of
from podium.single_controller.methods import Methods
from podium.single_controller.placement.resource_pool import ResourcePool
from podium.single_controller.processes.status import GroupStatus
from podium.single_controller.processes.stragglers import SLOW_AFTER_S
from podium.single_controller.processes.worker_processes import Address, WorkerProcesses
from podium.single_controller.routing.mesh import Mesh
from podium.single_controller.routing.modes import Execute
from podium.single_controller.runtime.base import GroupSpec

W = TypeVar("W")
MESH_QUERY = "_query_mesh"
"""The method of `Worker` that reports a rank's place in a mesh."""


class WorkerGroup(Generic[W]):
    """One worker per rank of the pool, and a callable for each of their registered methods.

    `group.update(batch)` finds methods by name; `group.call.update(batch)` is the same for type checkers. A group is ready, then
    perhaps broken (a rank died or was killed), then closed. Use it in a `with` block or `close()` it. A group that is only
    dropped is closed when Python has collected it and every handle of its `workers`, unless it is detached.

    A group may be an argument of a call, of a Ray task or of an actor. The receiver calls the same ranks but does not own them:
    its `close()` does not end them, and they live as long as the group that started them.
    """

    processes: WorkerProcesses
    """The ranks' processes, which the groups of several roles share."""
    _worker_class: type
    _role: str | None
    _methods: Methods
    _fused: dict[str, WorkerGroup[Any]]
    _calls: dict[str, GroupCall[..., Any]]

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
        start_timeout_s: float | None = None,
        node_setup: Callable[[], object] | None = None,
    ) -> None:
        """Build every rank's worker; returns when all are built. WorkerError if a constructor raised.

        threads_per_rank: torch threads of each rank, 0 for its node's cores divided by the ranks there.
        call_timeout_s: limit of each call, of the constructors and of node_setup; None is an hour (inline does not have limits).
        start_timeout_s: limit for places, processes and their environment; None is 120 s, or a second per rank if that is more.
        node_setup: run by the first rank of each node before the constructors; ResourceError names the nodes where it raises.
        slow_after_s: when the log first names the stragglers of a running call, with their stacks.
        auto_padding: batches are padded to shards of equal size, and results trimmed; otherwise shards may be uneven.
        worker_env: environment variables of the ranks' processes. name_prefix: prefix of the ranks' names in the cluster.
        detached: the ranks outlive the driver; `from_detached` finds them by that prefix.
        master_addr, master_port_range: where the ranks meet: the address, and the range [low, high) of its port.
        """
        made = init if isinstance(init, Init) else Init(init)
        methods = _methods_of(made.cls, type(self))
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
            start_timeout_s=start_timeout_s,
            node_setup=node_setup,
            options=dict(made.options),
        )
        processes = WorkerProcesses(
            spec, runtime, call_timeout_s=call_timeout_s, slow_after_s=slow_after_s, auto_padding=auto_padding
        )
        self._become(processes, made.cls, None, methods)
        processes.start()

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

        Names and handles may be of several groups, or of some ranks of one: groups keep the order given, the ranks of each their
        own order. options: call_timeout_s, slow_after_s and auto_padding of the constructor; start_timeout_s, how long the ranks
        may take to report their place, which they do between two calls of another driver.
        `close()` detaches from the ranks; `end()` ends them and frees their resources.
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
        processes = WorkerProcesses.attached(worker_class, runtime, name_prefix, worker_names, worker_handles, options)
        self._become(processes, worker_class, None, _methods_of(worker_class, type(self)))

    def _become(self, processes: WorkerProcesses, worker_class: type, role: str | None, methods: Methods) -> None:
        self.processes = processes
        self._worker_class = worker_class
        self._role = role
        self._methods = methods
        self._fused = {}
        self._calls = {method.name: group_call(self, method) for method in methods.own}

    # -- properties ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.processes.name if self._role is None else f"{self.processes.name}.{self._role}"

    @property
    def pool(self) -> ResourcePool:
        return self.processes.spec.pool

    @property
    def runtime_name(self) -> str:
        return self.processes.runtime_name

    @property
    def world_size(self) -> int:
        return self.processes.world_size

    @property
    def auto_padding(self) -> bool:
        return self.processes.auto_padding

    @property
    def workers(self) -> Sequence[Any]:
        """The ranks' own handles, in rank order: on Ray its actors, inline the workers themselves.

        In this process each handle keeps the ranks alive, also after the group itself is dropped.
        """
        return self.processes.workers()

    @property
    def worker_names(self) -> list[str]:
        """The ranks' names in the cluster, in rank order; `from_detached` takes them."""
        return self.processes.runtime.worker_names()

    def mesh(self, name: str | None, timeout_s: float | None = None) -> Mesh:
        """A mesh of the workers, which are queried at its first use; `timeout_s` limits that, None is the limit of any call.

        None is the name of the mesh in which every rank has its own shard.
        """
        if name is None:
            return self.processes.flat_mesh
        key = (self._role, name)
        if key not in self.processes.meshes:
            self.processes.meshes[key] = Mesh.from_rows(name, self._mesh_query().options(timeout=timeout_s)(name))
        return self.processes.meshes[key]

    def _mesh_query(self) -> GroupCall[..., Any]:
        if not hasattr(self._worker_class, MESH_QUERY):
            raise DispatchError(
                f"{self._worker_class.__name__} must be a subclass of Worker to be part of a mesh: derive it from that and call "
                "_register_dispatch_collect_info, or register the method with Dispatch.DP_COMPUTE_PROTO"
            )
        return self._call_named(MESH_QUERY)

    # -- methods ------------------------------------------------------------------------------------------------------

    @property
    def call(self) -> type[W]:
        """The group's methods, which a type checker sees as those of the worker class."""
        return cast(type[W], _Calls(self))

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> FutureList[Any]:
        """Call any method, registered or not, on every rank without waiting. `PerRank` arguments are scattered, others copied."""
        return cast(FutureList[Any], self._invocation(method_name, Execute.ALL, args, kwargs).future())

    execute_all_async = execute_all

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """`execute_all`, and wait for every rank's result."""
        return self.execute_all(method_name, *args, **kwargs).get()

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> GroupFuture[Any]:
        """Call any method, registered or not, on rank 0, without waiting."""
        return cast(GroupFuture[Any], self._invocation(method_name, Execute.RANK_ZERO, args, kwargs).future())

    execute_rank_zero_async = execute_rank_zero

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """`execute_rank_zero`, and wait for the result."""
        return self.execute_rank_zero(method_name, *args, **kwargs).get()

    def _invocation(self, name: str, execute: Execute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
        return Invocation(self, self._methods.any(name, execute), args, kwargs, timeout_s=None)

    # -- colocated workers --------------------------------------------------------------------------------------------

    def spawn(self, prefix_set: Collection[str] | None = None) -> dict[str, WorkerGroup[Any]]:
        """A group for each of these roles (None: all) of a colocated class, on the same processes, which they share."""
        roles = self._methods.roles if self._role is None else [self._role]
        asked = roles if prefix_set is None else list(prefix_set)
        for role in asked:
            if role not in roles:
                raise DispatchError(f"group {self.name!r}: {unknown_name('role', role, roles)}")
        return {role: self._view(role) for role in asked}

    spawn_fused = spawn

    def fuse(self, prefix_set: Collection[str] | None = None) -> None:
        """Make the roles' groups attributes of this one: `group.actor.update(batch)` beside `group.method(batch)`."""
        groups = self.spawn(prefix_set)
        hidden = [role for role in groups if hasattr(type(self), role) or role in vars(self)]
        if hidden:
            names = ", ".join(map(repr, hidden))
            raise RegistrationError(
                f"the role {names} must not have the name of an attribute of the group: use spawn(), or rename the role"
            )
        self._fused.update(groups)

    def _view(self, role: str) -> WorkerGroup[Any]:
        if role == self._role:
            return self
        view: WorkerGroup[Any] = type(self).__new__(type(self))
        methods = self._methods.of_role(role)
        view._become(self.processes, methods.worker_class, role, methods)
        return view

    # -- copies -------------------------------------------------------------------------------------------------------

    def __copy__(self) -> Self:
        return self._same_on(self.processes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._same_on(self.processes.lent())

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (type(self), self.processes.address(), self._role, tuple(self._fused))

    def _same_on(self, processes: WorkerProcesses) -> Self:
        group = type(self).__new__(type(self))
        group._become(processes, self._worker_class, self._role, self._methods)
        group.fuse(self._fused)
        return group

    # -- lifecycle ---------------------------------------------------------------------------------------------------

    def status(self, *, stacks: bool = False) -> GroupStatus:
        """The state, the calls that are not over and the state of every rank; `stacks` also samples the ranks' stacks."""
        return self.processes.status(stacks=stacks)

    def restart(self) -> None:
        """End every rank and build it anew, whether the group is broken or not; groups of roles restart together."""
        self.processes.restart()

    def close(self) -> None:
        """End the ranks (an attached group only detaches). Harmless when repeated; later calls raise GroupClosedError.

        Then raise the failure of a call that the driver has not read.
        """
        self.processes.close()

    def end(self) -> None:
        """End the ranks, even if another driver started them."""
        self.processes.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.processes.close_quietly()  # the error of the block is raised, and no other

    # -- finding a method ---------------------------------------------------------------------------------------------

    def _call_named(self, name: str) -> GroupCall[..., Any]:
        if "_calls" not in vars(self):  # copy and pickle look up attributes before __init__
            raise AttributeError(name)
        if name not in self._calls:
            flat = self._methods.flat(name)
            if flat is None:
                raise AttributeError(self._methods.why_not(name), name=name, obj=self)
            self._calls[name] = group_call(self._view(cast(str, flat.role)), flat)
        return self._calls[name]

    def __getattr__(self, name: str) -> Any:
        fused: dict[str, WorkerGroup[Any]] = vars(self).get("_fused", {})
        return fused[name] if name in fused else self._call_named(name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._calls, *self._fused})

    def __repr__(self) -> str:
        what = f"{self.world_size} x {self._worker_class.__name__} on {self.runtime_name!r}"
        return f"<{type(self).__name__} {self.name!r}: {what}, {self.processes.lifecycle}>"


class _Calls:
    """A group's methods, without the group's own attributes."""

    def __init__(self, group: WorkerGroup[Any]) -> None:
        self._group = group

    def __getattr__(self, name: str) -> GroupCall[..., Any]:
        return self._group._call_named(name)


def _received(kind: type[WorkerGroup[Any]], address: Address, role: str | None, fused: Collection[str]) -> WorkerGroup[Any]:
    """Unpickle a group that another process sent."""
    group = kind.__new__(kind)
    group._become(WorkerProcesses.reached(address), address.worker_class, None, _methods_of(address.worker_class, kind))
    group.fuse(fused)
    return group if role is None else group._view(role)


def _methods_of(worker_class: type, kind: type[WorkerGroup[Any]]) -> Methods:
    """The class's methods. RegistrationError if one has the name of an attribute of the group."""
    methods = Methods.of(worker_class)
    taken = {*dir(kind), *WorkerGroup.__annotations__}
    hidden = sorted({name for name in methods.registered_names if name in taken})
    if hidden:
        names = ", ".join(hidden)
        raise RegistrationError(
            f"{worker_class.__name__} must not register {names}, the name of an attribute of WorkerGroup: rename it"
        )
    return methods

"""The names of verl's single controller, each a thin layer over `podium.single_controller`, on the runtime `ray`.

What behaves differently, and why, is in `docs/coming-from-verl.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, Self, TypeVar

from podium.compat.verl.pools import RayResourcePool, extract_groups
from podium.errors import ConfigError, ResourceError
from podium.single_controller.colocation import create_colocated_worker_cls
from podium.single_controller.init import Init, class_of
from podium.single_controller.placement.resource_pool import ResourcePool
from podium.single_controller.rank.context import current_context
from podium.single_controller.routing.dispatch import ROUTES, get_predefined_dispatch_fn, set_route
from podium.single_controller.routing.mesh import Mesh
from podium.single_controller.routing.modes import DispatchMode
from podium.single_controller.worker import join_peers
from podium.single_controller.worker_group import WorkerGroup

P = ParamSpec("P")
W = TypeVar("W")

SubRayResourcePool = RayResourcePool
create_colocated_worker_cls_fused = create_colocated_worker_cls

PLACEMENT_OPTIONS = frozenset({"num_cpus", "num_gpus", "scheduling_strategy", "name", "lifetime", "max_concurrency"})


class ClassWithInitArgs(Init[W]):
    """`Init` whose class may be given by name: `ClassWithInitArgs(cls=MyWorker, x=2)`."""

    def __init__(self, cls: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> None:
        super().__init__(cls, *args, **kwargs)


class RayClassWithInitArgs(ClassWithInitArgs[W]):
    """`ClassWithInitArgs` with options of Ray's actors."""

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Add options of `ray.remote`. ConfigError for those of placement, which belong to the pool."""
        placement = sorted(PLACEMENT_OPTIONS & set(options))
        if placement:
            raise ConfigError(f"{', '.join(placement)} must be set on the resource pool or the group, not as an actor option")
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, float]) -> None:
        """Custom resources for every actor, out of those that the pool reserved: its `accelerator_type`."""
        self.options["resources"] = {**self.options.get("resources", {}), **additional_resource}


class RayWorkerGroup(WorkerGroup[W]):
    """`WorkerGroup` on Ray, with verl's arguments; without a pool it attaches to workers that already run."""

    def __init__(
        self,
        resource_pool: ResourcePool | None = None,
        ray_cls_with_init: Init[W] | type[W] | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        *,
        use_gpu: bool | None = None,
        device_name: str = "cuda",
        master_addr: str | None = None,
        master_port: int | None = None,
        master_port_range: Sequence[int] | None = None,
        profile_steps: Sequence[int] | None = None,
        worker_nsight_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """See `WorkerGroup`, whose other options are accepted too. ConfigError if two options contradict each other."""
        given = _given(ray_cls_with_init)
        if resource_pool is None:
            self._attach(class_of(given), name_prefix, worker_names, worker_handles, options)
            return
        made = given if isinstance(given, Init) else Init(given)
        if use_gpu and resource_pool.use_gpu is False:
            raise ConfigError("use_gpu must not be True for a pool that was made with use_gpu=False; change one of them")
        if (master_addr is None) != (master_port is None):
            raise ConfigError(f"master_addr and master_port must be given together, got {master_addr!r} and {master_port!r}")
        if (profile_steps is None) != (worker_nsight_options is None):
            got = f"{profile_steps!r} and {worker_nsight_options!r}"
            raise ConfigError(f"profile_steps and worker_nsight_options must be given together, got {got}")
        super().__init__(
            resource_pool.on_device(device_name),
            made.with_options({"bin_pack": bin_pack, **_nsight(made, profile_steps, worker_nsight_options)}),
            runtime="ray",
            name_prefix=name_prefix,
            detached=detached,
            master_addr=master_addr,
            master_port_range=_port_range(master_port, master_port_range),
            **options,
        )

    @property
    def _workers(self) -> list[Any]:
        return list(self.workers)

    @property
    def _worker_names(self) -> list[str]:
        return self.worker_names

    @property
    def _dispatch_info(self) -> dict[str, list[int]]:
        """By the name of each mesh that a call has used: the dp_rank of every rank."""
        return {name: list(mesh.dp_ranks) for name, mesh in self._known_meshes()}

    @property
    def _collect_info(self) -> dict[str, list[bool]]:
        """By the name of each mesh that a call has used: whether each rank's result is collected."""
        return {name: list(mesh.collects) for name, mesh in self._known_meshes()}

    def _known_meshes(self) -> list[tuple[str, Mesh]]:
        return [(name, mesh) for (role, name), mesh in self.processes.meshes.items() if role == self._role and name is not None]

    @property
    def master_address(self) -> str:
        """Where the ranks meet; calls rank 0."""
        return str(self.execute_rank_zero_sync("get_master_addr_port")[0])

    @property
    def master_port(self) -> str:
        return str(self.execute_rank_zero_sync("get_master_addr_port")[1])

    @property
    def wg_dict(self) -> dict[str, WorkerGroup[Any]] | None:
        """The groups of the roles that `fuse` made attributes of this one; None before."""
        return dict(self._fused) or None

    @property
    def sub_cls_name(self) -> str:
        """The role of a group that `spawn` or `fuse` made; else empty."""
        return self._role or ""

    @property
    def method_names(self) -> list[str]:
        """The registered methods that the group can call."""
        return [method.name for method in self._methods.own]

    @classmethod
    def from_detached(
        cls,
        init: Init[W] | type[W] | None = None,
        *,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: Init[W] | type[W] | None = None,
        runtime: str = "ray",
        **options: Any,
    ) -> Self:
        """`WorkerGroup.from_detached`; `ray_cls_with_init` is another name of its first argument."""
        return super().from_detached(
            _given(init or ray_cls_with_init),
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            runtime=runtime,
            **options,
        )


class _ModeFunctions(MutableMapping[DispatchMode, dict[str, Callable[..., Any]]]):
    """The functions of each dispatch mode, as in verl's table of that name: a view, so a change applies from the next call on."""

    def __getitem__(self, mode: DispatchMode) -> dict[str, Callable[..., Any]]:
        if mode not in ROUTES:
            raise KeyError(mode)
        return get_predefined_dispatch_fn(mode)

    def __setitem__(self, mode: DispatchMode, functions: Mapping[str, Callable[..., Any]]) -> None:
        set_route(mode, functions["dispatch_fn"], functions["collect_fn"])

    def __delitem__(self, mode: DispatchMode) -> None:
        del ROUTES[mode]

    def __iter__(self) -> Iterator[DispatchMode]:
        return iter(ROUTES)

    def __len__(self) -> int:
        return len(ROUTES)

    def copy(self) -> dict[DispatchMode, dict[str, Callable[..., Any]]]:
        return dict(self)


DISPATCH_MODE_FN_REGISTRY = _ModeFunctions()


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """References to the values in Ray's store, in order. `max_workers` threads put them there; None: one per value, up to 16."""
    import ray

    with ThreadPoolExecutor(max_workers or min(len(data_list), 16) or 1) as threads:
        return list(threads.map(ray.put, data_list))


def sort_placement_group_by_node_ip(pgs: Sequence[Any]) -> list[Any]:
    """Ray's placement groups in the numeric order of their nodes' addresses; see `placement.sort_by_node_ip`."""
    from podium.single_controller.runtime.ray.cluster import sort_groups

    return sort_groups(pgs)


def extract_pg_from_exist(
    resource_pools: Mapping[str, RayResourcePool], src_role_names: Sequence[str], resource_pool: RayResourcePool
) -> list[Any]:
    """One of the named pools' placement groups for each node that `resource_pool` asks for, in its order."""
    missing = [name for name in src_role_names if name not in resource_pools]
    if missing:
        raise ResourceError(f"there is no pool {', '.join(map(repr, missing))}; there are: {', '.join(resource_pools) or 'none'}")
    groups = [group for name in src_role_names for group in resource_pools[name].get_placement_groups()]
    return extract_groups([(group, group.bundle_count) for group in groups], resource_pool.store)


def initialize_global_process_group_ray(timeout_second: float | None = None, backend: str | None = None) -> None:
    """`self.init_process_group(backend, timeout_s=...)` for code of a worker that has no `self` at hand.

    The rank is the one that this code runs as. DIST_INIT_METHOD is ignored: the group defines where its ranks meet.
    """
    join_peers(current_context(), backend, timeout_second)


def _port_range(port: int | None, port_range: Sequence[int] | None) -> tuple[int, int] | None:
    if port is not None:
        return int(port), int(port) + 1
    if port_range is None:
        return None
    low, high = port_range
    return int(low), int(high)


def _given(ray_cls_with_init: Init[W] | type[W] | None) -> Init[W] | type[W]:
    if ray_cls_with_init is None:
        raise ConfigError("ray_cls_with_init must be the class of the workers, whose methods the group offers, got None")
    return ray_cls_with_init


def _nsight(init: Init[Any], steps: Sequence[int] | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Nsight's options for Ray; unless set, the capture ends after the given steps."""
    if steps is None or options is None:
        return {}
    nsight = dict(options)
    if nsight.get("capture-range-end", "") is None:
        nsight["capture-range-end"] = f"repeat-shutdown:{6 * len(steps)}"
    return {"runtime_env": {**init.options.get("runtime_env", {}), "nsight": nsight}}

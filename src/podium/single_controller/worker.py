"""`Worker`: the base class of what runs on ranks. It knows its rank, and the meshes that it is part of."""

from __future__ import annotations

import operator
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cached_property
from typing import Any, ClassVar, Self, SupportsIndex, TypeVar

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it without saying so
from torch.distributed.constants import default_pg_timeout

from podium.errors import ConfigError, DispatchError, RegistrationError, check_kind, nearest, unknown_name
from podium.runtimes import require
from podium.single_controller.rank.context import RankContext, current_context
from podium.single_controller.rank.devices import collective_backend, own_device, use_device
from podium.single_controller.register import register
from podium.single_controller.routing.modes import Dispatch, Execute, check_mesh_name

R = TypeVar("R")
REPORT_FIRST_S = 60.0
"""A collective may wait this much longer than a call, so that the driver reports a hang before torch aborts the process."""
ELSEWHERE = ("192.0.2.1", 9)
"""An unassigned address (RFC 5737): its route starts at the address by which other nodes reach this one."""


class Worker:
    """One rank of a group. Outside any group it is a group of one, so `MyWorker()` works as a plain object.

    Its rank is set before `__init__` runs, whether or not a subclass calls `super().__init__()`.
    """

    fused_worker_attr_name: ClassVar[str] = "fused_worker_dict"
    fused_worker_dict: dict[str, Any]
    """The workers of this process by role, one dict for all of them; empty without roles."""
    _rank_context: RankContext
    _meshes: dict[str, tuple[int, bool]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        for name, value in (("_rank_context", current_context()), ("_meshes", {}), ("fused_worker_dict", {})):
            object.__setattr__(worker, name, value)  # a frozen class, or one with its own __setattr__, refuses assignments
        return worker

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        """Takes no other arguments unless the class does.

        cuda_visible_devices: what CUDA_VISIBLE_DEVICES becomes in the rank's process; None leaves it alone. UnsupportedByRuntime
        if the ranks do not have processes of their own.
        """
        if cuda_visible_devices is not None:
            check_kind("cuda_visible_devices", cuda_visible_devices, str, "text like '0,1', or None")
            require(self._rank_context.runtime, "own_processes", "CUDA_VISIBLE_DEVICES for each rank")
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices

    # -- its place ----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._rank_context.rank

    @property
    def world_size(self) -> int:
        return self._rank_context.world_size

    @property
    def local_rank(self) -> int:
        """The rank among those of the same node."""
        return self._rank_context.local_rank

    @property
    def local_world_size(self) -> int:
        return self._rank_context.local_world_size

    # For code written for verl. Unlike a property, a class may assign them, as verl's own does.
    _rank = cached_property(lambda self: self.rank)
    _world_size = cached_property(lambda self: self.world_size)
    _local_rank = cached_property(lambda self: self.local_rank)
    _local_world_size = cached_property(lambda self: self.local_world_size)

    def get_master_addr_port(self) -> tuple[str, str]:
        """Where the ranks meet, as (address, port). UnsupportedByRuntime if ranks do not run at the same time."""
        require(self._rank_context.runtime, "collectives", "a place where ranks meet")
        return str(self._rank_context.master_addr), str(self._rank_context.master_port)

    def get_cuda_visible_devices(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES, or "not set"."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """The worker of that role in the same process. DispatchError, naming the roles, for an unknown one."""
        if worker_name not in self.fused_worker_dict:
            raise DispatchError(unknown_name("role", worker_name, self.fused_worker_dict))
        return self.fused_worker_dict[worker_name]

    @staticmethod
    def get_available_master_addr_port() -> tuple[str, str]:
        """This node's address, and a port that is free there now, for a process group of your own.

        Another process may take the port before you bind it. The group's own meeting point (`get_master_addr_port`) is safe from
        that: rank 0 binds its port once and keeps it.
        """
        address = _node_address()
        with socket.create_server((address, 0)) as listener:
            return address, str(listener.getsockname()[1])

    def init_process_group(self, backend: str | None = None, *, timeout_s: float | None = None) -> None:
        """Join the peers in torch.distributed's default group; a second call does nothing.

        Without a backend there is one for the CPU and, for a rank with a GPU, one for that. A backend with NCCL is bound to the
        rank's own GPU, which becomes torch's current one. `timeout_s` is the limit of joining and of each collective. None is
        torch's half hour or, if that is more, a minute more than the group's `call_timeout_s`: so the driver reports a hang
        before torch aborts the process. A group of one needs no peers and works everywhere. UnsupportedByRuntime where ranks
        cannot run at the same time, ResourceError where the rank's GPU is missing.
        """
        join_peers(self._rank_context, backend, timeout_s)

    # -- its meshes ---------------------------------------------------------------------------------------------------

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Register a mesh: the shard that this rank works on, and whether its result is collected.

        RegistrationError for a mesh that is registered already, and for values of wrong types.
        """
        check_mesh_name(mesh_name)
        if isinstance(dp_rank, bool) or not isinstance(dp_rank, SupportsIndex) or not isinstance(is_collect, bool):
            raise RegistrationError(
                f"mesh {mesh_name!r} of {type(self).__name__}, rank {self.rank}: dp_rank must be the number of a shard and "
                f"is_collect True or False, got {dp_rank!r} and {is_collect!r}"
            )
        if mesh_name in self._meshes:
            raise RegistrationError(f"{type(self).__name__} on rank {self.rank} has registered mesh {mesh_name!r} already")
        self._meshes[mesh_name] = (operator.index(dp_rank), is_collect)

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """All meshes of this worker: `{"dispatch_dp_rank": {mesh: dp_rank}, "collect_dp_rank": {mesh: is_collect}}`."""
        return {
            "dispatch_dp_rank": {name: dp_rank for name, (dp_rank, _) in self._meshes.items()},
            "collect_dp_rank": {name: is_collect for name, (_, is_collect) in self._meshes.items()},
        }

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: Mapping[str, int], collect_dp_rank: Mapping[str, bool]
    ) -> None:
        """Register an inner worker's mesh as this worker's: `self.set_dispatch_collect("actor", **inner.get_dispatch_collect())`.

        Of several meshes it takes the one of the same name. DispatchError if there are several and none has that name.
        """
        source = mesh_name if mesh_name in dispatch_dp_rank else next(iter(dispatch_dp_rank), None)
        if source is None or (source != mesh_name and len(dispatch_dp_rank) > 1):
            meshes = ", ".join(map(repr, dispatch_dp_rank)) or "none"
            raise DispatchError(
                f"the inner worker must have a mesh {mesh_name!r}, or only one, got {meshes}: pass the entries of one mesh"
            )
        self._register_dispatch_collect_info(mesh_name, dispatch_dp_rank[source], collect_dp_rank[source])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_mesh(self, mesh_name: str) -> tuple[int, bool]:
        """This rank's (dp_rank, is_collect) in a mesh; the controller queries it once."""
        if mesh_name not in self._meshes:
            raise DispatchError(
                f"{type(self).__name__} has no mesh {mesh_name!r}{nearest(mesh_name, self._meshes)}; it has "
                f"{', '.join(self._meshes) or 'none'}: its constructor must call "
                f"self._register_dispatch_collect_info({mesh_name!r}, dp_rank, is_collect)"
            )
        return self._meshes[mesh_name]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        """This rank's dp_rank in a mesh; of a group, the list of them."""
        return self._query_mesh(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """`query_collect_info`; of a group, the list of them."""
        return self.query_collect_info(mesh_name)

    def query_collect_info(self, mesh_name: str) -> bool:
        """Whether this rank's results are collected in a mesh."""
        return self._query_mesh(mesh_name)[1]

    # -- functions of the driver --------------------------------------------------------------------------------------

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(self, func: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """`func(worker, *shards)` on every rank; its results are joined as rows."""
        return func(self, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., R], /, *args: Any, **kwargs: Any) -> R:
        """The result of `func(*args)` on rank 0."""
        return func(*args, **kwargs)


def join_peers(context: RankContext, backend: str | None, timeout_s: float | None) -> None:
    """See `Worker.init_process_group`."""
    if dist.is_initialized():
        return
    if timeout_s is not None and not timeout_s > 0:
        raise ConfigError(f"the time limit of a process group must be more than 0 seconds, got {timeout_s:g}")
    timeout = _collective_timeout(context) if timeout_s is None else timedelta(seconds=timeout_s)
    options: dict[str, Any] = {"timeout": timeout}
    if context.world_size == 1:
        options |= {"store": HashStore(), "rank": 0, "world_size": 1}
    else:
        require(context.runtime, "collectives", f"collectives between {context.world_size} ranks")
    backend = backend or collective_backend(own_device(context))
    device = use_device(own_device(context)) if "nccl" in backend else None
    if device is not None and device.type == "cuda":
        options["device_id"] = device
    dist.init_process_group(backend, **options)


def _collective_timeout(context: RankContext) -> timedelta | None:
    if context.call_timeout_s is None:
        return None
    return max(default_pg_timeout, timedelta(seconds=context.call_timeout_s + REPORT_FIRST_S))


def _node_address() -> str:
    """The address by which other nodes reach this one; the loopback address if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(ELSEWHERE)  # a datagram socket sends nothing yet
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])

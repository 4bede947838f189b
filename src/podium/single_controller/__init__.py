"""Calls over groups of workers: one driver program conducts, every rank runs the same code."""

from podium.runtimes import CAPABILITIES, Capabilities
from podium.single_controller.calls.futures import FutureList, GroupFuture
from podium.single_controller.calls.group_call import GroupCall
from podium.single_controller.calls.row_futures import DataProtoFuture
from podium.single_controller.calls.traffic import Traffic, recorded_traffic
from podium.single_controller.colocation import (
    ColocatedWorker,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
)
from podium.single_controller.init import Init
from podium.single_controller.placement.resource_pool import (
    ResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from podium.single_controller.processes.lifecycle import State
from podium.single_controller.processes.status import CallStatus, GroupStatus
from podium.single_controller.register import register
from podium.single_controller.routing.dispatch import (
    Copy,
    PerRank,
    Route,
    collect_all_to_all,
    collect_dp_compute_data_proto,
    collect_nd_compute_dataproto,
    dispatch_all_to_all,
    dispatch_dp_compute,
    dispatch_dp_compute_data_proto,
    dispatch_nd_compute_dataproto,
    dispatch_one_to_all,
    get_predefined_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from podium.single_controller.routing.mesh import Mesh
from podium.single_controller.routing.modes import Dispatch, DispatchMode, Execute, make_nd_compute_dataproto_dispatch_fn
from podium.single_controller.routing.registration import MAGIC_ATTR, Registration
from podium.single_controller.worker import Worker
from podium.single_controller.worker_group import WorkerGroup

__all__ = [
    "CAPABILITIES",
    "MAGIC_ATTR",
    "CallStatus",
    "Capabilities",
    "ColocatedWorker",
    "Copy",
    "DataProtoFuture",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "FutureList",
    "GroupCall",
    "GroupFuture",
    "GroupStatus",
    "Init",
    "Mesh",
    "PerRank",
    "Registration",
    "ResourcePool",
    "Route",
    "State",
    "Traffic",
    "Worker",
    "WorkerGroup",
    "collect_all_to_all",
    "collect_dp_compute_data_proto",
    "collect_nd_compute_dataproto",
    "create_colocated_worker_cls",
    "create_colocated_worker_raw_cls",
    "dispatch_all_to_all",
    "dispatch_dp_compute",
    "dispatch_dp_compute_data_proto",
    "dispatch_nd_compute_dataproto",
    "dispatch_one_to_all",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "recorded_traffic",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "update_dispatch_mode",
]

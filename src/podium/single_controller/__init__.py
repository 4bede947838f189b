"""Calls over groups of workers: one driver program conducts, every rank runs the same code."""

from podium.single_controller.dispatch import (
    Copy,
    Dispatch,
    DispatchMode,
    Execute,
    PerRank,
    make_nd_compute_dataproto_dispatch_fn,
)
from podium.single_controller.group_call import GroupCall, GroupFuture
from podium.single_controller.mesh import Mesh
from podium.single_controller.registration import MAGIC_ATTR, Registration, register
from podium.single_controller.resource_pool import ResourcePool
from podium.single_controller.runtime import CAPABILITIES, Capabilities
from podium.single_controller.worker import Worker
from podium.single_controller.worker_group import Init, WorkerGroup

__all__ = [
    "CAPABILITIES",
    "MAGIC_ATTR",
    "Capabilities",
    "Copy",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "GroupCall",
    "GroupFuture",
    "Init",
    "Mesh",
    "PerRank",
    "Registration",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "make_nd_compute_dataproto_dispatch_fn",
    "register",
]

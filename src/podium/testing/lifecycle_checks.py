"""How groups start, fail and end on every runtime. Each check takes the runtime's name and makes groups of its own."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from podium.errors import (
    CallTimeoutError,
    ConfigError,
    GroupClosedError,
    ResourceError,
    UnsupportedByRuntime,
    WorkerError,
    WorkerLostError,
)
from podium.protocol import DataProto
from podium.runtimes import runtimes_with
from podium.single_controller import (
    CAPABILITIES,
    Init,
    ResourcePool,
    State,
    WorkerGroup,
    create_colocated_worker_cls,
)
from podium.testing.contract_workers import MESH, WORLD_SIZE, ContractWorker, FailsToStart, LooksAtSetup, Neighbour, NodeSetup
from podium.testing.expecting import expected


def check_constructor_fails(runtime: str) -> None:
    """A constructor that raises is reported like a call that raises."""
    with expected(WorkerError) as caught:
        WorkerGroup(ResourcePool([2]), Init(FailsToStart, rank=1), runtime=runtime)
    error = caught.error
    assert (error.cause_type, error.origin.rank, error.origin.method) == ("FileNotFoundError", 1, "__init__")


def check_closed(runtime: str) -> None:
    """A closed group says so; closing again is harmless. A group of one may have a process group anywhere."""
    with WorkerGroup(ResourcePool([1]), ContractWorker, runtime=runtime) as group:
        assert group.call.sum_ranks() == [0]
        if not CAPABILITIES[runtime].environment and dist.is_initialized():
            dist.destroy_process_group()
    group.close()
    with expected(GroupClosedError) as caught:
        group.call.place()
    assert "closed" in str(caught.error)


def check_timeouts(runtime: str) -> None:
    """A call that takes too long names its silent ranks and breaks the group; a runtime without limits refuses them."""
    with WorkerGroup(ResourcePool([2]), ContractWorker, runtime=runtime) as group:
        if not CAPABILITIES[runtime].timeouts:
            with expected(UnsupportedByRuntime) as refused:
                group.call.sleep_on.options(timeout=1.0)(1, seconds=0.0)
            assert all(name in str(refused.error) for name in runtimes_with("timeouts"))
            return
        with expected(CallTimeoutError) as caught:
            group.call.sleep_on.options(timeout=0.5)(1, seconds=60.0)
        assert caught.error.silent_ranks == (1,)
        assert "sleep_on" in str(caught.error)
        with expected(GroupClosedError) as closed:
            group.call.place()
        assert "timed out" in str(closed.error)


def check_roles(runtime: str) -> None:
    """Workers that share a process have a group each, with methods and meshes of their own, and see each other."""
    roles: dict[str, Init[Any] | type] = {"first": Init(ContractWorker, MESH), "second": Neighbour}
    batch = DataProto({"x": torch.arange(4)})
    with WorkerGroup(ResourcePool([WORLD_SIZE]), create_colocated_worker_cls(roles), runtime=runtime) as both:
        groups = both.spawn()
        assert groups["first"].place() == [(rank, WORLD_SIZE, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
        assert both.second_place() == groups["second"].place() == [f"neighbour {rank} of 4" for rank in range(WORLD_SIZE)]
        assert groups["first"].tag_rows_on_mesh(batch).batch["rank"].tolist() == [2, 2, 1, 1]
        assert groups["second"].tag_rows_on_mesh(batch).batch["rank"].tolist() == [0, 1, 2, 3]
        assert groups["second"].ask_the_other() == [[2, 3], [2, 3], [0, 1], [0, 1]]
        with expected(WorkerError) as caught:
            groups["first"].raise_on(3)
        assert (caught.error.origin.method, caught.error.origin.rank) == ("first.raise_on", 3)
    with expected(GroupClosedError):
        groups["second"].place()


def check_environment_of_the_caller(runtime: str) -> None:
    """Variables that the caller sets are there from the start, and may not contradict the runtime's own."""
    if not CAPABILITIES[runtime].worker_env:
        with expected(UnsupportedByRuntime):
            WorkerGroup(ResourcePool([1]), ContractWorker, runtime=runtime, worker_env={"COLOUR": "red"})
        return
    with WorkerGroup(ResourcePool([1]), ContractWorker, runtime=runtime, worker_env={"COLOUR": "red"}) as group:
        assert group.call.variable("COLOUR") == ["red"]
    with expected(ConfigError) as caught:
        WorkerGroup(ResourcePool([1]), ContractWorker, runtime=runtime, worker_env={"RANK": "1"})
    assert "RANK" in str(caught.error)


def check_nodes_are_set_up(runtime: str) -> None:
    """Once on each node, before any worker is built; what fails there is a ResourceError that names the node and the reason."""
    with tempfile.TemporaryDirectory() as folder:
        setup = NodeSetup(folder)
        with WorkerGroup(ResourcePool([2]), Init(LooksAtSetup, folder), runtime=runtime, node_setup=setup) as group:
            assert group.call.files_at_start() == [1, 1]
        assert len([*Path(folder).iterdir()]) == 1
        with expected(ResourceError) as caught:
            WorkerGroup(ResourcePool([2]), Init(LooksAtSetup, folder), runtime=runtime, node_setup=setup)
        assert "1 of 1 nodes are not ready" in str(caught.error)
        assert "was here already" in str(caught.error)
        assert platform.node() in str(caught.error)


def check_death_and_restart(runtime: str) -> None:
    """A process that ends in a call is a WorkerLostError that names it, and breaks the group, which says why.

    The restarted group has workers with the arguments of the first time.
    """
    with WorkerGroup(ResourcePool([2]), Init(ContractWorker, ((0, True), (1, True))), runtime=runtime) as group:
        if CAPABILITIES[runtime].own_processes:  # a rank that lives in the driver's process dies with it
            with expected(WorkerLostError) as caught:
                group.call.die_on(1)
            origin = caught.error.origin
            assert (origin.rank, origin.method) == (1, "die_on")
            assert origin.pid not in (0, os.getpid())
            with expected(GroupClosedError) as closed:
                group.call.place()
            assert "died" in str(closed.error)
            assert group.status().state is State.BROKEN
        if not CAPABILITIES[runtime].restart:
            with expected(UnsupportedByRuntime):
                group.restart()
            return
        group.restart()
        assert group.call.sum_ranks() == [1, 1]
        assert group.call.tag_rows_on_mesh(DataProto({"x": torch.arange(2)})).batch["rank"].tolist() == [0, 1]
        assert group.status().state is State.READY


LIFECYCLE_CHECKS: tuple[Callable[[str], None], ...] = (
    check_constructor_fails,
    check_closed,
    check_timeouts,
    check_roles,
    check_environment_of_the_caller,
    check_nodes_are_set_up,
    check_death_and_restart,
)

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from podium.compat.verl import initialize_global_process_group_ray
from podium.errors import ConfigError, RegistrationError, UnsupportedByRuntime
from podium.single_controller import (
    Dispatch,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    register,
)
from podium.single_controller.rank.context import RankContext, running_as
from podium.single_controller.worker import join_peers


class Place(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[Any, int, list[str]]:
        return getattr(self, "x", None), self.rank, sorted(self.fused_worker_dict)


@dataclasses.dataclass(frozen=True)
class Frozen(Place):
    x: int = 1


@dataclasses.dataclass(slots=True)
class Slotted(Place):
    x: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Both(Place):
    x: int = 1


class Closed(Place):
    """Assignments need something that only its constructor makes."""

    def __init__(self) -> None:
        object.__setattr__(self, "x", 1)
        object.__setattr__(self, "writable", ())

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} is not one of {self.writable}")


@pytest.mark.parametrize("cls", [Frozen, Slotted, Both, Closed])
def test_a_class_that_refuses_assignments_is_a_worker_like_any_other(cls: type[Place]):
    assert cls().place() == (1, 0, [])
    with WorkerGroup(ResourcePool([2]), cls) as group:
        assert group.call.place() == [(1, 0, []), (1, 1, [])]
    with WorkerGroup(ResourcePool([2]), create_colocated_worker_cls({"first": cls, "second": cls})) as both:
        assert both.spawn()["second"].place() == [(1, 0, ["first", "second"]), (1, 1, ["first", "second"])]


class OldStyle(Worker):
    """Reads and assigns what verl's base class keeps in attributes."""

    def __init__(self) -> None:
        super().__init__(None)
        self._local_rank = 7

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def attributes(self) -> tuple[int, int, int, int]:
        return self._rank, self._world_size, self._local_rank, self._local_world_size


def test_a_workers_place_is_there_under_verls_names_which_a_class_may_assign():
    with WorkerGroup(ResourcePool([2]), OldStyle) as group:
        assert group.call.attributes() == [(0, 2, 7, 2), (1, 2, 7, 2)]


def test_visible_devices_are_set_only_where_ranks_have_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with WorkerGroup(ResourcePool([1]), Init(Worker, None)):
        pass
    with pytest.raises(UnsupportedByRuntime, match="runtime 'inline' does not offer CUDA_VISIBLE_DEVICES for each rank"):
        WorkerGroup(ResourcePool([1]), Init(Worker, "0"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
    with running_as(RankContext(runtime="ray")):
        Worker("0,1")
        with pytest.raises(ConfigError, match="cuda_visible_devices must be text like '0,1', or None, got 3"):
            Worker(3)  # type: ignore[arg-type]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("name", [None, 3, "", ["actor"]])
def test_a_mesh_is_registered_under_a_string(name: Any):
    with pytest.raises(RegistrationError, match="the name of a mesh must be a string"):
        Worker()._register_dispatch_collect_info(name, 0, is_collect=True)


@pytest.mark.parametrize(("dp_rank", "is_collect"), [("0", True), (None, True), (0.0, True), (True, True), (0, "no"), (0, 1)])
def test_a_place_in_a_mesh_is_a_number_and_a_bool(dp_rank: Any, is_collect: Any):
    worker = Worker()
    with pytest.raises(RegistrationError, match=f"'actor' of Worker, rank 0: .* got {dp_rank!r} and {is_collect!r}"):
        worker._register_dispatch_collect_info("actor", dp_rank, is_collect)
    worker._register_dispatch_collect_info("actor", 0, is_collect=True)
    assert (worker._query_dispatch_info("actor"), worker._query_collect_info("actor")) == (0, True)


# -- meeting others -----------------------------------------------------------------------------------------------------


def test_a_port_that_is_free_can_be_bound_at_the_address_that_comes_with_it():
    address, port = Worker.get_available_master_addr_port()
    assert Worker().get_available_master_addr_port()[0] == address
    with socket.create_server((address, int(port))) as listener:
        assert listener.getsockname()[1] == int(port)


def test_a_node_without_a_way_to_others_has_its_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("podium.single_controller.worker.ELSEWHERE", ("host.invalid", 9))
    assert Worker.get_available_master_addr_port()[0] == "127.0.0.1"


@pytest.fixture
def no_process_group() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "join",
    [
        lambda: Worker().init_process_group(),
        lambda: Worker().init_process_group("gloo", timeout_s=7),
        initialize_global_process_group_ray,
        lambda: initialize_global_process_group_ray(timeout_second=7, backend="gloo"),
    ],
)
def test_a_rank_that_is_alone_joins_itself(join: Callable[[], None], no_process_group: None):
    join()
    join()  # does nothing
    total = torch.tensor(3)
    dist.all_reduce(total)
    assert (int(total), dist.get_world_size()) == (3, 1)


@pytest.mark.parametrize(
    ("call_timeout_s", "timeout_s", "expected"),
    [
        (None, None, None),  # a worker outside any group: torch's own
        (3600.0, None, 3660.0),  # the driver reports the hang first
        (10.0, None, 1800.0),  # a call may have a longer limit of its own
        (3600.0, 7.0, 7.0),
    ],
)
def test_a_collective_may_wait_longer_than_a_call(
    call_timeout_s: float | None, timeout_s: float | None, expected: float | None, monkeypatch: pytest.MonkeyPatch
):
    given: list[timedelta | None] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, timeout, **kwargs: given.append(timeout))
    join_peers(RankContext(call_timeout_s=call_timeout_s), "gloo", timeout_s)
    assert given == [None if expected is None else timedelta(seconds=expected)]


def test_a_process_group_has_a_time_limit_that_is_one(no_process_group: None):
    with pytest.raises(ConfigError, match="the time limit of a process group must be more than 0 seconds, got 0"):
        Worker().init_process_group("gloo", timeout_s=0)

"""Handles outlive their group, groups go to other processes, and groups are made of any ranks' handles."""

from __future__ import annotations

import copy
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from podium.compat.verl import RayResourcePool, RayWorkerGroup
from podium.errors import DispatchError, GroupClosedError, ResourceError, UnsupportedByRuntime, WorkerError
from podium.protocol import DataProto
from podium.single_controller import (
    Dispatch,
    Init,
    PerRank,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)


class Counter(Worker):
    def __init__(self, start: int = 0) -> None:
        super().__init__()
        self.count = start
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: int) -> int:
        if amount < 0:
            raise ValueError("negative")
        self.count += amount
        return self.count

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def echo(self, rows: DataProto) -> DataProto:
        return rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def wait(self, amount: int) -> int:
        return self.count + amount


ROLES = create_colocated_worker_cls({"first": Counter, "second": Init(Counter, 5)})


class Caller(Worker):
    """Calls another group."""

    def __init__(self, group: WorkerGroup[Counter] | None = None) -> None:
        super().__init__()
        self.group = group

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self, group: WorkerGroup[Counter]) -> list[int]:
        self.group = group
        return group.call.add(10)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def use(self) -> tuple[list[int], list[int], list[int]]:
        assert self.group is not None
        rows = self.group.call.echo(DataProto({"x": torch.arange(5)}))
        return rows.batch["x"].tolist(), self.group.call.add(1), self.group.call.wait(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def let_go(self) -> str:
        assert self.group is not None
        self.group.close()
        try:
            self.group.call.add(1)
        except GroupClosedError as error:
            return str(error)
        return "still there"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def give_back(self, group: WorkerGroup[Counter]) -> WorkerGroup[Counter]:
        return group


@pytest.fixture(scope="module", params=["inline", "ray"])
def runtime(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return str(request.param)


@pytest.fixture(scope="module")
def counters(runtime: str) -> Iterator[WorkerGroup[Counter]]:
    with WorkerGroup(ResourcePool([2]), Counter, runtime=runtime, name="counters") as group:
        yield group


@pytest.fixture(scope="module")
def callers(runtime: str, counters: WorkerGroup[Counter]) -> Iterator[WorkerGroup[Caller]]:
    with WorkerGroup(ResourcePool([1]), Init(Caller, counters), runtime=runtime) as group:
        yield group


@pytest.fixture(scope="module")
def roles(runtime: str) -> Iterator[WorkerGroup[Any]]:
    with WorkerGroup(ResourcePool([1]), ROLES, runtime=runtime) as group:
        yield group


def is_gone(handle: Any) -> bool:
    import ray

    give_up = time.monotonic() + 20.0
    while time.monotonic() < give_up:
        try:
            ray.get(handle.get_cuda_visible_devices.remote(), timeout=5.0)
        except ray.exceptions.RayActorError:
            return True
        time.sleep(0.1)
    return False


# -- handles ---------------------------------------------------------------------------------------------------------------

KEPT: dict[str, Callable[[WorkerGroup[Any]], Any]] = {
    "one handle": lambda group: {"elsewhere": group.spawn()["first"].workers[1]},
    "a group of the handles": lambda group: WorkerGroup.from_detached(ROLES, worker_handles=group.workers),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kept", KEPT)
def test_a_handle_keeps_the_ranks_alive_without_their_group(kept: str, ray_cluster: None) -> None:
    import ray

    group: WorkerGroup[Any] = WorkerGroup(ResourcePool([2]), ROLES, runtime="ray")
    assert group.workers[0] is group.workers[0]
    pickled = pickle.dumps(group.workers[0])
    held = KEPT[kept](group)
    del group
    gc.collect()
    time.sleep(0.5)
    handles = held.workers if isinstance(held, WorkerGroup) else list(held.values())
    assert ray.get([handle.second_add.remote(1) for handle in handles]) == [6] * len(handles)
    del handles, held
    gc.collect()
    assert is_gone(pickle.loads(pickled))  # a handle from elsewhere, which keeps no rank alive


def test_inline_handles_are_the_workers_and_stay() -> None:
    handles = WorkerGroup(ResourcePool([2]), Counter).workers
    gc.collect()
    assert [handle.add(2) for handle in handles] == [2, 2]


def test_a_roles_method_is_called_on_the_raw_handle_by_its_flat_name(roles: WorkerGroup[Any]) -> None:
    (handle,) = roles.workers
    if roles.runtime_name == "ray":
        import ray

        assert ray.get([handle.first_add.remote(1), handle.second_add.remote(amount=2)]) == [1, 7]
        assert ray.get(handle.second_wait.remote(1)) == 8
    else:
        assert (handle.first_add(1), handle.second_add(amount=2)) == (1, 7)
    assert roles.second_add(0) == roles.spawn()["second"].add(0) == [7]
    with pytest.raises(WorkerError, match=r"method 'second\.add'"):
        roles.execute_rank_zero_sync("second_add", -1)


def test_an_ambiguous_flat_name_is_not_a_method_of_a_handle() -> None:
    class AddSlowly(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def slowly_add(self) -> None: ...

    class Add(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def add(self) -> None: ...

    with WorkerGroup(ResourcePool([1]), create_colocated_worker_cls({"a": AddSlowly, "a_slowly": Add})) as group:
        assert not hasattr(group.workers[0], "a_slowly_add")
        with pytest.raises(AttributeError, match="'a_slowly_add' could mean"):
            group.a_slowly_add()


# -- groups as arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_a_worker_calls_the_group_that_it_was_passed_and_does_not_own_it(
    counters: WorkerGroup[Counter], callers: WorkerGroup[Caller]
) -> None:
    before = counters.call.add(0)[0]
    assert callers.call.use() == [([0, 1, 2, 3, 4], [before + 1] * 2, [before + 1] * 2)]  # an argument of its constructor
    assert callers.call.take(counters) == [[before + 11] * 2]
    assert callers.call.let_go() == ["group 'counters' cannot run 'add': it was closed"]
    assert counters.call.add(1) == [before + 12] * 2
    (returned,) = callers.call.give_back(counters)
    assert returned.call.add(1) == [before + 13] * 2
    returned.close()
    assert counters.call.add(0) == [before + 13] * 2


@pytest.mark.timeout(120)
def test_the_group_of_a_role_stays_one(roles: WorkerGroup[Any], callers: WorkerGroup[Caller]) -> None:
    second = roles.spawn()["second"]
    before = second.add(0)[0]
    assert callers.call.take(second) == [[before + 10]]
    roles.fuse()
    again = copy.deepcopy(roles)
    assert again.second.add(0) == roles.second.add(0) == [before + 10]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("runtime", ["ray"], indirect=True)
def test_a_group_goes_into_any_task_or_actor_of_ray(counters: WorkerGroup[Counter]) -> None:
    import ray

    @ray.remote(num_cpus=0)  # the groups have all that there are
    class Actor:
        def __init__(self, group: WorkerGroup[Any]) -> None:
            self.group = group

        def add(self, groups: dict[str, WorkerGroup[Any]]) -> Any:
            rows = groups["same"].echo(DataProto({"x": torch.arange(3)}))
            return self.group.name, self.group.add(1), rows.batch["x"].tolist()

    before = counters.call.add(0)
    actor: Any = Actor
    keeper = actor.remote(counters)
    assert ray.get(keeper.add.remote({"same": counters})) == ("counters", [count + 1 for count in before], [0, 1, 2])
    ray.kill(keeper)
    assert counters.call.add(0) == [count + 1 for count in before]


@pytest.mark.parametrize("runtime", ["ray"], indirect=True)
def test_an_inline_group_stays_in_its_process(counters: WorkerGroup[Counter]) -> None:
    with WorkerGroup(ResourcePool([1]), Counter, name="mine") as inline:
        with pytest.raises(UnsupportedByRuntime, match=r"calls from another process \(to group 'mine'\): use runtime 'ray'"):
            pickle.dumps(inline)
        with pytest.raises(DispatchError, match=r"argument 0 \(WorkerGroup\) of 'add' cannot be sent to ranks 0-1: .*'mine'"):
            counters.call.add(inline)  # type: ignore[arg-type]
        assert copy.deepcopy(inline).add(1) == [1]


def test_a_passed_group_ends_with_the_one_that_owns_its_ranks() -> None:
    with WorkerGroup(ResourcePool([1]), Counter) as inline:
        passed = copy.deepcopy(inline)
    with pytest.raises(GroupClosedError, match="rank 0 cannot run 'add': it was ended"):
        passed.add(1)
    with pytest.raises(GroupClosedError, match="it was closed"):
        copy.deepcopy(inline).add(1)


# -- groups of any handles -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
@pytest.mark.parametrize("runtime", ["ray"], indirect=True)
def test_a_group_of_the_handles_of_several_groups_or_of_some_ranks(counters: WorkerGroup[Counter]) -> None:
    pool = RayResourcePool([2])  # with GPUs, which this machine does not have
    with RayWorkerGroup(pool, Init(Counter, 100), device_name="cpu", name="others") as others:
        base = counters.call.add(0)[0]
        joined = RayWorkerGroup(worker_handles=[*others.workers, *counters.workers], ray_cls_with_init=Counter)
        assert (joined.name, joined.world_size, joined.pool.store) == ("others+counters", 4, [4])
        assert joined.add(PerRank([0, 1, 2, 3])) == [100, 101, base + 2, base + 3]
        with pytest.raises(DispatchError, match="2 ranks collect dp_rank 0"):
            joined.echo(DataProto({"x": torch.arange(2)}))
        with pytest.raises(WorkerError, match=r"in group 'counters', method 'add', rank 1, .*") as caught:
            joined.add(PerRank([0, 0, 0, -1]))
        assert caught.value.consequences == ()
        turned = RayWorkerGroup(worker_handles=others.workers[::-1], ray_cls_with_init=Counter)
        assert turned.add(0) == [100, 101]  # ranks stand in their own order
        one = RayWorkerGroup(worker_handles=others.workers[1:], ray_cls_with_init=Counter)
        assert one.add(0) == [101]
        with pytest.raises(ResourceError, match="rank 1 of group 'others' is given twice"):
            RayWorkerGroup(worker_handles=[others.workers[1]] * 2, ray_cls_with_init=Counter)
        _check_names_of_verl(others)
        assert len(pool.pgs or ()) == 1
    assert pool.pgs is None


def _check_names_of_verl(group: RayWorkerGroup[Counter]) -> None:
    assert group._dispatch_info == {}
    assert max(group._query_dispatch_info("actor")) + 1 == 2
    assert group._query_collect_info("actor") == [True, True]
    group.echo(DataProto({"x": torch.arange(2)}))
    assert (group._dispatch_info, group._collect_info) == ({"actor": [0, 1]}, {"actor": [True, True]})
    assert (group._workers, group._worker_names) == (group.workers, group.worker_names)
    assert (group.master_address, int(group.master_port) > 0) == ("127.0.0.1", True)
    assert (group.wg_dict, group.sub_cls_name) == (None, "")
    assert {"add", "echo", "wait"} <= set(group.method_names)

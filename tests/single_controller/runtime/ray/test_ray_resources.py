"""What groups hold of a Ray cluster: who shares it, who is refused, and that nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group_table

from podium.compat.verl import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    extract_pg_from_exist,
    sort_placement_group_by_node_ip,
)
from podium.errors import ResourceError, WorkerError
from podium.single_controller import (
    Dispatch,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    merge_resource_pool,
    register,
    split_resource_pool,
)
from podium.single_controller.runtime.ray import cluster, reservations

pytestmark = [pytest.mark.timeout(420), pytest.mark.usefixtures("ray_cluster")]

HERE = Path(__file__).parent


class Plain(Worker):
    def __init__(self, raises: bool = False, naps_s: float = 0.0) -> None:
        time.sleep(naps_s)
        if raises:
            raise ValueError("no such model")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def placement_group(self) -> str:
        group = ray.util.get_current_placement_group()
        assert group is not None
        return str(group.id.hex())


def held() -> set[str]:
    return {name for name, entry in placement_group_table().items() if entry["state"] != "REMOVED"}


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0))


def wait_until(holds, within_s: float = 20.0) -> bool:
    give_up = time.monotonic() + within_s
    while not holds() and time.monotonic() < give_up:
        time.sleep(0.05)
    return bool(holds())


@pytest.fixture(autouse=True)
def nothing_stays_behind(ray_cluster: None) -> Iterator[None]:
    """Each test begins and ends with the same placement groups and CPUs."""
    before = held()
    total = float(ray.cluster_resources()["CPU"])
    yield
    assert wait_until(lambda: held() == before), placement_group_table()
    assert wait_until(lambda: free_cpus() == total - cpus_of(before)), ray.available_resources()


def cpus_of(groups: set[str]) -> float:
    return sum(
        sum(bundle["CPU"] for bundle in entry["bundles"].values())
        for name, entry in placement_group_table().items()
        if name in groups
    )


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(cluster, "PLACEMENT_TIMEOUT_S", 1.5)
    return 1.5


# -- sharing -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_groups_on_a_pool_share_placement_groups_up_to_max_colocate_count():
    pool = ResourcePool([2], max_colocate_count=2)
    first_half, second_half = split_resource_pool(pool, 1)
    with (
        WorkerGroup(pool, Plain, runtime="ray", name="whole") as whole,
        WorkerGroup(second_half, Plain, runtime="ray", name="half") as half,
    ):
        assert len(set(whole.placement_group() + half.placement_group())) == 1
        began = time.monotonic()
        with pytest.raises(ResourceError) as caught:
            WorkerGroup(merge_resource_pool(first_half, second_half), Plain, runtime="ray", name="third")
        assert time.monotonic() - began < 5
        message = str(caught.value)
        assert "'third' has no place: max_colocate_count=2" in message
        assert "taken by 'whole', 'half'. Raise the pool's max_colocate_count" in message
        half.close()
        with WorkerGroup(second_half, Plain, runtime="ray", name="third") as third:
            assert third.placement_group() == half_of(whole)


def half_of(whole: WorkerGroup[Plain]) -> list[str]:
    return [whole.placement_group()[1]]


@pytest.mark.slow
def test_equal_pools_that_were_made_apart_share_nothing():
    with (
        WorkerGroup(ResourcePool([1]), Plain, runtime="ray") as first,
        WorkerGroup(ResourcePool([1]), Plain, runtime="ray") as second,
    ):
        assert first.placement_group() != second.placement_group()


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_never_fits_is_refused_at_once_and_before_anything_is_made():
    before = set(placement_group_table())
    began = time.monotonic()
    with pytest.raises(ResourceError, match=r"process_on_nodes \[10000\] needs 10000 bundles of CPU 1") as caught:
        WorkerGroup(ResourcePool([10_000]), Plain, runtime="ray")
    assert time.monotonic() - began < 2
    assert set(placement_group_table()) == before
    assert "Lower process_on_nodes: with nothing held there is room for at most 64 on one node" in str(caught.value)
    with pytest.raises(ResourceError, match="GPU is too little: use_gpu=False runs the ranks on the CPU"):
        WorkerGroup(ResourcePool([1], use_gpu=True), Plain, runtime="ray")
    with pytest.raises(ResourceError, match="H100 is too little: give another accelerator_type"):
        WorkerGroup(ResourcePool([1], accelerator_type="H100"), Plain, runtime="ray")
    assert set(placement_group_table()) == before


@pytest.mark.parametrize("asks", ["group", "pool"])
def test_a_pool_without_room_fails_in_time_and_names_the_holders(asks: str, short_wait: float):
    total = int(ray.cluster_resources()["CPU"])
    big = RayResourcePool([total - 1], use_gpu=False, name_prefix="big")
    big.get_placement_groups()
    wanted = RayResourcePool([2], use_gpu=False)
    began = time.monotonic()
    try:
        group = partial(WorkerGroup, wanted, Plain, runtime="ray", start_timeout_s=short_wait)
        with pytest.raises(ResourceError) as caught:
            (group if asks == "group" else wanted.get_placement_groups)()
        assert short_wait <= time.monotonic() - began < short_wait + 5
    finally:
        big.close()
    message = str(caught.value)
    assert "process_on_nodes [2] needs 2 bundles of CPU 1" in message
    assert f"1/{total}" in message, "free and total of the node"
    assert "big_" in message
    assert f"has CPU {total - 1}" in message
    assert "close other groups or pools, or lower process_on_nodes (free now: at most 1 on one node, 1 in all)" in message


def test_how_long_a_place_is_awaited_is_said_by_who_asks():
    total = int(ray.cluster_resources()["CPU"])
    big = RayResourcePool([total], use_gpu=False)
    big.get_placement_groups()
    holder, began = object(), time.monotonic()
    try:
        with pytest.raises(ResourceError, match=r"placed not all of \[1\] within 1\.2 s"):
            reservations.hold(holder, "late", ResourcePool([1]), wait=True, within_s=1.2)
    finally:
        big.close()
    assert 1.2 <= time.monotonic() - began < 6


def test_ranks_without_a_process_are_given_up_in_time():
    with pytest.raises(
        ResourceError, match=r"the 1 ranks of group 'Plain' got no process within 0.02 s, though their pool has its"
    ):
        WorkerGroup(ResourcePool([1]), Plain, runtime="ray", start_timeout_s=0.02)


def test_custom_resources_that_the_pool_has_not_are_refused():
    asks = RayClassWithInitArgs(Plain)
    asks.set_additional_resource({"license": 1})
    with pytest.raises(ResourceError, match=r"rank 0 of group 'Plain' fits into no place of its pool: .*license"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), asks)


# -- nothing stays behind (the fixture looks) --------------------------------------------------------------------------


@pytest.mark.parametrize("detached", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_failed_constructor_leaves_nothing(detached: bool):
    names = set(ray.util.list_named_actors())
    with pytest.raises(WorkerError, match="no such model"):
        WorkerGroup(ResourcePool([1]), Init(Plain, raises=True), runtime="ray", detached=detached, name_prefix="failing_")
    assert wait_until(lambda: set(ray.util.list_named_actors()) == names)


def test_a_group_that_was_only_forgotten_leaves_nothing():
    before = held()
    group = WorkerGroup(ResourcePool([2]), Plain, runtime="ray")
    assert len(held()) == len(before) + 1
    del group
    gc.collect()
    assert wait_until(lambda: held() == before)


def test_a_pool_that_is_not_held_any_more_says_so():
    with pytest.raises(ResourceError, match=r"the pool \[2\] is not held any more: it was closed"):
        reservations.order_of(ResourcePool([2]))


def test_ctrl_c_in_the_start_leaves_nothing():
    before = held()

    def interrupt() -> None:
        wait_until(lambda: held() != before)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        WorkerGroup(ResourcePool([2]), Init(Plain, naps_s=100.0), runtime="ray")


def test_a_detached_pool_stays_for_the_next_group_until_it_is_closed():
    pool = RayResourcePool([1], use_gpu=False, detached=True)
    with WorkerGroup(pool, Plain, runtime="ray") as group:
        used = group.placement_group()
    assert wait_until(lambda: set(used) <= held())
    assert [made.id.hex() for made in pool.get_placement_groups()] == used
    pool.close()


def test_a_detached_group_cannot_be_on_what_ends_with_the_driver():
    pool = ResourcePool([1], max_colocate_count=2)
    with WorkerGroup(pool, Plain, runtime="ray"), pytest.raises(ResourceError, match="make the pool with detached=True"):
        WorkerGroup(pool, Plain, runtime="ray", detached=True, name_prefix="late_")


# -- verl's names ------------------------------------------------------------------------------------------------------


def test_placement_groups_of_pools():
    pool = RayResourcePool([1, 3], use_gpu=False, max_colocate_count=2)
    groups = pool.get_placement_groups()
    assert pool.get_placement_groups() == groups
    assert [group.bundle_count for group in groups] == [1, 3]
    assert sort_placement_group_by_node_ip(groups) == groups
    part = split_resource_pool(pool, [2, 2])[1]
    assert part.get_placement_groups() == groups[1:]
    assert [g.bundle_count for g in extract_pg_from_exist({"a": pool}, ["a"], RayResourcePool([2, 1], use_gpu=False))] == [3, 1]
    pool.close()
    assert {group.id.hex() for group in groups} <= held(), "the part still holds them"
    part.close()


@pytest.mark.slow
def test_a_manager_of_pools_gives_each_role_its_group():
    manager = ResourcePoolManager(
        {"global_pool": [1], "reward_pool": [1]},
        {"actor": "global_pool", "critic": "global_pool", "rm": "reward_pool"},
        use_gpu=False,
    )
    manager.create_resource_pool()
    groups = {role: RayWorkerGroup(manager.get_resource_pool(role), Plain, name_prefix=role) for role in manager.mapping}
    where = {role: group.placement_group() for role, group in groups.items()}
    names = {name: entry["name"] for name, entry in placement_group_table().items()}
    for group in groups.values():
        group.close()
    assert where["actor"] == where["critic"] != where["rm"]
    assert names[where["rm"][0]].startswith("reward_pool_")


# -- other clusters ----------------------------------------------------------------------------------------------------


def words_of(name: str, timeout_s: float = 400) -> list[str]:
    """The words that the script prints, between lines of Ray; it has a cluster of its own, which Ray ends with it."""
    done = subprocess.run([sys.executable, str(HERE / name)], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [line for line in done.stdout.splitlines() if line.isalpha()]


@pytest.mark.slow  # a cluster of its own
def test_a_cluster_with_few_cpus_and_the_next_one():
    """#6663 asked for 2 workers of 4 CPUs each, because 4 groups shared a pool, on 4 CPUs."""
    assert words_of("ray_small_cluster.py") == ["shared", "refused", "again"]


@pytest.mark.slow  # a cluster of its own
def test_ranks_on_two_nodes_with_different_counts():
    assert words_of("ray_two_nodes.py") == ["places", "parts", "sum", "stacks", "death", "rows", "full", "lost"]


@pytest.mark.slow  # a cluster of its own
def test_on_a_node_with_gpus_a_rank_takes_its_own_and_a_cpu_rank_sees_none():
    assert words_of("ray_gpus.py") == ["hidden", "asked", "own", "noset"]

"""A script of `test_ray_start.py`: drivers of a detached group, `ray_detached.py make|use|end ADDRESS`."""

from __future__ import annotations

import sys
import time

import ray
from ray.util.placement_group import placement_group_table

from podium.errors import GroupClosedError, ResourceError
from podium.single_controller import Dispatch, Init, ResourcePool, Worker, WorkerGroup, register

NAMESPACE = "jobs"


class Counter(Worker):
    def __init__(self, start: int) -> None:
        self.count = start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, amount: int) -> tuple[int, int]:
        self.count += amount
        return self.rank, self.count


def check(holds: bool, got: object = None) -> None:
    if not holds:
        raise SystemExit(f"not so: {got}")


def connect(address: str, namespace: str = NAMESPACE) -> None:
    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")


def make(address: str) -> None:
    connect(address)
    pool = ResourcePool([2])
    group = WorkerGroup(pool, Init(Counter, 10), runtime="ray", detached=True, name_prefix="first", name="counting")
    check(group.add(1) == [(0, 11), (1, 11)])
    print(*group.worker_names)


def use(address: str) -> None:
    connect(address)
    group = WorkerGroup.from_detached(Counter, name_prefix="first")
    check(group.name == "counting" and group.world_size == 2 and group.pool.store == [2], group)
    check(group.add(1) == [(0, 12), (1, 12)])
    group.close()
    try:
        group.add(1)
        raise SystemExit("a closed group was called")
    except GroupClosedError:
        pass
    names = group.worker_names
    check(names == ["firstCounter_0:0", "firstCounter_0:1"], names)
    by_names = WorkerGroup.from_detached(Counter, worker_names=names[::-1])
    check(by_names.add(1) == [(0, 13), (1, 13)])
    some = WorkerGroup.from_detached(Counter, worker_names=names[1:])
    check(some.world_size == 1 and some.add(0) == [(1, 13)], some)
    for wrong, word in (
        ({"name_prefix": "firs"}, "firs"),
        ({"name_prefix": "x"}, "'jobs'"),
    ):
        try:
            WorkerGroup.from_detached(Counter, **wrong)
            raise SystemExit(f"{wrong} was found")
        except ResourceError as error:
            check(word in str(error), error)
    print("used")


def end(address: str) -> None:
    connect(address, "elsewhere")
    handles = [ray.get_actor(f"firstCounter_0:{rank}", namespace=NAMESPACE) for rank in range(2)]
    group = WorkerGroup.from_detached(Counter, worker_handles=handles)
    check(group.add(1) == [(0, 14), (1, 14)])
    group.end()
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up and not is_all_given_back():
        time.sleep(0.1)
    check(is_all_given_back(), [entry["name"] for entry in placement_group_table().values()])
    print("ended")


def is_all_given_back() -> bool:
    states = [entry["state"] for entry in placement_group_table().values() if entry["name"].startswith("podium_counting_")]
    names = [entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True)]
    return states == ["REMOVED"] and not any(name.startswith("first") for name in names)


if __name__ == "__main__":
    {"make": make, "use": use, "end": end}[sys.argv[1]](sys.argv[2])

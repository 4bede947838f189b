"""Typed group calls, as a user writes them. `test_typed_calls.py` runs type checkers over this file: each line marked
`E:` must be an error, no other line may be one. It is never run.
"""

from typing import Any, assert_type

from podium.protocol import DataProto
from podium.single_controller import (
    Dispatch,
    Execute,
    FutureList,
    GroupFuture,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    collect_all_to_all,
    dispatch_one_to_all,
    register,
    register_dispatch_mode,
)
from podium.single_controller import make_nd_compute_dataproto_dispatch_fn as mesh

MINE = register_dispatch_mode("MINE", dispatch_one_to_all, collect_all_to_all)


class Actor(Worker):
    def __init__(self, scale: float, name: str = "a") -> None:
        self.scale = scale

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self, x: int) -> str:
        return str(x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def async_ping(self, x: int) -> str:
        return str(x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def later(self, x: int) -> str:
        return str(x)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def first(self) -> int:
        return 0

    @register(dispatch_mode=mesh("actor"))
    def update(self, batch: DataProto, *, lr: float = 1.0) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate(self, batch: DataProto) -> DataProto:
        return self.update(batch, lr=0.1)

    @register()
    def default(self, x: int) -> str:
        return str(x)

    @register(Dispatch.RANK_ZERO)
    def save(self, path: str) -> int:
        return len(path)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def score(self, batch: DataProto) -> float:
        return 0.0

    @register({"dispatch_fn": dispatch_one_to_all, "collect_fn": collect_all_to_all})
    def in_place(self, x: int) -> str:
        return str(x)

    @register(MINE, blocking=False)
    def mine(self, x: int) -> str:
        return str(x)

    @register(mesh("actor"), blocking=False)
    async def stream(self, batch: DataProto) -> DataProto:
        return batch

    def local(self, x: int) -> str:
        return self.ping(x)


class Child(Actor):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ping(self, x: int) -> str:
        return super().ping(x)


def right(batch: DataProto) -> None:
    group = WorkerGroup(ResourcePool([2]), Init(Actor, 1.0, name="x"), runtime="ray")
    assert_type(group, WorkerGroup[Actor])
    assert_type(WorkerGroup(ResourcePool([2]), Actor), WorkerGroup[Actor])
    assert_type(group.call.ping(3), list[str])
    assert_type(group.call.async_ping(3), list[str])
    assert_type(group.call.later(3), FutureList[str])
    assert_type(group.call.first(), int)
    assert_type(group.call.update(batch, lr=2.0), DataProto)
    assert_type(group.call.generate(batch), GroupFuture[DataProto])
    assert_type(group.call.generate.options(timeout=5)(batch).get(), DataProto)
    assert_type(group.call.default(3), list[str])
    assert_type(group.call.save("path"), int)
    assert_type(group.call.score(batch), list[float])
    assert_type(group.call.in_place(3), Any)
    assert_type(group.call.mine(3), Any)
    assert_type(group.call.stream(batch), GroupFuture[DataProto])
    assert_type(Actor(1.0).ping(3), str)
    assert_type(Actor(1.0).mine(3), str)
    assert_type(WorkerGroup(ResourcePool([2]), Init(Child, 1.0)).call.ping(3), list[str])


def wrong(group: WorkerGroup[Actor], batch: DataProto) -> None:
    Init(Actor, "no")  # E: scale is a float
    group.call.ping("no")  # E: x is an int
    group.call.update(batch, lx=1)  # E: no such keyword
    group.call.local(3)  # E: not registered: it would be called on the class
    group.call.mine("no")  # E: x is an int
    group.call.nope(3)  # E: no such method
    register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, execute_mode=Execute.RANK_ZERO)  # E: a batch mode runs on all ranks

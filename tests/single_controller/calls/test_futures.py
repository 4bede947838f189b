"""Futures between groups that really run at the same time: chained, awaited, read in parts, and not read."""

from __future__ import annotations

import asyncio
import operator
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from podium.errors import CallTimeoutError, DataError, DispatchError, WorkerError
from podium.protocol import DataProto
from podium.single_controller import (
    DataProtoFuture,
    Dispatch,
    Execute,
    FutureList,
    GroupFuture,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("ray_cluster")]


class Rows:
    """What a dispatch function may be handed."""

    seen: Any = None


def copy_and_note(group: WorkerGroup[Any], *args: Any, **kwargs: Any) -> Any:
    Rows.seen = args[0]
    value = args[0].get() if isinstance(args[0], GroupFuture) else args[0]
    return ([value] * group.world_size,), {}


def joined(group: WorkerGroup[Any], output: list[Any]) -> Any:
    return "+".join(map(str, output))


class Maker(Worker):
    def __init__(self) -> None:
        self.log: list[str] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make(self, batch: DataProto, nap_s: float = 0.3) -> DataProto:
        time.sleep(nap_s)
        if (batch.batch["x"] < 0).any():
            raise ValueError("negative rows")
        return DataProto({"x": batch.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def use(self, batch: DataProto) -> DataProto:
        self.log.append("use")
        return DataProto({"x": batch.batch["x"] * 10})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def use_later(self, batch: DataProto) -> DataProto:
        self.log.append("use_later")
        return DataProto({"x": batch.batch["x"] * 10})

    @register(dispatch_mode={"dispatch_fn": copy_and_note, "collect_fn": joined})
    def count_rows(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode={"dispatch_fn": copy_and_note, "collect_fn": joined}, blocking=False)
    def count_rows_later(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode={"dispatch_fn": copy_and_note, "collect_fn": joined}, materialize_futures=False)
    def count_unmaterialized(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def echo(self, value: object) -> object:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def calls(self) -> list[str]:
        log, self.log = self.log, []
        return log

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def square(self, x: int, nap_s: float = 0.0) -> int:
        time.sleep(nap_s)
        if x < 0:
            raise ValueError(f"negative on rank {self.rank}")
        return x * x

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO, blocking=False)
    def first(self, x: int, nap_s: float = 0.0) -> int:
        time.sleep(nap_s)
        if x == 3:
            raise ValueError("item 3")
        return x


@pytest.fixture(scope="module")
def maker() -> Iterator[WorkerGroup[Maker]]:
    with WorkerGroup(ResourcePool([2]), Maker, runtime="ray", name="makers", threads_per_rank=1) as group:
        yield group


@pytest.fixture(scope="module")
def user() -> Iterator[WorkerGroup[Maker]]:
    with WorkerGroup(ResourcePool([3]), Maker, runtime="ray", name="users", threads_per_rank=1) as group:
        yield group


@pytest.fixture(autouse=True)
def logs_begin_empty(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]) -> None:
    maker.calls(), user.calls()


def rows(*values: int) -> DataProto:
    return DataProto({"x": torch.tensor(values)})


def values(batch: DataProto) -> list[int]:
    found: list[int] = batch.batch["x"].tolist()
    return found


# -- one future ------------------------------------------------------------------------------------------------------------


def test_every_reader_gets_the_same_rows(maker: WorkerGroup[Maker]):
    future = maker.make(rows(1, 2, 3))
    assert isinstance(future, DataProtoFuture)
    assert not future.done()
    found: list[object] = []
    readers = [threading.Thread(target=lambda: found.append(future.get())) for _ in range(3)]
    for reader in readers:
        reader.start()
    assert values(future.get()) == [2, 3, 4]
    for reader in readers:
        reader.join()
    assert [values(one) for one in found] == [[2, 3, 4]] * 3
    assert len({id(one) for one in found}) == 3  # a copy for each: what one writes the others do not see
    assert future.done()


def test_every_reader_gets_the_same_error(maker: WorkerGroup[Maker]):
    future = maker.make(rows(-1, 1), 0.0)
    errors = []
    for _ in range(2):
        with pytest.raises(WorkerError, match="negative rows") as caught:
            future.get()
        errors.append(caught.value)
    assert errors[0] is errors[1]
    assert maker.calls() == [[], []]


def test_a_wait_with_a_limit_may_be_repeated(maker: WorkerGroup[Maker]):
    future = maker.make(rows(1, 2), 0.8)
    with pytest.raises(CallTimeoutError, match=r"'make' has not finished within 0\.05 s; it is still running") as caught:
        future.get(timeout=0.05)
    assert caught.value.silent_ranks == (0, 1)
    assert values(future.get(timeout=30.0)) == [2, 3]


# -- chains ----------------------------------------------------------------------------------------------------------------


def test_a_future_goes_into_a_call_that_waits(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    future = maker.make(rows(1, 2, 3, 4, 5))
    assert values(user.use(future)) == [20, 30, 40, 50, 60]
    assert values(user.use(batch=future)) == [20, 30, 40, 50, 60]


def test_chained_calls_finish_while_the_driver_sleeps(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    began = time.monotonic()
    chain = [maker.make(rows(1, 2, 3, 4, 5))]
    chain.append(user.use_later(chain[-1]))
    chain.append(maker.make(chain[-1], 0.0))
    chain.append(user.use_later(chain[-1]))
    assert time.monotonic() - began < 0.25  # nothing waited for the first
    time.sleep(3.0)
    assert [future.done() for future in chain] == [True] * 4
    assert values(chain[-1].get()) == [210, 310, 410, 510, 610]
    assert user.calls() == [["use_later"] * 2] * 3


def test_a_direct_call_follows_those_that_wait_for_their_arguments(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    later = user.use_later(maker.make(rows(1, 2, 3)))
    assert values(user.use(rows(7, 8, 9))) == [70, 80, 90]
    assert later.done() or values(later.get()) == [20, 30, 40]
    assert user.calls() == [["use_later", "use"]] * 3


@pytest.mark.parametrize("batch", [rows(1, 2, 3, 4, 5), rows()])
def test_blocking_and_not_give_the_same(maker: WorkerGroup[Maker], user: WorkerGroup[Maker], batch: DataProto):
    plain = DataProto({"x": batch.batch["x"] + 1})
    assert values(user.use(maker.make(batch))) == values(user.use_later(maker.make(batch)).get()) == values(user.use(plain))
    texts = [user.count_rows(maker.make(batch)), user.count_rows_later(maker.make(batch)).get(), user.count_rows(plain)]
    assert texts == ["+".join([str(len(batch))] * 3)] * 3  # the user's own collect function, each time


def test_blocking_and_not_fail_the_same(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    messages = []
    for call in (lambda: user.use(3), lambda: user.use_later(maker.first(4, 0.3)).get(), lambda: user.use_later(3)):
        with pytest.raises(DispatchError, match="must be a DataProto") as caught:
            call()
        messages.append(str(caught.value).replace("use_later", "use"))
    assert messages[0] == messages[2] == messages[1].replace("got 4", "got 3")


@pytest.mark.parametrize("is_blocking", [True, False])
def test_a_failed_producer_is_the_error_of_its_consumer(maker: WorkerGroup[Maker], user: WorkerGroup[Maker], is_blocking: bool):
    future = maker.make(rows(1, -1))
    with pytest.raises(WorkerError) as caught:
        user.use(future) if is_blocking else user.use_later(future).get()
    assert (caught.value.origin.group, caught.value.origin.method, caught.value.origin.rank) == ("makers", "make", 1)
    assert 'raise ValueError("negative rows")' in caught.value.remote_traceback
    with pytest.raises(WorkerError) as again:
        future.get()
    assert again.value is caught.value
    assert user.calls() == [[]] * 3  # the consumer was not called
    assert values(maker.make(rows(1, 2), 0.0).get()) == [2, 3]


def test_an_unread_chain_that_failed_is_raised_at_the_consumers_next_call(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    future = user.use_later(maker.make(rows(1, -1)))
    while not future.done():
        time.sleep(0.02)
    with pytest.raises(WorkerError, match="negative rows"):
        user.calls()
    assert user.calls() == [[]] * 3
    assert maker.calls() == [[]] * 2


def test_a_future_may_go_to_the_dispatch_function(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    future = maker.make(rows(1, 2))
    assert user.count_unmaterialized(future) == "2+2+2"
    assert Rows.seen is future
    assert user.count_rows(future) == "2+2+2"
    assert isinstance(Rows.seen, DataProto)
    assert values(Rows.seen) == values(future.get())


def test_a_future_inside_a_list_is_refused(maker: WorkerGroup[Maker]):
    future = maker.make(rows(1, 2), 0.0)
    named = DataProto({"x": torch.ones(1)}, {"future": [future]})
    for inside in ([future], {"rows": future}, (((future,),),), named, [maker.square(2)], {"squares": maker.square(2)}):
        with pytest.raises(DispatchError, match=r"stays in the driver.*not inside a list or dict.*call \.get\(\) on it"):
            maker.echo(inside)
    for one in (future, maker.square(2)):
        with pytest.raises(DataError, match="stays in the driver"):
            pickle.dumps(one)


# -- asyncio ---------------------------------------------------------------------------------------------------------------


def test_several_futures_are_awaited_at_once(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    async def drive() -> list[Any]:
        return await asyncio.gather(*(maker.make(rows(n), 0.1) for n in range(5)), user.square(7), return_exceptions=True)

    *batches, squares = asyncio.run(drive())
    assert [values(batch) for batch in batches] == [[n + 1] for n in range(5)]
    assert squares == [49] * 3


def test_the_loop_runs_while_a_future_is_awaited(maker: WorkerGroup[Maker]):
    async def drive() -> int:
        ticks = 0
        waiting = asyncio.ensure_future(_await(maker.make(rows(1), 0.5)))
        while not waiting.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert values(waiting.result()) == [2]
        return ticks

    assert asyncio.run(drive()) > 5


async def _await(future: Any) -> Any:
    return await future


def test_a_failure_in_a_background_task_ends_the_loop_at_once(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    hung = user.square(2, 6.0)

    async def produce() -> None:
        for item in range(8):
            await maker.first(item)

    async def drive() -> None:
        await asyncio.gather(_await(hung), produce())

    began = time.monotonic()
    with pytest.raises(WorkerError, match="item 3"):
        asyncio.run(drive())
    assert time.monotonic() - began < 5.0  # though another call goes on
    assert hung.get() == [4] * 3


def test_who_gives_up_awaiting_leaves_the_call_alone(maker: WorkerGroup[Maker]):
    future = maker.make(rows(1), 1.0)

    async def drive() -> None:
        await asyncio.wait_for(_await(future), 0.05)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(drive())
    assert time.monotonic() - began < 0.9
    assert values(future.get()) == [2]


# -- lists of futures ------------------------------------------------------------------------------------------------------


def test_a_list_of_futures_is_one_future_and_a_list_of_references(maker: WorkerGroup[Maker]):
    futures = maker.square(3)
    assert isinstance(futures, FutureList)
    assert isinstance(futures, list)
    assert len(futures) == 2
    assert ray.get(futures) == [9, 9]
    assert ray.get(futures[1]) == 9
    assert futures.get() == [9, 9]
    assert futures.done()


def test_rays_get_raises_what_the_worker_raised_and_that_counts_as_read(maker: WorkerGroup[Maker]):
    with pytest.raises(ValueError, match="negative on rank"):
        ray.get(maker.square(-1))
    assert maker.calls() == [[], []]  # it is not raised again


@pytest.mark.parametrize(
    "references",
    [
        *(operator.add, lambda a, b: operator.add([*a], b), lambda a, b: operator.add(a, [*b]), operator.iadd),
        *(lambda a, b: a.copy() + b.copy(), lambda a, b: [*reversed(a), *reversed(b)]),
    ],
)
def test_references_of_two_calls_in_one_list_are_read_by_whoever_gets_them(maker: WorkerGroup[Maker], references: Any):
    found = references(maker.square(2), maker.square(3))
    assert type(found) is list
    assert ray.get(found) == [4, 4, 9, 9]
    with pytest.raises(ValueError, match="negative on rank"):
        ray.get(references(maker.square(1), maker.square(-1)))
    assert maker.calls() == [[], []]


def test_references_are_joined_with_lists_only(maker: WorkerGroup[Maker]):
    futures = maker.square(2)
    for other in ({"a": 1}, "ab", 1):
        with pytest.raises(TypeError):
            futures + other
    assert futures.get() == [4, 4]


def test_a_stop_iteration_ends_the_wait_for_a_future():
    class Empty(Worker):
        @register(
            dispatch_mode={"dispatch_fn": copy_and_note, "collect_fn": lambda group, output: next(iter(()))}, blocking=False
        )
        def one(self, value: int) -> int:
            return value

    async def wait_for(group: WorkerGroup[Any]) -> None:
        await asyncio.wait_for(group.one(1), timeout=20)

    with WorkerGroup(ResourcePool([1]), Empty) as group, pytest.raises(RuntimeError, match="raised StopIteration"):
        asyncio.run(wait_for(group))


def test_an_unread_failure_of_a_list_is_raised_at_the_next_call(maker: WorkerGroup[Maker]):
    futures = maker.square(-1)
    while not futures.done():
        time.sleep(0.02)
    with pytest.raises(WorkerError, match="negative on rank") as caught:
        maker.calls()
    assert caught.value.origin.method == "square"
    assert maker.calls() == [[], []]


def test_a_list_of_futures_goes_into_a_call_as_its_values(maker: WorkerGroup[Maker], user: WorkerGroup[Maker]):
    assert user.echo(maker.square(2)) == [[4, 4]] * 3

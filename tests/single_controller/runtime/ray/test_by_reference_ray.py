"""What only real processes show of rows that stay: whose memory grows, who reads how much, what outlives whom."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import ray
import torch

from podium.errors import DataError, GroupClosedError, WorkerError, WorkerLostError
from podium.protocol import DataProto, jagged_from_rows
from podium.protocol.blocks import selected
from podium.protocol.column_types import bytes_of_columns
from podium.single_controller import (
    DataProtoFuture,
    Dispatch,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    recorded_traffic,
    register,
)
from podium.single_controller.runtime.ray import store
from tests.single_controller.runtime.ray.memory_of_ray import anonymous_bytes, store_bytes, store_falls_to

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("ray_cluster")]

MIB = 2**20


class Stage(Worker):
    """A link of a chain of calls. It counts what it reads of rows that lie elsewhere."""

    def __init__(self) -> None:
        self.read: list[dict[str, int]] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def produce(self, rows: DataProto, values: int) -> DataProto:
        numbers = rows.batch["x"]
        wide = numbers.float()[:, None].expand(-1, values).contiguous()
        tokens = jagged_from_rows([torch.arange(n % 3 + 1) + 10 * n for n in numbers.tolist()])
        return DataProto({"x": numbers, "wide": wide, "tokens": tokens}, {"name": [f"row {n}" for n in numbers.tolist()]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def produce_later(self, rows: DataProto, values: int) -> DataProto:
        return self.produce(rows, values)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def transform(self, rows: DataProto) -> DataProto:
        return DataProto({"x": rows.batch["x"], "half": rows.batch["wide"].bfloat16() / 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def consume(self, rows: DataProto) -> DataProto:
        wide = rows.batch["half"] if "half" in rows.batch else rows.batch["wide"]
        edges = torch.stack([wide[:, 0], wide[:, -1]], dim=1).float()
        return DataProto({"x": rows.batch["x"], "edges": edges, "rank": torch.full((len(rows),), self.rank)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def consume_later(self, rows: DataProto) -> DataProto:
        return self.consume(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, rows: DataProto) -> DataProto:
        return rows

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def echo_stays(self, rows: DataProto) -> DataProto:
        return rows

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory(self) -> int:
        return anonymous_bytes()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def watch(self) -> None:
        self.read = []

        def counted(*args: Any, **kwargs: Any) -> DataProto:
            found = selected(*args, **kwargs)
            self.read.append(bytes_of_columns(found))
            return found

        store.selected = counted

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def what_was_read(self) -> list[dict[str, int]]:
        return self.read

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        if self.rank == rank:
            sys.exit(3)


def rows(count: int) -> DataProto:
    return DataProto({"x": torch.arange(count)})


def stages(num_ranks: int, **how: Any) -> WorkerGroup[Any]:
    return WorkerGroup(ResourcePool([num_ranks]), Stage, runtime="ray", threads_per_rank=1, **how)


@pytest.fixture(scope="module")
def four(ray_cluster: None) -> Iterator[WorkerGroup[Any]]:
    with stages(4) as group:
        yield group


@pytest.fixture(scope="module")
def two(ray_cluster: None) -> Iterator[WorkerGroup[Any]]:
    with stages(2) as group:
        yield group


# -- what goes through the driver (C1), who reads how much (C2) -----------------------------------------------------------


@pytest.mark.parametrize("payload", [64 * MIB, pytest.param(256 * MIB, marks=pytest.mark.slow)], ids=["64 MB", "256 MB"])
def test_a_chain_of_calls_leaves_the_drivers_memory_alone(four: WorkerGroup[Any], payload: int) -> None:
    """C1: the driver grows by less than 5 % of what the stages make and hand on; it moves row numbers."""
    chain(four, MIB)  # everything is imported, and allocated that stays
    empty, before = store_bytes(), anonymous_bytes()
    with recorded_traffic() as traffic:
        sizes = chain(four, payload)
    assert max(sizes) - before < payload / 20
    assert traffic.through_driver() < 4096
    assert traffic.bytes["transform", "read", "wide"] == payload
    assert store_falls_to(empty)


def chain(group: WorkerGroup[Any], payload: int) -> list[int]:
    """Produce, move rows, transform, consume; what the driver has of memory of its own after each."""
    count = 16
    order = list(reversed(range(count)))
    made = group.produce(rows(count), payload // count // 4)
    sizes, held = [anonymous_bytes()], store_bytes()
    assert held >= payload
    moved = DataProtoFuture.concat(made.select(["x", "wide"], [])[order].partition(3)).repeat(2)[::2]
    assert store_bytes() == held
    sizes.append(anonymous_bytes())
    transformed = group.transform(moved)
    sizes.append(anonymous_bytes())
    found = group.consume(transformed)
    assert found.batch["x"].tolist() == order
    assert found.batch["edges"].tolist() == [[n / 2, n / 2] for n in order]
    return [*sizes, anonymous_bytes()]


@pytest.mark.parametrize("shift", [0, 5], ids=["its own shard", "half of two shards"])
def test_a_consumer_reads_its_own_rows_and_nothing_else(four: WorkerGroup[Any], shift: int) -> None:
    """C2: four producers of 1 MB, four consumers, no call blocks."""
    count, values = 40, MIB // 4 // 10
    order = [*range(shift, count), *range(shift)]
    four.watch()
    made = four.produce_later(rows(count), values)
    found = four.consume_later(made[order].select(["x", "wide"], [])).get()
    read = four.what_was_read()
    assert [len(reads) for reads in read] == [1 if shift == 0 else 2] * 4
    assert [sum(one["wide"] for one in reads) for reads in read] == [10 * values * 4] * 4
    assert {key for reads in read for one in reads for key in one} == {"wide"}
    assert found.batch["x"].tolist() == order
    by_value = four.consume(made.get()[order])
    assert torch.equal(found.batch["edges"], by_value.batch["edges"])
    assert found.batch["rank"].tolist() == by_value.batch["rank"].tolist()


# -- nothing grows (C4) ---------------------------------------------------------------------------------------------------


def batch_with_objects(step: int) -> DataProto:
    """2 MB, a quarter of it objects."""
    texts = [bytes([step % 256]) * (MIB // 64) for _ in range(32)]
    return DataProto({"x": torch.full((32, 12 * 1024), float(step))}, {"image": texts, "note": [{"step": step}] * 32})


def grown(group: WorkerGroup[Any], method: str, *, steps: int, mark: int) -> list[float]:
    """How much larger the driver, each worker and the store are after all the steps than after the first `mark`, in MB."""
    sizes: list[list[int]] = []
    for step in range(steps):
        found = getattr(group, method)(batch_with_objects(step))
        found = found.get() if isinstance(found, DataProtoFuture) else found
        assert float(found.batch["x"][-1, 0]) == step
        assert found.non_tensor_batch["note"][31] == {"step": step}
        del found
        if step + 1 in (mark, steps):
            store_falls_to(0, within_s=1.0)
            sizes.append([anonymous_bytes(), *group.memory(), store_bytes()])
    return [(after - before) / MIB for before, after in zip(*sizes, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["echo", "echo_stays"])
def test_memory_levels_off(two: WorkerGroup[Any], method: str) -> None:
    """C4: by value and by reference; every step moves 2 MB each way."""
    assert max(grown(two, method, steps=300, mark=100)) < 4


@pytest.mark.slow
def test_a_thousand_steps_by_reference_leave_nothing_behind(two: WorkerGroup[Any]) -> None:
    from ray._private.worker import global_worker

    sizes = []
    for step in range(1000):
        made = two.echo_stays(two.produce(rows(4), 2))
        assert two.consume(made).batch["x"].tolist() == [0, 1, 2, 3]
        del made
        if step + 1 in (300, 1000):
            gc.collect()
            sizes.append([anonymous_bytes(), *two.memory(), len(global_worker.core_worker.get_all_reference_counts())])
    grown_by = [after - before for before, after in zip(*sizes, strict=True)]
    assert grown_by[-1] < 20, "references stay"
    assert max(grown_by[:-1]) < 4 * MIB


def test_rows_live_as_long_as_anything_names_them(two: WorkerGroup[Any]) -> None:
    gc.collect()
    before = store_bytes()
    made = two.produce(rows(8), MIB // 8)
    part = made[:1].select(["wide"], [])
    del made
    gc.collect()
    assert store_bytes() - before >= 2 * MIB  # of the block that has the row
    assert part.get().batch["wide"][0, 0] == 0
    del part
    assert store_falls_to(before)


# -- what outlives whom ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_outlive_the_ranks_that_made_them(four: WorkerGroup[Any]) -> None:
    with stages(2) as producers:
        made, later = producers.produce(rows(6), MIB), producers.produce_later(rows(3), MIB // 8)
        later.value()
        with pytest.raises(WorkerLostError):
            producers.die(1)
        read_by_others(four, made, later)
        producers.restart()
        read_by_others(four, made, later)
        assert producers.consume(made).batch["rank"].tolist() == [0, 0, 0, 1, 1, 1]
    read_by_others(four, made, later)


def read_by_others(group: WorkerGroup[Any], made: DataProtoFuture, later: DataProtoFuture) -> None:
    assert made.get(keys=["wide"]).batch["wide"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert group.consume(made[[5, 0, 3]]).batch["edges"].tolist() == [[5, 5], [0, 0], [3, 3]]
    assert group.consume(later).batch["x"].tolist() == [0, 1, 2]
    assert later.get(keys=["name"]).non_tensor_batch["name"].tolist() == ["row 0", "row 1", "row 2"]


def test_rows_of_another_session_are_not_asked_for(two: WorkerGroup[Any]) -> None:
    """Ray's own error for such a reference arrives late, or never: see the script below."""
    made = two.produce(rows(4), MIB)
    gone = DataProtoFuture.of(made.value().with_blocks(lambda block: replace(block, session="another")))
    for use in (gone.get, lambda: two.consume(gone)):
        with pytest.raises(GroupClosedError, match="session that was shut down: read them before, or make them anew"):
            use()
    assert gone.get(keys=["x"]).batch["x"].tolist() == [0, 1, 2, 3]  # in the header
    assert two.consume(made).batch["x"].tolist() == [0, 1, 2, 3]


ANOTHER_SESSION = """
import ray, torch
from podium.errors import GroupClosedError
from podium.protocol import DataProto
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register

class Maker(Worker):
    @register(Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def make(self, rows): return DataProto({"wide": rows.batch["x"][:, None].expand(-1, 50_000).clone(), "x": rows.batch["x"]})
    @register(Dispatch.DP_COMPUTE_PROTO)
    def total(self, rows): return rows

def is_refused(use):
    try:
        use()
    except GroupClosedError as error:
        assert "in a Ray session that was shut down: read them before, or make them anew" in str(error), error
    else:
        raise AssertionError("an error was expected")

rows = DataProto({"x": torch.arange(4)})
made = WorkerGroup(ResourcePool([2]), Maker, runtime="ray").make(rows)
ray.shutdown()
is_refused(made.get)
assert made.get(keys=["x"]).batch["x"].tolist() == [0, 1, 2, 3]  # in the header
group = WorkerGroup(ResourcePool([2]), Maker, runtime="ray")
assert group.total(group.make(rows)).batch["wide"][3, 0] == 3
is_refused(made.get)
is_refused(lambda: group.total(made))
assert group.total(made.select(["x"])).batch["x"].tolist() == [0, 1, 2, 3]
print("refused")
"""


@pytest.mark.slow
def test_rows_of_a_session_that_was_shut_down_are_refused() -> None:
    ended = subprocess.run([sys.executable, "-c", ANOTHER_SESSION], capture_output=True, text=True, timeout=120, check=False)
    assert ended.stdout.splitlines()[-1:] == ["refused"], ended.stderr


# -- many calls at once (C6) ----------------------------------------------------------------------------------------------


class Crowd(Worker):
    """A method that returns when so many callers are in it at once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.inside = 0
        self.all_here: asyncio.Event | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def meet(self, caller: int) -> int:
        self.all_here = self.all_here or asyncio.Event()
        self.inside += 1
        if self.inside == self.size:
            self.all_here.set()
        await self.all_here.wait()
        return caller


def test_as_many_callers_as_there_are_meet_in_a_coroutine() -> None:
    """C6: Ray's own limit is 1,000 at once, above which calls would hang."""
    with WorkerGroup(ResourcePool([1]), Init(Crowd, 1500), runtime="ray", threads_per_rank=1) as group:
        calls = [group.meet(caller) for caller in range(1500)]
        assert [call.get(timeout=60) for call in calls] == [[caller] for caller in range(1500)]


class Noting(Stage):
    """Its coroutine method says in which order it was started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[int] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def note(self, rows: DataProto, number: int) -> DataProto:
        self.started.append(number)
        await asyncio.sleep(0)
        return rows.select(["x"], [])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def look(self) -> list[int]:
        return self.started

    def say(self, text: str) -> None:
        print(text, flush=True)


@pytest.mark.slow
def test_coroutines_start_in_the_order_of_their_calls_also_where_they_read_rows() -> None:
    with WorkerGroup(ResourcePool([2]), Noting, runtime="ray", threads_per_rank=1) as group:
        made = group.produce(rows(4), 4 * MIB)
        gone = made.value().with_blocks(lambda block: replace(block, ref=ray.put("no rows")))
        notes = [group.note([made, rows(4), DataProtoFuture.of(gone)][number % 3], number) for number in range(12)]
        for number, note in enumerate(notes):
            if number % 3 == 2:
                with pytest.raises(WorkerError):
                    note.get()
            else:
                assert note.get().batch["x"].tolist() == [0, 1, 2, 3]
        assert group.look() == [[0, 1, 3, 4, 6, 7, 9, 10]] * 2
        group.execute_all_sync("say", "what a rank wrote")
        lines = group.status().ranks[0].last_lines
        assert "what a rank wrote" in lines
        assert "ray.get" not in lines  # of which Ray warns in an asynchronous actor


def test_a_failure_to_read_is_the_calls_own(two: WorkerGroup[Any]) -> None:
    """Rows that a rank cannot read are an error with its rank, and the group goes on."""
    made = two.produce(rows(4), MIB)
    with pytest.raises(WorkerError, match="wide"):
        two.consume(made.select(["x"], []))
    assert two.consume(made).batch["x"].tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match="no column 'wid'; did you mean 'wide'"):
        made.get(keys=["wid"])

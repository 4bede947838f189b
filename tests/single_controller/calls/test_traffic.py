"""Bytes by call, way and column, against counts by hand, on both runtimes: a shard's, a mesh's, and those of calls sent later.

Row n has n % 4 + 1 tokens of 8 bytes: six rows have 1 + 2 + 3 + 4 + 1 + 2 = 13, which are 104 bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from podium.protocol import DataProto, jagged_from_rows
from podium.protocol.blocks import LocalBlock, to_header_and_block
from podium.protocol.jagged import parts
from podium.protocol.remote_concat import concat_remote_rows
from podium.protocol.remote_rows import RemoteRows
from podium.single_controller import (
    DataProtoFuture,
    Dispatch,
    Init,
    ResourcePool,
    Traffic,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    recorded_traffic,
    register,
)
from podium.single_controller.calls.traffic import DRIVER, recording
from podium.single_controller.routing.modes import DispatchPair

WIDE = 32 * 1024
"""Values of 4 bytes in a row of a dense column: too large for a header, so it stays."""


def made_of(rows: DataProto) -> DataProto:
    numbers = rows.batch["x"].tolist()
    tokens = jagged_from_rows([torch.arange(n % 4 + 1) for n in numbers])
    wide = torch.zeros(len(numbers), WIDE)
    return DataProto({"x": rows.batch["x"], "wide": wide, "tokens": tokens}, {"name": [f"row {n}" for n in numbers]})


def labels(numbers: list[int]) -> list[str]:
    return [f"{number:050000}" for number in numbers]


WHOLE: DispatchPair = {"dispatch_fn": lambda group, rows: ((rows,), {}), "collect_fn": lambda group, outputs: outputs}
"""A mode of a user's own, for which the driver reads rows that lie elsewhere."""


class Maker(Worker):
    """Makes rows by value and by reference, and weighs what it gets."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("pair", self.rank // 2, self.rank % 2 == 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def make(self, rows: DataProto) -> DataProto:
        return made_of(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make_value(self, rows: DataProto) -> DataProto:
        return made_of(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def make_slowly(self, rows: DataProto) -> DataProto:
        time.sleep(0.5)
        return made_of(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def weigh(self, rows: DataProto) -> DataProto:
        """[B] float32: the bytes that came here, the same for every row of a rank."""
        values = [parts(column)[0] if column.is_nested else column for column in rows.batch.values()]
        return DataProto({"bytes": torch.full((len(rows),), float(sum(column.nbytes for column in values)))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def weigh_later(self, rows: DataProto) -> DataProto:
        return self.weigh(rows)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pair"))
    def weigh_in_pairs(self, rows: DataProto) -> DataProto:
        return self.weigh(rows)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count(self, rows: DataProto) -> int:
        return len(rows)

    @register(dispatch_mode=WHOLE, blocking=False)
    def count_later(self, rows: DataProto) -> int:
        return len(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def tell(self, rows: DataProto) -> DataProto:
        return DataProto({}, {"text": ["a" * 50_000 for _ in range(len(rows))]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def label(self, rows: DataProto) -> DataProto:
        """Names that are too long for a header."""
        return DataProto({"x": rows.batch["x"]}, {"uid": labels(rows.batch["x"].tolist())})


@pytest.fixture(scope="module", params=["inline", pytest.param("ray", marks=pytest.mark.slow)])
def group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup[Any]]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with WorkerGroup(ResourcePool([4]), Init(Maker), runtime=request.param) as made:
        yield made


def rows(count: int) -> DataProto:
    return DataProto({"x": torch.arange(count)})


def table(traffic: Traffic) -> dict[str, dict[str, int]]:
    """{"call way": {column: bytes}}"""
    found: dict[str, dict[str, int]] = {}
    for (call, way, column), count in traffic.counted().items():
        found.setdefault(f"{call} {way}", {})[column] = count
    return found


def test_a_chain_by_reference(group: WorkerGroup[Any]) -> None:
    with recorded_traffic() as traffic:
        made = group.make(rows(6))
        group.weigh(made.select(["tokens"], [], []))
        made[1:3].get(keys=["tokens", "x"])
    assert table(traffic) == {
        "make sent": {"x": 48},
        "make returned": {"x": 48, "name": 30},
        "make stayed": {"wide": 6 * 4 * WIDE, "tokens": 104},
        "weigh read": {"tokens": 104},
        "weigh returned": {"bytes": 24},
        "driver fetched": {"tokens": (2 + 3) * 8},
    }
    assert traffic.through_driver() == 48 + 48 + 30 + 24 + 40


def test_the_same_chain_by_value_is_all_through_the_driver(group: WorkerGroup[Any]) -> None:
    with recorded_traffic() as traffic:
        made = group.make_value(rows(6))
        group.weigh(made.select(["tokens"], [], []))
    assert table(traffic) == {
        "make_value sent": {"x": 48},
        "make_value returned": {"x": 48, "wide": 6 * 4 * WIDE, "tokens": 104, "name": 30},
        "weigh sent": {"tokens": 104},
        "weigh returned": {"bytes": 24},
    }
    assert traffic.through_driver() == sum(traffic.bytes.values())


@pytest.mark.parametrize(
    ("order", "lengths"), [([5, 0], 2 + 1), ([3, 3, 3, 0, 1], 3 * 4 + 1 + 2), ([0, 1, 2, 3, 4, 5], 13), ([2], 3)]
)
def test_what_ranks_read_is_their_rows_of_their_columns(group: WorkerGroup[Any], order: list[int], lengths: int) -> None:
    made = group.make(rows(6)).select(["tokens", "wide"], [], [])
    with recorded_traffic() as traffic:
        weights = group.weigh(made[order]).batch["bytes"]
    expected = {"tokens": lengths * 8, "wide": len(order) * 4 * WIDE}
    assert table(traffic)["weigh read"] == expected
    ranks = [part.tolist() for part in weights.tensor_split(4) if len(part)]
    assert sum(shard[0] for shard in ranks) == sum(expected.values())  # as the ranks counted it


def test_a_shard_that_ranks_share_counts_once(group: WorkerGroup[Any]) -> None:
    made = group.make(rows(6)).select(["x", "tokens"], [], [])
    with recorded_traffic() as traffic:
        group.weigh_in_pairs(made)
        group.weigh_in_pairs(rows(6))
        assert group.count(made) == [6, 6, 6, 6]
    assert table(traffic) == {
        "weigh_in_pairs sent": {"x": 48 + 48},  # of both calls; six columns came with the first result's header
        "weigh_in_pairs read": {"tokens": 104},
        "weigh_in_pairs returned": {"bytes": 24 + 24},  # by one rank of each pair
        "count sent": {"x": 48},
        "count read": {"tokens": 104},
    }


def test_rows_that_only_pad_count_as_they_are_sent(group: WorkerGroup[Any]) -> None:
    with recorded_traffic() as traffic:
        group.weigh(DataProto({"x": torch.arange(5)}, auto_padding=True))
    assert table(traffic)["weigh sent"] == {"x": 8 * 8}


def test_calls_that_are_sent_later_count_too(group: WorkerGroup[Any]) -> None:
    with recorded_traffic() as traffic:
        first = group.make_slowly(rows(6))
        second = group.weigh_later(first.as_argument())
        was_running = not first.done()
    before = table(traffic)
    second.get()
    assert table(traffic) == {
        "make_slowly sent": {"x": 48},
        "make_slowly returned": {"x": 48, "name": 30},
        "make_slowly stayed": {"wide": 6 * 4 * WIDE, "tokens": 104},
        "weigh_later sent": {"x": 48, "name": 30},
        "weigh_later read": {"wide": 6 * 4 * WIDE, "tokens": 104},
        "weigh_later returned": {"bytes": 24},
    }
    if was_running:
        assert before == {"make_slowly sent": {"x": 48}}


def test_rows_that_the_driver_reads_for_a_call_that_is_sent_later_are_fetched(group: WorkerGroup[Any]) -> None:
    with recorded_traffic() as traffic:
        counted = group.count_later(group.make_slowly(rows(6)).select(["tokens"], [], []))
        slow = group.count_later(group.make_slowly(rows(6)))
    assert (counted.get(), slow.get()) == ([6] * 4, [6] * 4)
    assert table(traffic)["driver fetched"] == {"tokens": 104 + 104, "wide": 6 * 4 * WIDE}
    assert table(traffic)["count_later sent"] == {"tokens": 104 + 104, "x": 48, "wide": 6 * 4 * WIDE, "name": 30}


def test_rows_that_are_awaited_count_as_fetched(group: WorkerGroup[Any]) -> None:
    async def awaited() -> Any:
        return await group.make(rows(6))

    with recorded_traffic() as traffic:
        assert len(asyncio.run(awaited())) == 6
    assert table(traffic)["driver fetched"] == {"wide": 6 * 4 * WIDE, "tokens": 104}


def test_of_objects_it_is_an_estimate_wherever_they_lie(group: WorkerGroup[Any]) -> None:
    with recorded_traffic() as traffic:
        reports = group.tell(rows(8))
        reports.get()
    assert table(traffic)["tell stayed"] == table(traffic)["driver fetched"] == {"text": 8 * 50_000}


def test_a_column_that_joins_rows_is_read_by_the_driver_on_either_side(group: WorkerGroup[Any]) -> None:
    made, other = group.label(rows(6)), group.label(rows(6)).rename("x", "y")[::-1]
    with recorded_traffic() as traffic:
        joined = made.union(other, on="uid")
        assert joined.get(keys=["y"]).batch["y"].tolist() == [0, 1, 2, 3, 4, 5]
    assert table(traffic) == {"driver fetched": {"uid": (6 + 6) * 50_000}}
    with recorded_traffic() as traffic:
        made[:2].union(DataProto({"z": torch.arange(2)}, {"uid": labels([1, 0])}), on="uid")
    assert table(traffic) == {"driver fetched": {"uid": 2 * 50_000}}
    with recorded_traffic() as traffic:
        group.make(rows(4))[:2].union(DataProto({"z": torch.arange(2)}, {"name": ["row 1", "row 0"]}), on="name")
    assert "driver fetched" not in table(traffic)  # names that came with the header


def test_the_drivers_rows_beside_others_are_sent(group: WorkerGroup[Any]) -> None:
    made, mine = group.make(rows(6)), made_of(rows(4))
    with recorded_traffic() as traffic:
        joined = DataProtoFuture.concat([made, mine]).select(["tokens"], [], [])
        weights = group.weigh(joined).batch["bytes"]
        group.weigh(joined[6:])
        joined.get()
        joined[7:].get()
    assert table(traffic) == {
        "weigh read": {"tokens": 104},
        "weigh sent": {"tokens": 2 * (1 + 2 + 3 + 4) * 8},
        "weigh returned": {"bytes": (10 + 4) * 4},
        "driver fetched": {"tokens": 104},
    }
    assert sum(part[0].item() for part in weights.tensor_split(4)) == 104 + (1 + 2 + 3 + 4) * 8


def test_only_what_is_called_in_the_block_counts(group: WorkerGroup[Any]) -> None:
    made = group.make(rows(6))
    with recorded_traffic() as traffic:
        assert recording() is traffic
    made.get()
    group.weigh(rows(6))
    assert table(traffic) == {}
    assert recording() is None


def test_a_second_block_counts_on_in_what_it_is_given(group: WorkerGroup[Any]) -> None:
    with recorded_traffic() as traffic:
        made = group.make(rows(6))
    counted = table(traffic)
    with recorded_traffic(traffic) as same:
        made.get(keys=["tokens"])
    assert same is traffic
    assert table(traffic) == {**counted, "driver fetched": {"tokens": 104}}


def test_counts_of_one_column_add_up() -> None:
    traffic = Traffic()
    traffic.add("f", "sent", {"a": 1, "b": 2})
    traffic.add("f", "sent", {"b": 3})
    traffic.add("f", "stayed", {"b": 100})
    traffic.add(DRIVER, "fetched", {"b": 7})
    assert traffic.counted() == {
        ("f", "sent", "a"): 1,
        ("f", "sent", "b"): 5,
        ("f", "stayed", "b"): 100,
        (DRIVER, "fetched", "b"): 7,
    }
    assert traffic.through_driver() == 6 + 7


class Watched(LocalBlock):
    """A block that counts how often something asks whose it is."""

    looks = 0

    @property
    def is_of_rank(self) -> bool:  # type: ignore[override]
        Watched.looks += 1
        return True


@pytest.mark.parametrize("ranks", [4, 64])
def test_counting_the_shards_of_a_call_looks_at_each_body_once(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "looks", 0)
    made = []
    for _ in range(ranks):
        header, block = to_header_and_block(made_of(rows(2)))
        made.append(RemoteRows.of(header, Watched.__new__(Watched)))
        object.__setattr__(made[-1].blocks[0], "rows", block)
    shards = concat_remote_rows(made).partition(ranks)
    Watched.looks = 0
    traffic = Traffic()
    for shard in shards:
        traffic.sent("update", [shard])
    assert Watched.looks == ranks
    assert traffic.counted()["update", "read", "tokens"] == ranks * (1 + 2) * 8

"""Rows that stay where they were made: what a group returns of them, and what its next call gets, on both runtimes."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from podium.errors import DataError, DispatchError, RegistrationError, WorkerError
from podium.protocol import DataProto, jagged_from_rows
from podium.protocol.jagged import jagged
from podium.single_controller import (
    DataProtoFuture,
    Dispatch,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

BIG = 32 * 1024
"""Values of a row of a dense column that is too large for a header."""


class Maker(Worker):
    """Makes rows, changes them, counts what it was sent."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("pair", self.rank // 2, self.rank % 2 == 0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def make(self, rows: DataProto) -> DataProto:
        numbers = rows.batch["x"].tolist()
        found = [torch.arange(n % 4 + 1) + 10 * n for n in numbers]
        none = jagged(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
        tokens = jagged_from_rows(found) if found else none
        wide = torch.tensor(numbers, dtype=torch.float32).repeat_interleave(BIG).reshape(-1, BIG)
        columns = {"x": rows.batch["x"], "wide": wide, "tokens": tokens, "mask": torch.ones_like(tokens)}
        return DataProto(columns, {"name": [f"row {n}" for n in numbers]}, {"maker": "m"})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def total(self, rows: DataProto) -> DataProto:
        sums = [float(row.batch["tokens"].sum()) for row in rows]
        seen = torch.full((len(rows),), len(rows.batch.keys()))
        first, rank = rows.batch["wide"][:, 0], torch.full((len(rows),), self.rank)
        return DataProto({"sum": torch.tensor(sums), "wide_0": first, "columns": seen, "rank": rank})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, rows: DataProto) -> DataProto:
        return DataProto({"y": rows.batch["tokens"] * 2})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait_for(self, rows: DataProto, inside: object = None) -> int:
        time.sleep(0.3)
        return len(rows)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def fail(self, rows: DataProto) -> DataProto:
        raise ValueError("no rows today")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def nothing(self, rows: DataProto) -> None:
        return None

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("pair"), by_reference=True)
    def on_mesh(self, rows: DataProto) -> DataProto:
        return DataProto({"t": rows.batch["tokens"], "who": torch.full((len(rows),), self.rank)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def pair(self, rows: DataProto, others: DataProto) -> DataProto:
        return rows.union(others)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self, rows: DataProto) -> int:
        return len(rows)


@pytest.fixture(scope="module", params=["inline", "ray"])
def group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup[Any]]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with WorkerGroup(ResourcePool([4]), Init(Maker), runtime=request.param) as made:
        yield made


def rows(count: int) -> DataProto:
    return DataProto({"x": torch.arange(count)})


def test_a_blocking_call_returns_a_future_whose_lengths_are_here(group: WorkerGroup[Any]) -> None:
    made = group.make(rows(6))
    assert isinstance(made, DataProtoFuture)
    assert len(made) == 6
    assert made.lengths("tokens").tolist() == [1, 2, 3, 4, 1, 2]
    assert made.get(keys=["x", "name"]).non_tensor_batch["name"].tolist() == [f"row {n}" for n in range(6)]
    assert made.meta_info == {"maker": "m"}
    whole = made.get()
    assert whole.batch["tokens"].values()[:3].tolist() == [0, 10, 11]
    assert whole.batch["wide"][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert (whole.batch["tokens"] * whole.batch["mask"]).values().tolist() == whole.batch["tokens"].values().tolist()


def test_columns_are_chosen_renamed_and_joined_without_reading_them(group: WorkerGroup[Any]) -> None:
    made = group.make(rows(5))
    few = made.select(["x", "tokens"], [], [])
    assert few.column_names() == {"x", "tokens"}
    assert few.meta_info == {}
    other = group.on_mesh(made).rename("t", "again")
    joined = made.union(other).union(DataProto({"reward": torch.arange(5.0)}, {"note": list("abcde")}))
    assert joined.column_names() == {"x", "wide", "tokens", "mask", "name", "again", "who", "reward", "note"}
    last = joined[[4, 0]].get(keys=["again", "reward", "note", "tokens"])
    assert last.batch["again"].values().tolist() == last.batch["tokens"].values().tolist() == [40, 0]
    assert last.batch["reward"].tolist() == [4.0, 0.0]
    assert last.non_tensor_batch["note"].tolist() == ["e", "a"]
    assert made.column_names() == {"x", "wide", "tokens", "mask", "name"}  # it never changes


def test_a_rank_gets_its_rows_and_the_declared_columns_only(group: WorkerGroup[Any]) -> None:
    made = group.make(rows(6)).select(["tokens", "wide"], [], [])
    found = group.total(made[[5, 4, 3, 2, 1, 0]])
    assert found.batch["wide_0"].tolist() == [5, 4, 3, 2, 1, 0]
    assert found.batch["columns"].tolist() == [2] * 6
    assert found.batch["rank"].tolist() == [0, 0, 1, 1, 2, 3]


def test_fewer_rows_than_ranks_and_none(group: WorkerGroup[Any]) -> None:
    two = group.on_mesh(group.make(rows(2)))
    assert two.get().batch["t"].values().tolist() == [0, 10, 11]
    none = group.make(rows(4))[:0]
    assert len(none) == 0
    assert none.get().batch["tokens"].dtype == torch.int64
    assert group.on_mesh(none).get().batch["t"].is_nested


def test_padding_is_trimmed(group: WorkerGroup[Any]) -> None:
    made = group.make(DataProto({"x": torch.arange(5)}, auto_padding=True))
    assert len(made) == 5
    padded = made.union(DataProto(meta_info={}))
    assert group.on_mesh(padded).get().batch["t"].values().tolist() == made.get().batch["tokens"].values().tolist()


def test_chains_of_calls_that_do_not_block(group: WorkerGroup[Any]) -> None:
    twice = group.later(group.make(rows(5)))
    assert isinstance(twice, DataProtoFuture)
    four = group.later(twice.rename("y", "tokens"))
    assert four.get().batch["y"].values().tolist() == (4 * group.make(rows(5)).get().batch["tokens"].values()).tolist()


def test_every_rank_may_get_all_rows(group: WorkerGroup[Any]) -> None:
    assert group.whole(group.make(rows(3))) == [3, 3, 3, 3]


def test_results_that_are_not_rows_and_failures(group: WorkerGroup[Any]) -> None:
    nothing = group.nothing(rows(4))
    assert nothing.get() is None
    with pytest.raises(DataError, match="returned NoneType, not rows"):
        nothing[:1]
    with pytest.raises(WorkerError, match="no rows today"):
        group.fail(rows(4))
    made = group.make(rows(4))
    with pytest.raises(DataError, match="no column 'tokenz'; did you mean 'tokens'"):
        made.get(keys=["tokenz"])
    with pytest.raises(DataError, match="'mask' is in both batches and remote"):
        made.union(group.make(rows(4)))
    with pytest.raises(DispatchError, match="argument 0 has 4 rows, argument 1 has 3"):
        group.pair(made, made[:3])
    with pytest.raises(DataError, match="cannot be iterated one by one"):
        list(made)


def test_a_future_of_the_drivers_rows_never_changes() -> None:
    mine = DataProto({"x": torch.tensor([1, 2])}, {"o": [["a"], ["b"]]}, {"step": [1]})
    future = DataProtoFuture.of(mine)
    mine.batch["x"].fill_(9)
    mine.non_tensor_batch["o"][0].append("c")
    mine.meta_info["step"].append(2)
    found = future.get()
    assert (found.batch["x"].tolist(), found.non_tensor_batch["o"].tolist()) == ([1, 2], [["a"], ["b"]])
    assert found.meta_info == future.meta_info == {"step": [1]}


def test_rows_that_only_the_caller_has_are_not_copied() -> None:
    returned = DataProto({"x": torch.tensor([1, 2])})
    assert DataProtoFuture.owning(returned).value().fetched().batch["x"].data_ptr() == returned.batch["x"].data_ptr()


def test_a_future_inside_an_argument_is_refused(group: WorkerGroup[Any]) -> None:
    made = group.make(rows(4))
    assert copy.copy(made) is made
    with pytest.raises(DataError, match="stays in the driver"):
        copy.deepcopy({"rows": [made]})
    named = DataProto({"x": torch.ones(4)}, {"future": [made] * 4})
    for inside in ([made], {"rows": made}, ((made,),), named):
        with pytest.raises(DispatchError, match=r"stays in the driver.*not inside a list or dict"):
            group.whole(inside)
        with pytest.raises(DispatchError, match=r"stays in the driver.*not inside a list or dict"):
            group.wait_for(group.wait_for(rows(1)), inside)  # copied before it is sent: its first argument is not there yet


def test_only_batch_modes_collect_by_reference() -> None:
    with pytest.raises(RegistrationError, match="by_reference needs a batch mode, got ONE_TO_ALL"):
        register(dispatch_mode=Dispatch.ONE_TO_ALL, by_reference=True)  # type: ignore[call-overload]

"""Rows that stay where they are made are the rows that would have travelled: what every runtime must do of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from podium.errors import DataError, WorkerError
from podium.protocol import DataProto, jagged_from_rows
from podium.protocol.jagged import jagged, lengths_of, parts
from podium.single_controller import DataProtoFuture, Dispatch, Worker, WorkerGroup, register
from podium.testing.expecting import expected

WIDE = 1 << 15
"""Values of a row of a column that is too large to come with what a rank answers."""
ROWS = 6


class RowMaker(Worker):
    """Makes the same rows by value and by reference, and says what it was given."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows_by_value(self, batch: DataProto) -> DataProto:
        return made_of(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def rows_by_reference(self, batch: DataProto) -> DataProto:
        return made_of(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def rows_later(self, batch: DataProto) -> DataProto:
        return made_of(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def handed_on(self, batch: DataProto) -> DataProto:
        return batch.union(DataProto({"rank": torch.full((len(batch),), self.rank)}))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def padding_of(self, batch: DataProto) -> list[bool]:
        marks: list[bool] = batch.padding_mask.tolist()
        return marks

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def overwritten(self, batch: DataProto) -> DataProto:
        for column in batch.batch.values():
            values_of(column).fill_(0)
        batch.non_tensor_batch["name"][:] = None
        for note in batch.non_tensor_batch["note"]:
            note.clear()
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def returns_nothing(self, batch: DataProto) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def fails_by_reference(self, batch: DataProto) -> DataProto:
        raise KeyError(f"no rows of rank {self.rank}")

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def fails_later(self, batch: DataProto) -> DataProto:
        raise KeyError(f"no rows of rank {self.rank}")


def made_of(batch: DataProto) -> DataProto:
    """Columns of every kind, large and small; row n has n % 3 tokens. One asks for gradients."""
    numbers: list[int] = batch.batch["x"].tolist()
    tokens = [torch.arange(n % 3) + 10 * n for n in numbers]
    ids = jagged_from_rows(tokens) if tokens else jagged(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    wide = torch.tensor(numbers, dtype=torch.bfloat16)[:, None].expand(-1, WIDE).contiguous()
    gains = jagged(parts(ids)[0] / 4, parts(ids)[1])
    return DataProto(
        {"x": batch.batch["x"], "wide": wide.requires_grad_(), "ids": ids, "gains": gains, "odd": batch.batch["x"] % 2 == 1},
        {"name": [f"row {n}" for n in numbers], "note": [{"n": [n]} for n in numbers]},
        batch.meta_info,
    )


MOVES: tuple[Callable[[Any], Any], ...] = (
    lambda rows: rows[1:4],
    lambda rows: rows[::-2],
    lambda rows: rows[[5, 0, 0, 3]],
    lambda rows: rows[torch.arange(ROWS) > 3],
    lambda rows: rows[:0],
    lambda rows: rows.repeat(2),
    lambda rows: rows.repeat(2, interleave=False),
    lambda rows: rows.sample_level_repeat([0, 2, 0, 1, 0, 3]),
    lambda rows: rows.partition(4)[3],
    lambda rows: rows.split(4)[1],
    lambda rows: type(rows).concat([rows[4:], rows[:1], rows[2:3]]),
    lambda rows: rows.select(["ids", "gains"], ["name"], []),
    lambda rows: next(rows.make_iterator(4, 1, 3, last="pad")),
)
"""What a driver does with rows between two calls."""


def check_by_reference(group: WorkerGroup[Any]) -> None:
    """Rows that stay give what rows that travel give: read here, moved, and as arguments of the next call."""
    batch = DataProto({"x": torch.arange(ROWS)}, meta_info={"step": 3})
    value = group.rows_by_value(batch)
    for stays in (group.rows_by_reference(batch), group.rows_later(batch)):
        assert isinstance(stays, DataProtoFuture)
        assert (len(stays), stays.meta_info["step"]) == (ROWS, 3)
        assert stays.column_names() == {*value.batch, *value.non_tensor_batch}
        assert stays.lengths("ids").tolist() == lengths_of(value.batch["ids"]).tolist()
        check_same(stays.get(), value)
        check_same(stays.get(keys=["gains", "note"]), value.select(["gains"], ["note"]))
        for move in MOVES:
            check_same(move(stays).get(), move(value))
            check_same(group.handed_on(move(stays)), group.handed_on(move(value)))
    reward = DataProto({"reward": torch.arange(ROWS)}, {"why": list("abcdef")})
    check_same(
        group.handed_on(stays.rename("ids", "tokens").union(reward)), group.handed_on(value.rename("ids", "tokens").union(reward))
    )


def check_rows_that_stay_never_change(group: WorkerGroup[Any]) -> None:
    """A worker writes into what it was given, the driver into what it read or joined: the rows are what they were."""
    batch = DataProto({"x": torch.arange(ROWS)})
    value, stays = group.rows_by_value(batch), group.rows_by_reference(batch)
    spoilt = group.overwritten(stays).get()
    assert not any(values_of(column).any() for column in spoilt.batch.values())
    assert spoilt.non_tensor_batch["note"].tolist() == [{}] * ROWS
    check_same(stays.get(), value)
    for read in (stays.get(), stays[2:].get(), stays[[3, 1]].get()):
        for column in read.batch.values():
            values_of(column).fill_(1)
        for note in read.non_tensor_batch["note"]:
            note["n"].append("mine")
    stays.lengths("ids").zero_()
    reward = torch.zeros(ROWS)
    joined = stays.union(DataProto({"reward": reward}))
    reward.fill_(9)
    assert not joined.get(keys=["reward"]).batch["reward"].any()
    assert "reward" not in stays.column_names()
    check_same(stays.get(), value)


def check_padding_of_rows_that_stay(group: WorkerGroup[Any]) -> None:
    """They are padded to equal shards, and trimmed, as rows that travel are; fewer than ranks and none go through too."""
    for count in (5, 2, 0):
        batch = DataProto({"x": torch.arange(count)}, auto_padding=True)
        value, stays = group.rows_by_value(batch), group.rows_by_reference(batch)
        assert len(stays) == count
        assert group.padding_of(stays) == group.padding_of(value)
        check_same(group.handed_on(stays), group.handed_on(value))
        check_same(stays.get(), value)


def check_results_that_are_not_rows(group: WorkerGroup[Any]) -> None:
    """A result that is not rows says so. A failure is raised where the result is read, with the rank's traceback."""
    batch = DataProto({"x": torch.arange(ROWS)})
    nothing = group.returns_nothing(batch)
    assert nothing.get() is None
    with expected(DataError) as refused:
        nothing.select(["x"])
    assert "not rows" in str(refused.error)
    with expected(WorkerError) as failed:
        group.fails_by_reference(batch)
    assert failed.error.origin.method == "fails_by_reference"
    with expected(WorkerError) as chained:
        group.handed_on(group.fails_later(batch))
    assert chained.error.origin.method == "fails_later"
    assert "in fails_later" in chained.error.remote_traceback
    assert "no rows of rank" in chained.error.cause_message
    with expected(DataError) as unknown:
        group.rows_by_reference(batch).get(keys=["idz"])
    assert "did you mean 'ids'" in str(unknown.error)


def check_same(found: DataProto, value: DataProto) -> None:
    """The same rows, which are the reader's own; columns of equal lengths can be multiplied."""
    assert found.batch.keys() == value.batch.keys()
    for key, column in value.batch.items():
        mine = found.batch[key]
        assert (mine.dtype, mine.is_nested, mine.requires_grad) == (column.dtype, column.is_nested, False)
        assert torch.equal(values_of(mine), values_of(column)), f"column {key!r} differs"
        assert not column.is_nested or lengths_of(mine).tolist() == lengths_of(column).tolist()
    assert {key: rows.tolist() for key, rows in found.non_tensor_batch.items()} == {
        key: rows.tolist() for key, rows in value.non_tensor_batch.items()
    }
    assert found.meta_info == value.meta_info
    if {"ids", "gains"} <= found.batch.keys():
        assert len(values_of(found.batch["ids"] * found.batch["gains"])) == len(values_of(found.batch["ids"]))


def values_of(column: Tensor) -> Tensor:
    return parts(column)[0] if column.is_nested else column


REFERENCE_CHECKS: tuple[Callable[[WorkerGroup[Any]], None], ...] = (
    check_by_reference,
    check_rows_that_stay_never_change,
    check_padding_of_rows_that_stay,
    check_results_that_are_not_rows,
)

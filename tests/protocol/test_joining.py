"""Joining side by side: rows matched by an id, and errors that say which row differs, in what, and what to do."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import DataError
from podium.protocol import DataProto, jagged_from_rows
from podium.protocol.remote_rows import RemoteRows
from tests.protocol.builders import FOUR, ROWS, Row, batch_of, check, ragged


@given(ROWS, st.randoms(use_true_random=False))
def test_rows_come_back_in_any_order_and_match_by_id(rows: list[Row], rng: random.Random) -> None:
    """B11: generation returns shuffled rows; the join is by row id."""
    ids = [f"row-{number}" for number in range(len(rows))]
    data = batch_of(rows).union(DataProto(non_tensor_batch={"id": ids}))
    answers = data.pop(["tokens", "gains"]).union(DataProto(non_tensor_batch={"id": ids}))
    answers.reorder(rng.sample(range(len(rows)), len(rows)))
    joined = data.union(answers, on="id")
    assert joined.pop([], ["id"]).non_tensor_batch["id"].tolist() == ids
    check(joined, rows)


def test_ids_may_be_a_tensor_column() -> None:
    data = DataProto({"id": torch.tensor([3, 1, 2])})
    data.union(DataProto({"id": torch.tensor([1, 2, 3]), "x": torch.tensor([10, 20, 30])}), on="id")
    assert data.batch["x"].tolist() == [30, 10, 20]


@pytest.mark.parametrize("join", [DataProto.union, lambda mine, theirs, on: RemoteRows.of_local(mine).union(theirs, on=on).get()])
def test_ids_of_two_kinds_match_and_the_first_batchs_stay(join: Any) -> None:
    """Of the other's ids nothing is left: the name would be that of a tensor column and of an object column."""
    tensors = DataProto({"id": torch.tensor([3, 1, 2]), "x": torch.tensor([30, 10, 20])})
    objects = DataProto({"y": torch.tensor([-1, -2, -3])}, {"id": [1, 2, 3]})
    narrow = DataProto({"id": torch.tensor([1, 2, 3], dtype=torch.int32), "y": torch.tensor([-1, -2, -3])})
    for other in (objects, narrow):
        joined = join(tensors.select(), other, on="id")
        assert {key: column.tolist() for key, column in joined.batch.items()} == {
            "id": [3, 1, 2],
            "x": [30, 10, 20],
            "y": [-3, -1, -2],
        }
        assert (joined.batch["id"].dtype, list(joined.non_tensor_batch)) == (torch.int64, [])
        assert len(other) == 3
        assert "id" in {*other.batch, *other.non_tensor_batch}
    joined = join(objects.select(), tensors, on="id")
    assert (joined.batch["x"].tolist(), joined.non_tensor_batch["id"].tolist(), "id" in joined.batch) == (
        [10, 20, 30],
        [1, 2, 3],
        False,
    )


def test_an_unrepeated_batch_says_how_often_to_repeat_it() -> None:
    """B11: two prompts beside six responses."""
    prompts, responses = DataProto({"p": torch.ones(2)}), DataProto({"r": torch.ones(6)})
    for first, second in ((prompts, responses), (responses, prompts)):
        message = rf"got {len(first)} and {len(second)} \(6 = 2 x 3: repeat\(3\) the smaller one first\)"
        with pytest.raises(DataError, match=message):
            first.union(second)
    assert prompts.repeat(3).union(responses).batch.keys() == {"p", "r"}
    with pytest.raises(DataError, match=r"got 6 and 4$"):
        responses.union(DataProto({"q": torch.ones(4)}))


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ([1, 2, 2], [1, 2, 3], "union: rows 1 and 2 both have id 2; join on values that are distinct"),
        ([1, 2, 3], [3, 1, 3], "union: rows 0 and 2 both have id 3"),
        ([1, [2], 3], [1, 2, 3], r"union: row 1 has id \[2\], a list; join on strings or numbers"),
        ([1, 2, 3], [1, 2, 4], "union: row 2 has id 3, which no row of the other batch has"),
        ([1, 2], [1, 2, 3, 4], r"got 2 and 4 \(4 = 2 x 2"),
    ],
)
def test_ids_that_do_not_match_are_named(mine: list[Any], theirs: list[Any], message: str) -> None:
    data = DataProto(non_tensor_batch={"id": mine})
    with pytest.raises(DataError, match=message):
        data.union(DataProto({"x": torch.ones(len(theirs))}, {"id": theirs}), on="id")
    assert not data.batch
    with pytest.raises(DataError, match="no column 'uid'; did you mean 'id'"):
        data.union(data.select(), on="uid")


NAN = float("nan")


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        (torch.tensor([1.0, NAN, 3.0]), torch.tensor([1.0, NAN, 4.0]), "row 2: 3.0 and 4.0"),
        (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]), r"row 1: int64\[2\] \[3, 4\] and int64\[2\] \[3, 5\]"),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), r"float32\[2\] \[1.0, 1.0\] and int64\[2\] \[1, 1\]"),
        (ragged([[1], [2, 3]]), ragged([[1], [2]]), r"row 1: int64\[2\] \[2, 3\] and int64\[1\] \[2\]"),
        (ragged([[1]]), torch.tensor([[1]]), r"int64\[1, \*\] and int64\[1, 1\] \[\[1\]\]"),
        (
            jagged_from_rows([torch.ones(1, 1)], 2),
            jagged_from_rows([torch.ones(1, 1)]),
            r"float32\[1, 1, \*\] and float32\[1, ",
        ),
        (ragged([range(9)]), ragged([[*range(8), 9]]), r"row 0, element \[8\]: 8 and 9$"),
        (torch.zeros(1, 99), torch.ones(1, 99), r"row 0, element \[0\]: 0.0 and 1.0$"),
    ],
)
def test_the_row_and_both_values_are_in_the_error(mine: torch.Tensor, theirs: torch.Tensor, message: str) -> None:
    data = DataProto({"c": mine})
    with pytest.raises(DataError, match=f"tensor column 'c' is in both batches with different values: {message}"):
        data.union(DataProto({"c": theirs, "d": theirs}))
    assert list(data.batch) == ["c"]


def test_objects_and_meta_show_both_values_too() -> None:
    data = DataProto(non_tensor_batch={"o": ["a", [NAN, 1]]}, meta_info={"m": [1]})
    with pytest.raises(DataError, match=r"object column 'o' .*: row 1: \[nan, 1\] and \[nan, 2\]"):
        data.union(DataProto(non_tensor_batch={"o": ["a", [NAN, 2]]}))
    with pytest.raises(DataError, match=r"meta key 'm' .*: \[1\] and 'x{100,116}\.\.\.$"):
        data.union(DataProto(meta_info={"m": "x" * 500}))
    with pytest.raises(DataError, match=r"meta key 'a' .*: row 1: np.int64\(2\) and np.int64\(3\)"):
        DataProto(meta_info={"a": np.array([1, 2])}).union(DataProto(meta_info={"a": np.array([1, 3])}))


def test_a_batch_without_columns_joins_with_any() -> None:
    data = DataProto(meta_info={"m": 1}).union(batch_of(FOUR))
    assert data.meta_info.pop("m") == 1
    check(data, FOUR)
    check(batch_of(FOUR).union(DataProto()), FOUR)

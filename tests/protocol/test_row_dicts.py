"""Single rows, and batches made of dicts whose keys differ."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from podium.errors import DataError
from podium.protocol import DataProto, DataProtoItem, equality
from tests.protocol.builders import FOUR, META, batch_of, lists_of

# -- one row ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [2, -2, np.int64(2)])
def test_a_row_by_its_number(index: Any) -> None:
    data = batch_of(FOUR)
    item = data[index]
    assert isinstance(item, DataProtoItem)
    assert (item.batch["number"].item(), item.non_tensor_batch["text"], item.meta_info) == (2, "c", META)
    assert (item.batch["tokens"].tolist(), item.batch["pairs"].tolist()) == ([4], [])
    assert item.batch["places"].tolist() == [[4], [-4]]
    item.batch["tokens"].fill_(9)
    item.meta_info["notes"]["seen"].append(2)
    assert data.batch["tokens"].values().tolist() == [1, 2, 3, 9, 5, 6]
    assert data.meta_info == META


def test_iterating_gives_every_row_and_ends() -> None:
    assert [item.non_tensor_batch["text"] for item in batch_of(FOUR)] == ["a", None, "c", "d"]
    assert list(DataProto()) == []


def test_a_row_knows_whether_it_is_padding() -> None:
    data = DataProto({"x": torch.arange(3)}, meta_info={"_podium_padding_rows": (2,)})
    assert [item.meta_info.get("_podium_padding_rows") for item in data] == [None, None, (0,)]


# -- dicts --------------------------------------------------------------------------------------------------------------

EXTRAS: list[dict[str, Any]] = [{"a": 1}, {"a": 2, "b": 3}, {}]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_columns_are_the_union_of_the_keys(order: tuple[int, ...]) -> None:
    """No key vanishes because the first row lacks it, whatever the order of the rows."""
    data = DataProto.from_rows([EXTRAS[row] for row in order])
    assert data.non_tensor_batch["a"].tolist() == [[1, 2, None][row] for row in order]
    assert data.non_tensor_batch["b"].tolist() == [[None, 3, None][row] for row in order]
    assert not data.batch


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_two_workers_with_different_keys_give_what_one_would(cut: int) -> None:
    """A10: also where a column is numbers on one worker, and partly or wholly missing on the other."""
    rows = [*EXTRAS, {"a": 4, "t": torch.tensor([1, 2])}]
    parts = [DataProto.from_rows(part) for part in (rows[:cut], rows[cut:])]
    joined = DataProto.concat(parts, missing="none")
    assert joined.non_tensor_batch["a"].tolist() == [1, 2, None, 4]
    assert joined.non_tensor_batch["b"].tolist() == [None, 3, None, None]
    tokens = joined.non_tensor_batch["t"]
    assert (tokens[:3].tolist(), tokens[3].tolist()) == ([None] * 3, [1, 2])


def test_columns_that_every_part_has_are_joined_as_ever() -> None:
    joined = DataProto.concat([batch_of(FOUR[:1]), batch_of(FOUR[1:]).select()], missing="none")
    assert list(joined.batch) == list(batch_of(FOUR).batch)
    with pytest.raises(DataError, match=r"part 1 .* object columns: missing \['b'\]"):
        DataProto.concat([DataProto.from_rows([{"b": "x"}]), DataProto()])


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2], torch.int64),
        ([0, 0.5], torch.float64),
        ([True, False], torch.bool),
        ([np.float32(1), np.float32(2)], torch.float32),
        ([np.int8(1), np.int8(2)], torch.int8),
        ([torch.tensor(1.0), torch.tensor(2.0)], torch.float32),
        ([np.uint64(1), np.int64(-1)], torch.int64),
        ([np.uint64(3), 4], torch.int64),
        ([np.int8(1), np.int16(300)], torch.int16),
        ([np.uint64(2**53), 0.5], torch.float64),
        ([np.complex64(1), np.complex64(2)], torch.complex64),
    ],
)
def test_numbers_that_every_row_has_get_a_type_that_holds_them_all(values: list[Any], dtype: torch.dtype) -> None:
    column = DataProto.from_rows([{"n": value} for value in values]).batch["n"]
    assert (column.dtype, column.shape, column.tolist()) == (dtype, (2,), [complex(value) for value in values])


@pytest.mark.parametrize(
    "values",
    [
        *([True, 1], [2**63, 1], ["1", 1], [None, 1], [[1], [2]], [torch.ones(1), None], [1, torch.ones(1)]),
        *([np.uint64(2**63 + 1), np.int64(-1)], [np.uint64(2**63 + 1), 1], [2**53 + 1, 0.5], [np.uint64(2**53 + 1), 0.5]),
        *([np.timedelta64(1, "s"), np.timedelta64(2, "s")], [np.longdouble(1), np.longdouble(2)], [np.longdouble(1), 2.0]),
    ],
)
def test_all_else_stays_objects(values: list[Any]) -> None:
    assert DataProto.from_rows([{"o": value} for value in values]).non_tensor_batch["o"].tolist() == values


NUMBERS: list[list[Any]] = [
    [1, 0, 0.5],
    [0.5, 1, 0],
    [True, False, 1],
    [np.uint64(2**63 + 1), np.int64(-1), 1],
    [np.uint64(7), np.int64(-1), 1],
    [2**53 + 1, 0.5, 1],
    [np.float32(0.5), 1, 2],
    [1, torch.ones(2), torch.ones(1)],
    [np.int8(1), np.int16(300), 70_000],
]


@pytest.mark.parametrize("values", NUMBERS, ids=str)
@pytest.mark.parametrize("cuts", [(1, 1), (2, 2), (1, 2), (0, 1), (0, 0), (3, 3)])
def test_numbers_of_several_workers_are_what_one_would_make_of_them(values: list[Any], cuts: tuple[int, int]) -> None:
    """Also where some workers have no rows at all, and so no columns."""
    rows = [{"r": value} for value in values]
    whole = DataProto.from_rows(rows)
    parts = [DataProto.from_rows(part) for part in (rows[: cuts[0]], rows[cuts[0] : cuts[1]], rows[cuts[1] :])]
    joined = DataProto.concat(parts, missing="none")
    assert (list(joined.batch), list(joined.non_tensor_batch)) == (list(whole.batch), list(whole.non_tensor_batch))
    if whole.batch:
        assert joined.batch["r"].dtype == whole.batch["r"].dtype
        assert joined.batch["r"].tolist() == whole.batch["r"].tolist() == values
    else:
        found = joined.non_tensor_batch["r"].tolist()
        assert all(equality.equal(mine, one) for mine, one in zip(found, values, strict=True))
        assert [isinstance(value, bool) for value in found] == [isinstance(value, bool) for value in values]


def test_a_worker_without_rows_decides_nothing() -> None:
    tokens = [torch.tensor([1, 2]), torch.tensor([3])]
    full = DataProto.from_rows([{"t": row, "s": row * 2, "n": 1.5, "o": "a"} for row in tokens])
    floats = DataProto({"n": torch.zeros(0, dtype=torch.float32), "t": torch.zeros(0)}, {"s": []})
    for parts in ([DataProto.from_rows([]), full], [full, DataProto()], [floats, full, DataProto.from_rows([])]):
        joined = DataProto.concat(parts, missing="none")
        assert (set(joined.batch), joined.non_tensor_batch["o"].tolist()) == ({"t", "s", "n"}, ["a", "a"])
        assert (lists_of(joined.batch["t"]), joined.batch["n"].dtype, joined.batch["n"].tolist()) == (
            [[1, 2], [3]],
            torch.float64,
            [1.5, 1.5],
        )
        assert (joined.batch["t"] + joined.batch["s"]).values().tolist() == [3, 6, 9]
    none = DataProto.concat([DataProto.from_rows([]), full[:0]], missing="none")
    assert (list(none.batch), len(none), none.batch["t"].dtype) == (["t", "s", "n"], 0, torch.int64)


def test_joined_without_missing_none_types_must_agree() -> None:
    parts = [DataProto.from_rows([{"r": 1}, {"r": 0}]), DataProto.from_rows([{"r": 0.5}])]
    with pytest.raises(DataError, match=r"column 'r' differs between parts: int64\[2\], float64\[1\]"):
        DataProto.concat(parts)


def test_tensors_become_jagged_also_when_they_are_equally_long() -> None:
    for rows in ([[1, 2], [3, 4]], [[1], [2, 3, 4]], [[], [1]]):
        column = DataProto.from_rows([{"t": torch.tensor(row, dtype=torch.int64)} for row in rows]).batch["t"]
        assert lists_of(column) == rows
    stacked = DataProto.from_rows([{"t": torch.tensor([1, 2])}, {"t": torch.tensor([3, 4])}], {"m": 1}, stack=["t"])
    assert (stacked.batch["t"].tolist(), stacked.meta_info) == ([[1, 2], [3, 4]], {"m": 1})
    assert len(DataProto.from_rows([])) == 0


@pytest.mark.parametrize(
    ("rows", "stack", "message"),
    [
        ([{"a": 1}, [1]], [], r"row 1 is a list, not a dict: \[1\]"),
        (
            [{"t": torch.ones(2)}, {"t": torch.ones(3)}],
            ["t"],
            r"'t': row 1 is torch.float32\[3\], but row 0 is torch.float32\[2\]",
        ),
        ([{"t": torch.ones(2)}, {"t": torch.ones(2, 2)}], [], r"'t': row 1 is float32\[2, 2\], but row 0 is float32\[2\]"),
        ([{"t": torch.ones(2)}], ["tt"], "no column 'tt'; did you mean 't'"),
        ([{"t": torch.ones(2)}, {}], ["t"], "column 't' is to be stacked, but is None in row 1"),
        ([{"t": True}, {"t": 2}], ["t"], "column 't' is to be stacked, but is True in row 0"),
        (
            [{"t": torch.ones(2)}, {"t": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)}],
            [],
            r"column 't': row 1 is a nested tensor, but a row has a dense one: .* or list\(value.unbind\(\)\)",
        ),
        (
            [{"t": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)}],
            ["t"],
            "column 't': row 0 is a nested tensor",
        ),
        ([{"t": torch.ones(2).to_sparse()}] * 2, [], "column 't': row 0 has layout torch.sparse_coo, .* use .to_dense"),
        ([{"t": torch.ones(2)}, {"t": torch.ones(2, device="meta")}], [], "'t': row 1 is on meta, but row 0 is on cpu: move"),
    ],
)
def test_rows_that_do_not_fit_are_named(rows: list[Any], stack: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataProto.from_rows(rows, stack=stack)


MIXED = [torch.tensor(1.0), torch.tensor(3), torch.tensor(2.0, dtype=torch.bfloat16), 0.5, 1, np.float32(1.5), True, None, "x"]


@pytest.mark.parametrize("first", MIXED)
def test_a_tensor_of_one_number_is_a_number_beside_another_workers(first: Any) -> None:
    for second in MIXED:
        whole = DataProto.from_rows([{"r": first}, {"r": second}])
        joined = DataProto.concat([DataProto.from_rows([{"r": value}]) for value in (first, second)], missing="none")
        assert joined.batch.keys() == whole.batch.keys()
        for key, column in whole.batch.items():
            assert (joined.batch[key].dtype, joined.batch[key].tolist()) == (column.dtype, column.tolist())
        for key, rows in whole.non_tensor_batch.items():
            assert joined.non_tensor_batch[key].tolist() == rows.tolist()
            assert not any(isinstance(value, torch.Tensor) for value in rows)

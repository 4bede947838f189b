"""Arithmetic of offsets: padding and back, joining rows, row numbers."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import DataError
from podium.protocol import DataProto, memory
from podium.protocol.jagged import (
    BLOCK,
    from_padded,
    gather,
    gather_index,
    interleave,
    jagged_from_rows,
    lengths_of,
    offsets_of,
    parts,
    ragged_dim,
    row_ids,
    row_of,
    take,
    to_padded,
)
from tests.protocol.builders import lists_of, ragged


@pytest.mark.parametrize("lengths", [[3, 5, 4], [0, 2, 0], [1], [], [0, 0]])
def test_padding_is_as_wide_as_the_longest_row_and_comes_off_again(lengths: list[int]) -> None:
    """B9: lengths [3, 5, 4] make a rectangle [3, 5], not one as wide as the sum; also with rows of no tokens."""
    column = ragged([[10 * row + i + 1 for i in range(length)] for row, length in enumerate(lengths)])
    padded = to_padded(column)
    assert padded.shape == (len(lengths), max(lengths, default=0))
    assert (padded != 0).sum(1).tolist() == lengths
    assert lists_of(from_padded(padded, lengths_of(column))) == lists_of(column)


def test_padding_fills_and_keeps_trailing_dims() -> None:
    padded = to_padded(ragged([[[1, 2]], [[3, 4], [5, 6]]], torch.float32, 2), fill=-1)
    assert padded.tolist() == [[[1, 2], [-1, -1]], [[3, 4], [5, 6]]]


def test_offsets_and_row_numbers() -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8):
        offsets = offsets_of(torch.tensor([2, 0, 3], dtype=dtype))
        assert (offsets.tolist(), offsets.dtype) == ([0, 2, 2, 5], torch.int64)
    assert row_ids(offsets).tolist() == [0, 0, 2, 2, 2]
    assert row_ids(offsets_of(torch.tensor([], dtype=torch.int64))).tolist() == []


def test_gather_index_finds_the_values_of_rows_in_any_order() -> None:
    index, offsets = gather_index(torch.tensor([0, 2, 2, 5]), torch.tensor([2, 1, 0, 2]))
    assert index.tolist() == [2, 3, 4, 0, 1, 2, 3, 4]
    assert offsets.tolist() == [0, 3, 3, 5, 8]
    for rows, expected in (([], []), ([1], []), ([1, 1, 0, 1], [0, 1])):
        index, offsets = gather_index(torch.tensor([0, 2, 2, 5]), torch.tensor(rows, dtype=torch.int64))
        assert (index.tolist(), index.dtype, len(offsets)) == (expected, torch.int64, len(rows) + 1)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.data())
def test_a_large_index_is_that_of_a_small_one(lengths: list[int], draw: st.DataObject) -> None:
    offsets = offsets_of(torch.tensor(lengths))
    rows = torch.tensor(draw.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=8)), dtype=torch.int64)
    small = gather_index(offsets, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "LARGE_BYTES", 1)
        large = gather_index(offsets, rows)
    assert [part.tolist() for part in large] == [part.tolist() for part in small]
    assert large[0].dtype is torch.int64


@given(st.lists(st.integers(0, 3), max_size=5), st.data(), st.sampled_from([1, BLOCK // 2, BLOCK]))
def test_long_runs_are_taken_as_blocks_and_are_the_same_values(short: list[int], draw: st.DataObject, scale: int) -> None:
    offsets = offsets_of(torch.tensor([length * scale for length in short], dtype=torch.int64))
    values = torch.arange(int(offsets[-1]) * 2).reshape(-1, 2)
    chosen = draw.draw(st.lists(st.integers(0, len(short) - 1), max_size=8)) if short else []
    rows = torch.tensor(chosen, dtype=torch.int64)
    expected, expected_offsets = gather_index(offsets, rows)
    index, new_offsets = gather(offsets, rows)
    assert torch.equal(take(values, index), values[expected])
    assert new_offsets.tolist() == expected_offsets.tolist()


def test_neighbouring_rows_are_one_block() -> None:
    offsets = torch.tensor([0, 1, 2 * BLOCK, 2 * BLOCK, 5 * BLOCK])
    assert gather(offsets, torch.tensor([1, 2, 3, 0, 1]))[0] == [slice(1, 5 * BLOCK), slice(0, 2 * BLOCK)]
    assert isinstance(gather(offsets, torch.tensor([0, 0, 0]))[0], torch.Tensor)


def test_interleave_joins_row_by_row() -> None:
    joined = interleave(ragged([[1, 2], [], [3]]), ragged([[], [7], [8, 9]]))
    assert lists_of(joined) == [[1, 2], [7], [3, 8, 9]]
    assert lists_of(interleave(ragged([]), ragged([]))) == []
    with pytest.raises(DataError, match="rows must agree to be joined: 1 and 2"):
        interleave(ragged([[1]]), ragged([[1], [2]]))


def test_a_column_from_rows_of_tensors() -> None:
    column = jagged_from_rows([torch.tensor([1.0]), torch.tensor([]), torch.tensor([2.0, 3.0])])
    assert lists_of(column) == [[1.0], [], [2.0, 3.0]]
    with pytest.raises(DataError, match="its dtype would be unknown"):
        jagged_from_rows([])


def test_rows_that_do_not_fit_one_column_are_named() -> None:
    for second, message in (
        (torch.ones(2, 3), r"row 1 is float32\[2, 3\], but row 0 is float32\[2, 2\]: only dim 1 may differ"),
        (torch.ones(1, 2, dtype=torch.int8), r"row 1 is int8\[1, 2\], but row 0 is float32\[2, 2\]"),
        (torch.tensor(1.0), r"row 1 has shape \(\): no dim that can be dim 1 of the column"),
    ):
        with pytest.raises(DataError, match=message):
            jagged_from_rows([torch.ones(2, 2), second])


ROWS_2 = [torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.zeros(3, 0, dtype=torch.int64), torch.tensor([[7], [8], [9]])]


def test_any_dim_may_be_the_ragged_one() -> None:
    """Positions of several kinds per token, [B, 3, *]: the same arithmetic, and torch's own operations agree."""
    column = jagged_from_rows(ROWS_2, 2)
    assert (ragged_dim(column), lengths_of(column).tolist(), parts(column)[0].shape) == (2, [2, 0, 1], (3, 3))
    assert [row.tolist() for row in column.unbind()] == [row.tolist() for row in ROWS_2]
    assert [row_of(column, row).tolist() for row in range(3)] == [row.tolist() for row in ROWS_2]
    padded = to_padded(column, fill=-1)
    assert padded.tolist()[2] == [[7, -1], [8, -1], [9, -1]]
    assert [row.tolist() for row in from_padded(padded, lengths_of(column), 2).unbind()] == [row.tolist() for row in ROWS_2]


def test_the_ragged_dim_may_be_the_third() -> None:
    rows = [torch.arange(12).reshape(2, 3, 2), torch.arange(6).reshape(2, 3, 1)]
    data = DataProto({"c": jagged_from_rows(rows, 3)})
    assert repr(data).startswith("DataProto(2 rows; c: int64[2, 2, 3, *]")
    for result in (data[[0, 1]], DataProto.concat(data.chunk(2)), pickle.loads(pickle.dumps(data)), data.clone()):
        assert [row.tolist() for row in result.batch["c"].unbind()] == [row.tolist() for row in rows]


def test_pieces_of_rows_stay_ragged_in_their_dim() -> None:
    data = DataProto({"c": jagged_from_rows(ROWS_2[:2], 2)}).unfold_column_chunks(2)
    assert [row.tolist() for row in data.batch["c"].unbind()] == [[[1], [3], [5]], [[2], [4], [6]], [[]] * 3, [[]] * 3]


def test_torchs_own_columns_of_another_ragged_dim_are_taken() -> None:
    rows = DataProto({"turned": ragged([[[1, 2]], [[3, 4], [5, 6]]], torch.float32, 2).transpose(1, 2)})
    assert [row.tolist() for row in rows[[1, 0]].batch["turned"].unbind()] == [[[3, 5], [4, 6]], [[1], [2]]]
    with pytest.raises(DataError, match=r"'turned' differs between parts: float32\[2, 2, \*\], float32\[2, \*, 2\]"):
        DataProto.concat([rows, DataProto({"turned": rows.batch["turned"].transpose(1, 2)})])


def test_equal_lengths_stay_jagged_and_multiply() -> None:
    data = DataProto({"a": jagged_from_rows([torch.ones(2)] * 2), "b": jagged_from_rows([torch.full((2,), 3.0)] * 2)})
    for result in (data, data[[1]], data.repeat(2), DataProto.concat(data.chunk(2)), data[:0]):
        assert (result.batch["a"] * result.batch["b"]).is_nested
        assert lists_of(result.batch["a"] * result.batch["b"]) == [[3.0, 3.0]] * len(result)


def test_a_dense_column_where_a_jagged_one_is_needed_is_named_by_its_shape() -> None:
    with pytest.raises(DataError, match=r"the column must be jagged \[B, \*\], got a dense one of shape \[2, 3\]"):
        parts(torch.zeros(2, 3))

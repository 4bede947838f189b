"""Arithmetic of offsets: padding and back, joining rows, row numbers."""

from __future__ import annotations

import pytest
import torch

from podium.errors import DataError
from podium.protocol.jagged import (
    from_padded,
    gather_index,
    interleave,
    jagged_from_rows,
    lengths_of,
    offsets_of,
    parts,
    row_ids,
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


def test_a_ragged_dim_other_than_the_first_is_refused() -> None:
    turned = ragged([[[1, 2]], [[3, 4], [5, 6]]], torch.float32, 2).transpose(1, 2)
    with pytest.raises(DataError, match="ragged in dim 1, got ragged dim 2"):
        parts(turned)

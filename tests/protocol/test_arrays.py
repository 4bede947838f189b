"""Columns as numpy sees them: the same memory, the same elements, and offsets that begin with 0 in every part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from podium.errors import DataError
from podium.protocol import DataProto, jagged_from_rows
from podium.protocol.arrays import array_of, arrays_of, dtype_of, plain_arrays, read_as, shares_memory, written_as
from podium.protocol.guard import shared

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_elements_are_there_under_torchs_name_of_the_dtype_and_in_its_memory(dtype: torch.dtype) -> None:
    column = torch.arange(6).view(3, 2).to(dtype)
    name, array = array_of(column)
    assert dtype_of(name) is dtype
    assert array.__array_interface__["data"][0] == column.data_ptr()
    carrier, own = read_as(name)
    back = torch.from_numpy(array.copy().view(carrier))
    back = back if own is None else back.view(own)
    assert torch.equal(back.view(torch.uint8), column.view(torch.uint8))
    assert (written_as(dtype)[1] is dtype) == (own is None)


def test_jagged_columns_give_values_and_offsets_that_equal_lengths_share() -> None:
    rows = [torch.arange(2), torch.arange(3), torch.arange(1)]
    data = DataProto({"t": jagged_from_rows(rows), "u": jagged_from_rows([row * 2.0 for row in rows]), "x": torch.arange(3)})
    found = arrays_of(data.batch)
    assert [(key, array.tolist(), number, dim) for key, (_, array), number, dim in found.columns] == [
        ("t", [0, 1, 0, 1, 2, 0], 0, 1),
        ("u", [0.0, 2.0, 0.0, 2.0, 4.0, 0.0], 0, 1),
        ("x", [0, 1, 2], None, 0),
    ]
    assert [offsets.tolist() for _, offsets in found.offsets] == [[0, 2, 5, 6]]


@pytest.mark.parametrize(
    ("start", "stop", "values", "offsets"),
    [(0, 3, [0, 1, 0, 1, 2, 0], [0, 2, 5, 6]), (1, 3, [0, 1, 2, 0], [0, 3, 4]), (1, 2, [0, 1, 2], [0, 3]), (3, 3, [], [0])],
)
def test_a_cut_has_its_rows_as_views_and_offsets_of_its_own(start: int, stop: int, values: list[int], offsets: list[int]) -> None:
    column = jagged_from_rows([torch.arange(2), torch.arange(3), torch.arange(1)])
    whole = arrays_of({"t": column, "x": torch.arange(6).view(3, 2)})
    part = whole.cut(start, stop)
    (_, (_, own), number, _), (_, (_, dense), none, _) = part.columns
    assert (own.tolist(), number, none) == (values, 0, None)
    assert dense.tolist() == torch.arange(6).view(3, 2)[start:stop].tolist()
    assert part.offsets[0][1].tolist() == offsets
    assert np.shares_memory(own, whole.columns[0][1][1]) == bool(values)


def test_a_column_that_is_ragged_in_a_later_dim_has_that_dim_in_front() -> None:
    column = jagged_from_rows([torch.arange(8).view(4, 2), torch.arange(4).view(4, 1)], ragged_dim=2)
    part = arrays_of({"t": column}).cut(1, 2)
    assert part.columns[0][1][1].tolist() == [[0, 1, 2, 3]]
    assert part.columns[0][3] == 2


@pytest.mark.parametrize(
    "column",
    [
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3, dtype=torch.bfloat16),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(()),
        torch.eye(3).to_sparse(),
        shared(torch.ones(3)),
        jagged_from_rows([torch.ones(1), torch.ones(2), torch.ones(1)]),
    ],
    ids=["grad", "parameter", "bfloat16", "conjugate", "no rows", "sparse", "shared", "jagged"],
)
def test_only_plain_columns_of_one_row_count_are_taken_without_a_check(column: torch.Tensor) -> None:
    plain = {"x": torch.arange(3), "y": torch.zeros(3, 2)}
    assert plain_arrays(plain) is not None
    assert plain_arrays({**plain, "z": column}) is None
    assert plain_arrays({**plain, "z": torch.zeros(4)}) is None
    assert plain_arrays({}) is None


def test_what_numpy_would_copy_does_not_share_memory() -> None:
    assert shares_memory(torch.ones(2))
    assert shares_memory(torch.ones(2, dtype=torch.bfloat16))
    assert shares_memory(jagged_from_rows([torch.ones(1)]))
    assert not shares_memory(torch.ones(2, requires_grad=True))
    assert not shares_memory(torch.ones(2, dtype=torch.complex64).conj())
    with pytest.raises(DataError, match=r"layout torch\.sparse_coo"):
        arrays_of({"x": torch.eye(2).to_sparse()})

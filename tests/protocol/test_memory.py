"""Large results in memory of huge pages: the same values as torch's own operations give, and torch's own where it must be."""

from __future__ import annotations

import pytest
import torch

from podium.protocol import DataProto, from_padded, jagged_from_rows, to_padded
from podium.protocol import jagged as jg
from podium.protocol.memory import LARGE_BYTES, cat, empty_like_rows, index_select

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn]


def rows_of(dtype: torch.dtype, count: int, width: int) -> torch.Tensor:
    """Rows of random bits of the dtype (0 and 1 for bool)."""
    bits = torch.randint(0, 2, (count, width * dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype) if dtype is not torch.uint8 else bits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_results_equal_those_of_torch(dtype: torch.dtype) -> None:
    few = LARGE_BYTES // (3 * dtype.itemsize) + 1  # two parts of these rows are small, four are large
    for width, count in ((1, few), (3, few // 3 + 1)):
        rows = rows_of(dtype, count, width)
        for parts in ([rows], [rows] * 2, [rows[:0], *[rows] * 4]):
            assert same(cat(parts), torch.cat(parts))
        index = torch.randint(0, count, (4 * count,))
        for chosen in (index[:count], index, index[:0]):
            assert same(index_select(rows, chosen), rows.index_select(0, chosen))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return (
        left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    )


def test_memory_is_the_results_own_and_writable() -> None:
    rows = torch.zeros(LARGE_BYTES, dtype=torch.uint8)
    for result in (cat([rows]), index_select(rows, torch.arange(len(rows))), empty_like_rows(rows, len(rows))):
        result.fill_(1)
        assert int(result.sum()) == len(rows)
    assert int(rows.sum()) == 0
    result.share_memory_()
    assert result.is_shared()


def test_rows_that_are_views_of_another_order_are_taken() -> None:
    turned = torch.arange(LARGE_BYTES).reshape(4, -1).T
    assert torch.equal(cat([turned, turned]), torch.cat([turned, turned]))
    assert torch.equal(index_select(turned, torch.arange(len(turned)).flip(0)), turned.flip(0))


def test_a_graph_is_kept() -> None:
    weights = torch.ones(LARGE_BYTES // 4, requires_grad=True)
    plain = torch.ones(LARGE_BYTES // 4)
    (cat([plain, weights]).sum() + 2 * index_select(weights, torch.arange(len(weights))).sum()).backward()
    assert weights.grad is not None
    assert weights.grad.unique().tolist() == [3.0]


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("length", [40, 9000])
def test_large_batches_repeat_as_rows_do(length: int, interleave: bool) -> None:
    count = 2 * LARGE_BYTES // (8 * length)
    rows = [torch.arange(row, row + length + row % 3) for row in range(count)]
    repeated = DataProto({"x": jagged_from_rows(rows), "n": torch.arange(count)}).repeat(2, interleave)
    order = torch.arange(count).repeat_interleave(2) if interleave else torch.arange(count).repeat(2)
    assert torch.equal(repeated.batch["n"], order)
    assert torch.equal(repeated.batch["x"].values(), torch.cat([rows[row] for row in order.tolist()]))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu])
def test_rows_of_dtypes_that_torch_cannot_index_are_selected(dtype: torch.dtype) -> None:
    numbers = torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)
    values = numbers.view(dtype) if dtype.itemsize == 1 else numbers.to(dtype)

    def numbers_of(found: torch.Tensor) -> list[int]:
        assert found.dtype is dtype
        return [int(number) for number in (found.view(torch.uint8) if dtype.itemsize == 1 else found).tolist()]

    data = DataProto({"x": values[:2], "tokens": jagged_from_rows([values[:2], values[2:]])})
    for chosen in (data[[1, 0, 1]], DataProto.concat([data[1:], data.repeat(1)[:1], data[[1]]])):
        assert numbers_of(chosen.batch["x"]) == [2, 1, 2]
        assert numbers_of(jg.parts(chosen.batch["tokens"])[0]) == [3, 4, 5, 1, 2, 3, 4, 5]
    again = from_padded(to_padded(data.batch["tokens"]), torch.tensor([2, 3]))
    assert numbers_of(jg.parts(jg.interleave(again, again))[0]) == [1, 2, 1, 2, 3, 4, 5, 3, 4, 5]

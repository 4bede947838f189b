"""Which rows, and in what order: everything that ends in a list of row numbers, before any row is touched.

Legend: B rows, B' rows of the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol.columns import whole_number

RowIndex: TypeAlias = Tensor | NDArray[Any] | Sequence[int] | Sequence[bool]
LastBatch: TypeAlias = Literal["error", "short", "drop", "pad"]
"""What becomes of the last rows of an epoch when they are fewer than a mini-batch: an error before the first mini-batch, a
shorter mini-batch, none, or one filled up with copies of its last row, which `padding_mask` marks."""


def row_numbers(index: RowIndex, count: int) -> Tensor:
    """[B'] int64 on the CPU: the rows that a boolean mask [B] marks or that are given by number, negative ones from the end."""
    rows = _tensor_of("rows are chosen by a slice, a number, a mask or a list of numbers", index)
    if rows.dim() != 1:
        raise DataError(f"rows must be a mask or a list of numbers, got shape {tuple(rows.shape)}")
    if rows.dtype == torch.bool:
        if len(rows) != count:
            raise DataError(f"the mask has {len(rows)} entries for {count} rows")
        return rows.nonzero().flatten()
    if rows.numel() == 0:
        return rows.to(torch.int64)
    rows = _int64("row numbers", rows)
    least, largest = (int(bound) for bound in torch.aminmax(rows))
    if least < -count or largest >= count:
        raise DataError(f"row number out of range: {least}..{largest} for {count} rows")
    return rows % count if least < 0 else rows


def _int64(what: str, numbers: Tensor) -> Tensor:
    """The numbers, ints of any width, as int64. DataError for others, with the first that is not an int."""
    if numbers.dtype == torch.int64:
        return numbers
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise DataError(f"{what} must be integers, got {numbers.dtype}: {numbers[0].item()!r}")
    wide = numbers.to(torch.int64)
    if numbers.dtype == torch.uint64 and bool((wide < 0).any()):  # where 2**63 and above went
        raise DataError(f"{what} out of range: {2**64 + int(wide[wide < 0].max())} is more than any count of rows")
    return wide


def _tensor_of(what: str, index: RowIndex) -> Tensor:
    if isinstance(index, Tensor):
        return index.cpu()
    try:
        array = np.array(index, order="C")  # a copy: torch cannot wrap read-only and reversed arrays
        return torch.from_numpy(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    except (TypeError, ValueError) as exc:
        raise DataError(f"{what}, got {index!r}") from exc


def repeated(times: Sequence[int] | Tensor | NDArray[Any], count: int) -> Tensor:
    """[B'] row numbers: row b as often as `times[b]` says. DataError names the row whose number cannot be."""
    counts = _tensor_of("repeat counts are a list of integers", times)
    if counts.dim() != 1 or len(counts) != count:
        raise DataError(f"{count} rows need as many repeat counts, got shape {tuple(counts.shape)}")
    counts = _int64("repeat counts", counts) if count else counts.to(torch.int64)
    for row in (counts < 0).nonzero().flatten().tolist():
        raise DataError(f"row {row} cannot be repeated {int(counts[row])} times")
    return torch.arange(count).repeat_interleave(counts)


def mini_batches(count: int, size: int, *, epochs: int, seed: int | None, last: LastBatch) -> Iterator[Tensor]:
    """Row numbers of each mini-batch, epoch after epoch: in order, or with a seed in an order of each epoch's own.

    A generator of its own draws the orders, so they depend on the seed alone, and no global state is read or changed.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    whole = count - count % size
    for _ in range(epochs):
        order = torch.arange(count) if generator is None else torch.randperm(count, generator=generator)
        yield from order[:whole].split(size) if whole else ()
        if whole < count and last != "drop":
            yield order[whole:]


def check_mini_batches(count: int, size: int, epochs: int, last: LastBatch) -> None:
    """DataError for what `mini_batches` cannot do, before its first one is asked for."""
    if size < 1 or epochs < 0:
        raise DataError(f"mini-batches must have at least one row and epochs must not be negative, got {size} and {epochs}")
    if last not in ("error", "short", "drop", "pad"):
        raise DataError(f"last must be 'error', 'short', 'drop' or 'pad', got {last!r}")
    if last == "error" and count % size:
        raise DataError(f"{count} rows make no whole mini-batches of {size}; say last='short', 'drop' or 'pad'")


def of_dataloader(seed: int | None, last: LastBatch, dataloader_kwargs: dict[str, Any]) -> tuple[int | None, LastBatch]:
    """The seed of the order, None where it is not shuffled, and what becomes of the last rows, by a DataLoader's arguments."""
    unknown = sorted(dataloader_kwargs.keys() - {"shuffle", "drop_last"})
    if unknown:
        raise DataError(f"make_iterator reads 'shuffle' and 'drop_last' of dataloader_kwargs; take {unknown} out")
    if dataloader_kwargs.get("drop_last", False):
        if last not in ("error", "drop"):
            raise DataError(f"dataloader_kwargs drops the last rows, but last={last!r}: leave one of them out")
        last = "drop"
    shuffle = dataloader_kwargs.get("shuffle", seed is not None)
    if shuffle and seed is None:
        raise DataError("make_iterator shuffles by a seed of its own, never by the global generator; give seed=...")
    return whole_number("seed", seed) if seed is not None and shuffle else None, last

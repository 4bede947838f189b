"""Ragged columns as (values, offsets): what torch's jagged nested tensors hold, handled by offsets arithmetic.

Legend: B rows, N = sum of the row lengths. `values` is [N, ...], `offsets` is [B + 1] int64 with offsets[0] = 0, and row b is
`values[offsets[b]:offsets[b + 1]]`. A column that is ragged in a later dim, as [B, 4, *], has `values` too with the ragged dim
in front ([N, 4], a view), so its arithmetic is the same. No function here goes through torch.nested's dispatch, whose row
operations differ between versions. Two nested tensors can be multiplied only when they share one offsets *object*.

The class of nested tensors and its fields are private to torch, and are touched here only: its public constructor costs four
times as much and logs a warning, and its `values()` costs 300 times as much as the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from podium.errors import DataError
from podium.protocol import memory

ValueIndex: TypeAlias = slice | list[slice] | Tensor
"""Which values of a column: one run, several (at least one), or each by its number [N']."""
BLOCK = 4096
"""Runs of at least so many values, on average, are copied as blocks; below that the slices cost more than an index does."""


def is_jagged(column: Tensor) -> bool:
    """Whether a tensor is a jagged nested tensor (any other nested layout is refused by `parts`)."""
    return isinstance(column, NestedTensor) or column.is_nested


def jagged(values: Tensor, offsets: Tensor, ragged_dim: int = 1) -> Tensor:
    """A jagged nested tensor over `values` [N, ...]; shares both tensors.

    It is [B, *, ...], or with another `ragged_dim` has the ragged dim there: 2 makes [B, 4, *] of values [N, 4].
    """
    if ragged_dim == 1:
        return NestedTensor(values, offsets)
    return NestedTensor(values.movedim(0, ragged_dim - 1), offsets, _ragged_idx=ragged_dim)


def jagged_from_rows(rows: Sequence[Tensor], ragged_dim: int = 1) -> Tensor:
    """A jagged column from B tensors [n_b, ...] of one dtype and equal other dims; rows of equal lengths stay jagged.

    `ragged_dim` counts in the column: rows [4, n_b] make a column of ragged dim 2.

    >>> jagged_from_rows([torch.tensor([1, 2]), torch.tensor([3])]).values()
    tensor([1, 2, 3])
    """
    if not rows:
        raise DataError("a jagged column cannot be made from no rows: its dtype would be unknown; use jagged(values, offsets)")
    for number, row in enumerate(rows):
        if row.dim() < ragged_dim:
            raise DataError(f"row {number} has shape {tuple(row.shape)}: no dim that can be dim {ragged_dim} of the column")
    turned = [row.movedim(ragged_dim - 1, 0) for row in rows]
    for number, row in enumerate(turned):
        if row.dtype != turned[0].dtype or row.shape[1:] != turned[0].shape[1:]:
            raise DataError(
                f"row {number} is {_kind(rows[number])}, but row 0 is {_kind(rows[0])}: only dim {ragged_dim} may differ"
            )
    return jagged(torch.cat(turned), offsets_of(torch.tensor([len(row) for row in turned])), ragged_dim)


def _kind(row: Tensor) -> str:
    return f"{str(row.dtype).removeprefix('torch.')}{list(row.shape)}"


def parts(column: Tensor) -> tuple[Tensor, Tensor]:
    """(values [N, ...], offsets [B + 1]) of a jagged column, the ragged dim in front; both are the column's own storage.

    Raises DataError for a dense tensor, the strided nested layout, and for tensors with holes (`lengths`).
    """
    if not isinstance(column, NestedTensor):
        if not column.is_nested:
            shape = list(column.shape)
            raise DataError(f"the column must be jagged [B, *], got a dense one of shape {shape}; make it by jagged_from_rows")
        raise DataError(f"a nested tensor of layout {column.layout} cannot be a column; build it with layout=torch.jagged")
    if column._lengths is not None:
        raise DataError("a jagged column must be contiguous; call .contiguous() on the nested tensor first")
    values: Tensor = column._values
    return values if column._ragged_idx == 1 else values.movedim(column._ragged_idx - 1, 0), column._offsets


def ragged_dim(column: Tensor) -> int:
    """Which dim of a jagged column is the ragged one: 1 in [B, *, ...], 2 in [B, 4, *]."""
    return int(column._ragged_idx) if isinstance(column, NestedTensor) else 1


def like(column: Tensor, values: Tensor, offsets: Tensor) -> Tensor:
    """A jagged column of other rows, which is ragged in the same dim as `column`."""
    return jagged(values, offsets, ragged_dim(column))


def row_of(column: Tensor, row: int) -> Tensor:
    """One row of a column, dense or jagged, as a view."""
    if not is_jagged(column):
        return column[row]
    values, offsets = parts(column)
    return values[int(offsets[row]) : int(offsets[row + 1])].movedim(0, ragged_dim(column) - 1)


def num_rows(column: Tensor) -> int:
    """B, the rows of a column, dense or jagged; a nested tensor's own `shape` costs many times as much."""
    return len(column._offsets) - 1 if isinstance(column, NestedTensor) else column.shape[0]


def interned(columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same columns; those jagged ones that have come to have equal lengths share one offsets tensor."""
    known: list[Tensor] = []
    found = dict(columns)
    for key, column in columns.items():
        if not is_jagged(column):
            continue
        values, own = parts(column)
        if any(seen is own for seen in known):
            continue
        equal = next((seen for seen in known if torch.equal(seen, own)), None)
        if equal is None:
            known.append(own)
        else:
            found[key] = like(column, values, equal)
    return found


def offsets_of(lengths: Tensor) -> Tensor:
    """[B] lengths to [B + 1] int64 offsets.

    >>> offsets_of(torch.tensor([2, 0, 3]))
    tensor([0, 2, 2, 5])
    """
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, dim=0, out=offsets[1:])
    return offsets


def lengths_of(column: Tensor) -> Tensor:
    """[B] int64: the length of each row of a jagged column."""
    return parts(column)[1].diff()


def row_ids(offsets: Tensor) -> Tensor:
    """[N] int64: which row each packed value belongs to.

    >>> row_ids(torch.tensor([0, 2, 2, 5]))
    tensor([0, 0, 2, 2, 2])
    """
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())


def gather_index(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where the values of the chosen rows lie, and the offsets of the result: (index [N'], offsets [B' + 1])."""
    lengths = offsets.diff()[rows]
    new_offsets = offsets_of(lengths)
    count = int(new_offsets[-1])
    if count * offsets.element_size() < memory.LARGE_BYTES:
        shift = torch.repeat_interleave(offsets[rows] - new_offsets[:-1], lengths, output_size=count)
        return shift.add_(torch.arange(count, device=offsets.device)), new_offsets
    held = lengths > 0
    first = offsets[rows[held]]
    # One more than the value before, but at the start of a row a jump to there: a running sum, which needs one buffer only.
    steps = first.clone()
    steps[1:] -= (first + lengths[held])[:-1] - 1
    index = memory.empty_like_rows(offsets, count).fill_(1)
    index[new_offsets[:-1][held]] = steps
    return index.cumsum_(0), new_offsets


def gather(offsets: Tensor, rows: Tensor) -> tuple[ValueIndex, Tensor]:
    """`gather_index` for `take`: rows that follow one another are a run, and long runs are copied as blocks."""
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    new_offsets = offsets_of(offsets.diff()[rows])
    if int(new_offsets[-1]) < BLOCK * (len(breaks) + 1):
        return gather_index(offsets, rows)
    first = torch.cat([breaks.new_zeros(1), breaks])
    last = torch.cat([breaks, breaks.new_tensor([len(rows)])]) - 1
    return list(map(slice, offsets[rows[first]].tolist(), offsets[rows[last] + 1].tolist())), new_offsets


def take(values: Tensor, index: ValueIndex) -> Tensor:
    """The values that an index of `gather` names, as a copy; by one slice as a view."""
    if isinstance(index, slice):
        return values[index]
    return memory.index_select(values, index) if isinstance(index, Tensor) else memory.cat([values[run] for run in index])


def cut_offsets(offsets: Tensor, bounds: Sequence[int]) -> tuple[list[int], list[Tensor]]:
    """For parts of rows [bounds[i], bounds[i + 1]) that cover all rows: how many values each has, and the offsets of each.

    >>> lengths, parts = cut_offsets(torch.tensor([0, 2, 2, 5]), [0, 1, 3])
    >>> lengths, [part.tolist() for part in parts]
    ([2, 3], [[0, 2], [0, 0, 3]])
    """
    edges = offsets[torch.tensor(bounds, device=offsets.device)].tolist()
    own = [offsets[rows[0] : rows[1] + 1] - edge for rows, edge in zip(pairwise(bounds), edges, strict=False)]
    return [stop - start for start, stop in pairwise(edges)], own


def concat_offsets(parts: Sequence[Tensor]) -> Tensor:
    """The offsets of the rows of all parts in order.

    >>> concat_offsets([torch.tensor([0, 2]), torch.tensor([0, 0, 3])])
    tensor([0, 2, 2, 5])
    """
    return offsets_of(torch.cat([offsets.diff() for offsets in parts]))


def to_padded(column: Tensor, fill: float = 0) -> Tensor:
    """A jagged column [B, *, ...] as a rectangle [B, longest row, ...], rows left-aligned, the rest set to `fill`.

    Another ragged dim stays where it is.
    """
    values, offsets = parts(column)
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    padded = values.new_full((len(lengths), longest, *values.shape[1:]), fill)
    memory.as_bits(padded)[torch.arange(longest, device=values.device) < lengths[:, None]] = memory.as_bits(values)
    return padded.movedim(1, ragged_dim(column))


def from_padded(padded: Tensor, lengths: Tensor, ragged_dim: int = 1) -> Tensor:
    """The jagged column whose row b is `padded[b, :lengths[b]]`; the inverse of `to_padded`."""
    turned = padded.movedim(ragged_dim, 1)
    inside = torch.arange(turned.shape[1], device=padded.device) < lengths[:, None]
    return jagged(memory.as_bits(turned)[inside].view(padded.dtype), offsets_of(lengths), ragged_dim)


def interleave(first: Tensor, second: Tensor) -> Tensor:
    """Join two jagged columns row by row: row b of the result is row b of `first` followed by row b of `second`.

    >>> prompts, responses = (jagged_from_rows([torch.tensor([row]) for row in rows]) for rows in ([1, 2], [8, 9]))
    >>> interleave(prompts, responses).values()
    tensor([1, 8, 2, 9])
    """
    (a_values, a_offsets), (b_values, b_offsets) = parts(first), parts(second)
    if len(a_offsets) != len(b_offsets):
        raise DataError(f"rows must agree to be joined: {len(a_offsets) - 1} and {len(b_offsets) - 1}")
    values = a_values.new_empty((len(a_values) + len(b_values), *a_values.shape[1:]))
    bits = memory.as_bits(values)
    bits[torch.arange(len(a_values), device=values.device) + b_offsets[row_ids(a_offsets)]] = memory.as_bits(a_values)
    bits[torch.arange(len(b_values), device=values.device) + a_offsets[1:][row_ids(b_offsets)]] = memory.as_bits(b_values)
    return like(first, values, a_offsets + b_offsets)

"""Row operations on tensor columns: select, cut, join and split rows. Columns that share offsets share them in the result.

The tables are those of a checked batch, so they agree on the row count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import formatting, memory
from podium.protocol import jagged as jg
from podium.protocol.columns import ObjectColumn, as_objects, object_column, pick
from podium.protocol.row_dicts import joined_numbers, numbers_of

RaggedMove: TypeAlias = tuple[jg.ValueIndex, Tensor]
"""What a row operation does to a jagged column: which values to take, and the offsets of the result."""


def map_values(batch: Mapping[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Apply a change that keeps shapes to the storage of every column."""
    moved: dict[int, Tensor] = {}

    def move(column: Tensor) -> Tensor:
        if not jg.is_jagged(column):
            return change(column)
        values, offsets = jg.parts(column)
        if id(offsets) not in moved:
            moved[id(offsets)] = change(offsets)
        return jg.like(column, change(values), moved[id(offsets)])

    return {key: move(column) for key, column in batch.items()}


def map_rows(
    batch: Mapping[str, Tensor], dense: Callable[[Tensor], Tensor], ragged: Callable[[Tensor], RaggedMove]
) -> dict[str, Tensor]:
    """Apply one row operation to every column. For jagged columns that share offsets it is computed once."""
    moved: dict[int, RaggedMove] = {}

    def move(column: Tensor) -> Tensor:
        if not jg.is_jagged(column):
            return dense(column)
        values, offsets = jg.parts(column)
        if id(offsets) not in moved:
            moved[id(offsets)] = ragged(offsets)
        index, new_offsets = moved[id(offsets)]
        return jg.like(column, jg.take(values, index), new_offsets)

    columns = {key: move(column) for key, column in batch.items()}
    return columns if len(moved) < 2 else jg.interned(columns)


def select_tensors(batch: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    """The rows of these numbers [B'], in that order; copies."""
    return map_rows(
        batch,
        lambda column: memory.index_select(column, rows.to(column.device)),
        lambda offsets: jg.gather(offsets, rows.to(offsets.device)),
    )


def slice_tensors(batch: Mapping[str, Tensor], start: int, stop: int) -> dict[str, Tensor]:
    """Rows [start, stop) of every column, as views."""
    return map_rows(
        batch,
        lambda column: column[start:stop],
        lambda offsets: (slice(int(offsets[start]), int(offsets[stop])), offsets[start : stop + 1] - offsets[start]),
    )


def cut_tensors(batch: Mapping[str, Tensor], bounds: Sequence[int]) -> list[dict[str, Tensor]]:
    """Rows [bounds[i], bounds[i + 1]) of every column, for each i, as views; the bounds run from 0 to the last row."""
    if len(bounds) == 2:
        return [dict(batch)]
    cuts: dict[int, tuple[list[int], Sequence[Tensor]]] = {}
    pieces: list[Sequence[Tensor]] = []
    sizes = [stop - start for start, stop in pairwise(bounds)]
    for column in batch.values():
        if not jg.is_jagged(column):
            pieces.append(torch.split_with_sizes(column, sizes))
            continue
        values, offsets = jg.parts(column)
        if id(offsets) not in cuts:
            cuts[id(offsets)] = jg.cut_offsets(offsets, bounds)
        lengths, new_offsets = cuts[id(offsets)]
        pieces.append([jg.like(column, *part) for part in zip(torch.split_with_sizes(values, lengths), new_offsets, strict=True)])
    parts = [dict(zip(batch, part, strict=True)) for part in zip(*pieces, strict=True)] or [{} for _ in sizes]
    return parts if len(cuts) < 2 else list(map(jg.interned, parts))


def same_keys(kind: str, tables: Sequence[Mapping[str, Any]]) -> None:
    """DataError if a part has other columns than the first part."""
    head = tables[0].keys()
    for number, part in enumerate(tables):
        if part.keys() != head:
            missing, extra = sorted(head - part.keys()), sorted(part.keys() - head)
            raise DataError(f"concat: part {number} differs from part 0 in its {kind}s: missing {missing}, extra {extra}")


def concat_tensors(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all batches in order. DataError when a column's parts differ in dtype, kind or shape of a row."""
    joined: dict[str, Tensor] = {}
    moved: dict[tuple[int, ...], Tensor] = {}
    for key in batches[0]:
        columns = [batch[key] for batch in batches]
        if _are_alike(columns):
            joined[key] = memory.cat(columns)
            continue
        if not jg.is_jagged(columns[0]):
            _check_alike(key, columns, columns)
            joined[key] = memory.cat(columns)
            continue
        values = [jg.parts(column)[0] if jg.is_jagged(column) else column for column in columns]
        _check_alike(key, columns, values)
        offsets = [jg.parts(column)[1] for column in columns]
        shared = tuple(map(id, offsets))
        if shared not in moved:
            moved[shared] = jg.concat_offsets(offsets)
        joined[key] = jg.like(columns[0], memory.cat(values), moved[shared])
    return joined


def _are_alike(columns: Sequence[Tensor]) -> bool:
    """Whether they are plain dense columns of one dtype and row shape, as most are; then `_check_alike` is not needed."""
    first = columns[0]
    if type(first) is not Tensor or first.is_nested:
        return False
    dtype, shape = first.dtype, first.shape[1:]
    return all(
        type(column) is Tensor and column.dtype is dtype and not column.is_nested and column.shape[1:] == shape
        for column in columns
    )


def _check_alike(key: str, columns: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    kinds = {(jg.is_jagged(column), jg.ragged_dim(column), part.dtype) for column, part in zip(columns, values, strict=True)}
    alike = len(kinds) == 1
    shapes = {part.shape[1:] for part in values} if alike else set()
    if len(shapes) == 1:
        return
    if alike and not jg.is_jagged(columns[0]):
        raise DataError(f"concat: rows of column {key!r} have different shapes: {sorted(map(tuple, shapes))}; make it jagged")
    raise DataError(f"concat: column {key!r} differs between parts: {', '.join(map(formatting.describe, columns))}")


def none_for_missing(
    tensors: Sequence[Mapping[str, Tensor]], objects: Sequence[Mapping[str, ObjectColumn]], counts: Sequence[int]
) -> tuple[list[dict[str, Tensor]], list[dict[str, ObjectColumn]]]:
    """The parts' columns under the union of their names: what is not a tensor in every part is objects, None where missing.

    It is what one part of all the rows would have. So parts without rows decide nothing, and numbers of several types have the
    type that `joined_numbers` finds, or are objects. Arrays that every part has are left to `joined_arrays`.
    """
    for number, (batch, rows) in enumerate(zip(tensors, objects, strict=True)):
        for key in batch.keys() & rows.keys():
            raise DataError(f"concat: part {number} has a tensor column and an object column {key!r}; rename or pop one of them")
    parts: list[dict[str, Tensor | ObjectColumn]] = [{**batch, **rows} for batch, rows in zip(tensors, objects, strict=True)]
    with_rows = [number for number, count in enumerate(counts) if count]
    dense: list[dict[str, Tensor]] = [{} for _ in parts]
    held: list[dict[str, ObjectColumn]] = [{} for _ in parts]
    for key in dict.fromkeys(key for part in parts for key in part):
        deciding = with_rows or [number for number, part in enumerate(parts) if key in part]
        columns = _as_tensors([parts[number].get(key) for number in deciding])
        if columns:
            given = dict(zip(deciding, columns, strict=True))
            for number, batch in enumerate(dense):
                batch[key] = given[number] if number in given else slice_tensors({key: columns[0]}, 0, 0)[key]
        elif all(isinstance(parts[number].get(key), np.ndarray) for number in deciding):
            arrays = {number: objects[number][key] for number in deciding}
            for number, rows in enumerate(held):
                rows[key] = arrays.get(number, arrays[deciding[0]][:0])
        else:
            for part, rows, count in zip(parts, held, counts, strict=True):
                rows[key] = as_objects(part[key]) if key in part else object_column([None] * count)
    return dense, held


def _as_tensors(columns: Sequence[Tensor | ObjectColumn | None]) -> list[Tensor]:
    """The columns of a key as tensors that can be joined where one part would have a tensor; none where it would have objects."""
    found = [column for column in columns if isinstance(column, Tensor)]
    if len(found) < len(columns):
        return []
    are_numbers = {not jg.is_jagged(column) and column.dim() == 1 for column in found}
    if are_numbers == {True} and len({column.dtype for column in found}) > 1:
        return _one_type(found)
    return found if len(are_numbers) == 1 else []


def _one_type(columns: Sequence[Tensor]) -> list[Tensor]:
    """Columns of numbers [B], in the type that holds them all; none where there is no such type."""
    rows = [number for column in columns for number in numbers_of(column)]
    joined = joined_numbers(rows)
    if joined is None:
        return []
    dtype = torch.from_numpy(joined).dtype
    return [column.to(dtype) for column in columns]


def unfold_table(batch: Mapping[str, Tensor], n: int, keys: Iterable[str] | None) -> dict[str, Tensor]:
    """The named columns with every row cut into n pieces; None: of all columns whose rows have a length."""
    if n < 1:
        raise DataError(f"n_split must be at least 1, got {n}")
    names = [key for key, column in batch.items() if _has_length(column)] if keys is None else keys
    return {key: _unfold(key, column, n) for key, column in pick("tensor column", batch, names).items()}


def unfold_array(key: str, rows: ObjectColumn, n: int) -> ObjectColumn:
    """The rows of a numpy column [B, S, ...] cut into n pieces: [B * n, S / n, ...]. DataError where they do not divide."""
    if rows.ndim < 2:
        raise DataError(f"column {key!r} has one object per row, not an array: its rows have no length to split in {n}")
    if n < 1 or rows.shape[1] % n:
        raise DataError(f"column {key!r} has rows of {rows.shape[1]} values, which do not divide by {n}")
    return rows.reshape(len(rows) * n, rows.shape[1] // n, *rows.shape[2:])


def _has_length(column: Tensor) -> bool:
    """Whether the rows of a column have a length that can be divided."""
    return jg.is_jagged(column) or column.dim() > 1


def _unfold(key: str, column: Tensor, n: int) -> Tensor:
    """Every row cut into n equal pieces, which become rows: [B, S, ...] to [B * n, S / n, ...], jagged ones piece by piece.

    DataError names the column, and the row where it is one that does not divide.
    """
    if not _has_length(column):
        raise DataError(f"column {key!r} is {formatting.describe(column)}: its rows have no length to split in {n}")
    if not jg.is_jagged(column):
        if column.shape[1] % n:
            raise DataError(f"column {key!r} is {formatting.describe(column)}: {column.shape[1]} does not divide by {n}")
        return column.reshape(len(column) * n, column.shape[1] // n, *column.shape[2:])
    values, offsets = jg.parts(column)
    lengths = offsets.diff()
    for row in (lengths % n).nonzero().flatten().tolist():
        raise DataError(f"jagged column {key!r}: row {row} has length {int(lengths[row])}, which does not divide by {n}")
    return jg.like(column, values, jg.offsets_of((lengths // n).repeat_interleave(n)))

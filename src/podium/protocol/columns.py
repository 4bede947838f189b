"""What `DataProto` asks of single columns: taking them in, cutting them into consecutive parts, joining them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError, nearest
from podium.protocol import jagged as jg
from podium.protocol import wire

ObjectColumn: TypeAlias = NDArray[np.object_]


def object_column(rows: ObjectColumn | Sequence[Any]) -> ObjectColumn:
    """One Python object per row as a 1-d object array, whatever the rows are (lists of equal length stay lists)."""
    if isinstance(rows, np.ndarray) and rows.dtype == object and rows.ndim == 1:
        return rows
    return np.fromiter(rows, dtype=object, count=len(rows))


def intern_offsets(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same columns; jagged ones of equal lengths share one offsets tensor, so that they can be multiplied."""
    known: list[Tensor] = []
    interned = dict(batch)
    for key, column in batch.items():
        if not jg.is_jagged(column):
            continue
        values, offsets = jg.parts(column)
        if any(seen is offsets for seen in known):
            _check_cover(key, values, int(offsets[-1]))
            continue
        _check_cover(key, values, int(offsets[-1]), int(offsets[0]))
        shared = next((seen for seen in known if torch.equal(seen, offsets)), None)
        if shared is None:
            known.append(offsets)
        else:
            interned[key] = jg.jagged(values, shared)
    return interned


def _check_cover(key: str, values: Tensor, end: int, start: int = 0) -> None:
    if start != 0 or end != len(values):
        raise DataError(f"jagged column {key!r} has {len(values)} values, but its offsets cover {start}..{end}")


def check_row_counts(batch: Mapping[str, Tensor], objects: Mapping[str, ObjectColumn]) -> None:
    """DataError when two columns disagree on the row count, or a tensor has no rows at all."""
    head: tuple[str, int] | None = None
    for key, column in batch.items():
        if not column.ndim:
            raise DataError(f"tensor column {key!r} has no row dimension; a value of the whole batch belongs in meta_info")
        head = _same_count(head, key, jg.num_rows(column))
    for key, rows in objects.items():
        head = _same_count(head, key, len(rows))


def _same_count(head: tuple[str, int] | None, key: str, count: int) -> tuple[str, int]:
    if head is not None and count != head[1]:
        raise DataError(f"column {key!r} has {count} rows, but {head[0]!r} has {head[1]}")
    return head or (key, count)


def pick(kind: str, table: Mapping[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    """The named entries, in that order; None is all. DataError names an unknown one and the nearest that there is."""
    if keys is None:
        return dict(table)
    picked = {}
    for key in keys:
        if key not in table:
            raise DataError(f"no {kind} {key!r}{nearest(key, table)}; there are: {', '.join(table) or 'none'}")
        picked[key] = table[key]
    return picked


def cut_tensors(batch: Mapping[str, Tensor], bounds: Sequence[int]) -> list[dict[str, Tensor]]:
    """Rows [bounds[i], bounds[i + 1]) of every column, for each i, as views; the bounds run from 0 to the last row."""
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
        pieces.append([jg.jagged(*part) for part in zip(torch.split_with_sizes(values, lengths), new_offsets, strict=True)])
    return [dict(zip(batch, part, strict=True)) for part in zip(*pieces, strict=True)] or [{} for _ in sizes]


def same_keys(kind: str, tables: Sequence[Mapping[str, Any]]) -> None:
    """DataError when a part to be joined has other columns than the first."""
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
        if not jg.is_jagged(columns[0]):
            _check_alike(key, columns, columns)
            joined[key] = torch.cat(columns)
            continue
        values = [jg.parts(column)[0] if jg.is_jagged(column) else column for column in columns]
        _check_alike(key, columns, values)
        offsets = [jg.parts(column)[1] for column in columns]
        shared = tuple(map(id, offsets))
        if shared not in moved:
            moved[shared] = jg.concat_offsets(offsets)
        joined[key] = jg.jagged(torch.cat(values), moved[shared])
    return joined


def _check_alike(key: str, columns: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    alike = len(set(map(jg.is_jagged, columns))) == 1 and len({part.dtype for part in values}) == 1
    shapes = {part.shape[1:] for part in values} if alike else set()
    if len(shapes) == 1:
        return
    if alike and not jg.is_jagged(columns[0]):
        raise DataError(f"concat: rows of column {key!r} have different shapes: {sorted(map(tuple, shapes))}; make it jagged")
    raise DataError(f"concat: column {key!r} differs between parts: {', '.join(map(wire.describe, columns))}")

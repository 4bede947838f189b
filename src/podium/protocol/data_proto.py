"""`DataProto`: the rows that travel between the driver and the workers.

Three kinds of column share one row count: `batch` holds tensors (dense [B, ...] or jagged [B, *, ...]), `non_tensor_batch`
holds one Python object per row, `meta_info` holds values of the whole batch. Jagged columns of equal lengths share one
offsets tensor, so they can be added and multiplied. What is not here: futures and by-reference batches.

`union`, `pop`, `rename` and `reorder` change the object they are called on, as users of verl expect; everything else
returns a new one. A failed operation leaves its inputs as they were, and no result shares a meta dict with its source.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import ChunkError, DataError, nearest
from podium.protocol import jagged as jg
from podium.protocol import wire

ObjectColumn: TypeAlias = NDArray[np.object_]
RowIndex: TypeAlias = Tensor | NDArray[Any] | Sequence[int] | Sequence[bool]
RaggedMove: TypeAlias = tuple[slice | Tensor, Tensor]
"""What a row operation does to a jagged column: which values to take, and the offsets of the result."""


@runtime_checkable
class Mergeable(Protocol):
    """A meta value that knows how to become one when batches are concatenated (metrics, counters)."""

    def merge(self, others: Sequence[Self], /) -> Self: ...


class DataProto:
    """Rows with named columns. `len()` is the number of rows.

    >>> data = DataProto.from_dict({"x": torch.arange(3)}, {"name": ["a", "b", "c"]}, {"step": 7})
    >>> len(data), data[1:].batch["x"].tolist(), data.non_tensor_batch["name"].tolist(), data.meta_info
    (3, [1, 2], ['a', 'b', 'c'], {'step': 7})
    """

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, ObjectColumn]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: Mapping[str, Tensor] | None = None,
        non_tensor_batch: Mapping[str, ObjectColumn | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Take columns as they are (storage is shared). DataError when two columns disagree on the row count."""
        self.batch = _intern_offsets(batch or {})
        self.non_tensor_batch = {key: object_column(rows) for key, rows in (non_tensor_batch or {}).items()}
        self.meta_info = dict(meta_info or {})
        self._check_row_counts()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, ObjectColumn | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> Self:
        """The constructor under the name that verl's users know."""
        return cls(tensors, non_tensors, meta_info)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        for column in self.batch.values():
            return column.shape[0]
        for rows in self.non_tensor_batch.values():
            return len(rows)
        return 0

    def __getitem__(self, index: slice | RowIndex) -> Self:
        """A slice (views where the step is 1), a boolean mask, or row numbers."""
        return self.slice(index.start, index.stop, index.step) if isinstance(index, slice) else self.select_idxs(index)

    def slice(self, start: int | None = None, stop: int | None = None, step: int | None = None) -> Self:
        """Rows [start:stop:step] with Python's rules. Tensor columns are views when the step is 1."""
        first, last, stride = slice(start, stop, step).indices(len(self))
        if stride != 1:
            return self.select_idxs(torch.arange(first, last, stride) if (last - first) * stride > 0 else torch.arange(0))
        last = max(first, last)
        return self._map_rows(
            lambda column: column[first:last],
            lambda offsets: (slice(int(offsets[first]), int(offsets[last])), offsets[first : last + 1] - offsets[first]),
            lambda rows: rows[first:last],
        )

    def select_idxs(self, index: RowIndex) -> Self:
        """The rows that a boolean mask [B] marks, or the rows of the given numbers [B'], in that order; copies."""
        rows = self._row_numbers(index)
        return self._map_rows(
            lambda column: column[rows.to(column.device)],
            lambda offsets: jg.gather_index(offsets, rows.to(offsets.device)),
            lambda objects: objects[rows.numpy()],
        )

    def reorder(self, indices: Tensor) -> None:
        """Put the rows in the given order, in place."""
        if sorted(indices.tolist()) != list(range(len(self))):
            raise DataError(f"reorder needs a permutation of the {len(self)} rows, got {indices.tolist()}")
        self._become(self.select_idxs(indices))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Each row k times in a row (a a b b), or the whole batch k times (a b a b) without `interleave`."""
        if repeat_times < 0:
            raise DataError(f"rows cannot be repeated {repeat_times} times")
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def partition(self, num_parts: int) -> list[Self]:
        """Exactly `num_parts` consecutive parts whose sizes differ by at most one; empty parts keep their columns."""
        if num_parts < 1:
            raise DataError(f"partition needs at least one part, got {num_parts}")
        size, extra = divmod(len(self), num_parts)
        starts = [part * size + min(part, extra) for part in range(num_parts + 1)]
        return [self.slice(start, stop) for start, stop in pairwise(starts)]

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` parts of equal size. ChunkError when the rows do not divide; `partition` takes any number."""
        if chunks < 1 or len(self) % chunks:
            raise ChunkError(f"{len(self)} rows cannot be cut into {chunks} equal parts; partition({chunks}) allows uneven ones")
        return self.partition(chunks)

    def split(self, split_size: int) -> list[Self]:
        """Consecutive parts of `split_size` rows; the last one may be short. A batch of no rows has no parts."""
        if split_size < 1:
            raise DataError(f"split needs parts of at least one row, got split_size={split_size}")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order. Every part must have the same columns, of the same dtype and kind.

        Meta is merged: keys may be missing in some parts; a `Mergeable` value merges itself; any other must be equal.
        """
        if not parts:
            raise DataError("concat needs at least one batch")
        head = parts[0]
        for number, part in enumerate(parts):
            _same_keys("tensor column", head.batch, part.batch, number)
            _same_keys("object column", head.non_tensor_batch, part.non_tensor_batch, number)
        batch = {key: _concat_columns(key, [part.batch[key] for part in parts]) for key in head.batch}
        objects = {key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in head.non_tensor_batch}
        return cls(batch, objects, _merge_meta([part.meta_info for part in parts]))

    # -- columns ------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Only the named columns; None keeps all of that kind. Storage is shared, unknown names are errors."""
        return type(self)(
            _pick("tensor column", self.batch, batch_keys),
            _pick("object column", self.non_tensor_batch, non_tensor_batch_keys),
            _pick("meta key", self.meta_info, meta_info_keys),
        )

    def pop(
        self, batch_keys: Iterable[str] = (), non_tensor_batch_keys: Iterable[str] = (), meta_info_keys: Iterable[str] = ()
    ) -> Self:
        """Take the named columns out of this batch and return them as one of their own."""
        taken = self.select(list(batch_keys), list(non_tensor_batch_keys), list(meta_info_keys))
        for mine, theirs in zip(self._tables(), taken._tables(), strict=True):
            for key in theirs:
                del mine[key]
        return taken

    def rename(self, old_key: str, new_key: str) -> Self:
        """Rename a tensor column in place; returns self."""
        _pick("tensor column", self.batch, [old_key])
        if new_key in self.batch:
            raise DataError(f"tensor column {new_key!r} exists already; pop it before renaming {old_key!r}")
        self.batch = {new_key if key == old_key else key: column for key, column in self.batch.items()}
        return self

    def union(self, other: DataProto) -> Self:
        """Add the other batch's columns and meta to this one, in place; returns self.

        A name that both have must hold equal values; otherwise DataError names it and nothing is changed.
        """
        both_have_rows = all(part.batch or part.non_tensor_batch for part in (self, other))
        if both_have_rows and len(self) != len(other):
            raise DataError(f"union needs equal row counts, got {len(self)} and {len(other)}")
        kinds = ("tensor column", "object column", "meta key")
        for kind, mine, theirs in zip(kinds, self._tables(), other._tables(), strict=True):
            for key in mine.keys() & theirs.keys():
                if not wire.equal(mine[key], theirs[key]):
                    raise DataError(f"union: {kind} {key!r} is in both batches with different values")
        merged = [{**mine, **theirs} for mine, theirs in zip(self._tables(), other._tables(), strict=True)]
        self._become(type(self)(*merged))
        return self

    # -- whole batches ------------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> Self:
        """A batch whose tensors are on `device`; shares what is there already."""
        return self._map_values(lambda values: values.to(device))

    def clone(self) -> Self:
        """A batch that shares nothing that can be changed with this one."""
        cloned = self._map_values(Tensor.clone)
        return type(self)(cloned.batch, copy.deepcopy(self.non_tensor_batch), copy.deepcopy(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), wire.pack(self.batch), self.non_tensor_batch, self.meta_info)

    def __repr__(self) -> str:
        columns = [f"{key}: {wire.describe(column)}" for key, column in self.batch.items()]
        columns += [f"{key}: objects" for key in self.non_tensor_batch]
        return f"{type(self).__name__}({len(self)} rows; {', '.join(columns)}; meta: {', '.join(self.meta_info) or 'none'})"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _tables(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.batch, self.non_tensor_batch, self.meta_info

    def _become(self, other: Self) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = other._tables()

    def _check_row_counts(self) -> None:
        counts = {key: column.shape[0] if column.dim() else None for key, column in self.batch.items()}
        counts |= {key: len(rows) for key, rows in self.non_tensor_batch.items()}
        for key, count in counts.items():
            if count is None:
                raise DataError(f"tensor column {key!r} has no row dimension; a value of the whole batch belongs in meta_info")
            if count != len(self):
                raise DataError(f"column {key!r} has {count} rows, but {next(iter(counts))!r} has {len(self)}")

    def _row_numbers(self, index: RowIndex) -> Tensor:
        # The copy is for arrays that torch cannot wrap: read-only ones, and reversed ones (`np.argsort(x)[::-1]`).
        rows = index.cpu() if isinstance(index, Tensor) else torch.from_numpy(np.array(index, order="C"))
        if rows.dim() != 1:
            raise DataError(f"rows are chosen by a mask or a list of numbers, got shape {tuple(rows.shape)}")
        if rows.dtype == torch.bool:
            if len(rows) != len(self):
                raise DataError(f"the mask has {len(rows)} entries for {len(self)} rows")
            return rows.nonzero().flatten()
        if rows.numel() == 0:
            return rows.to(torch.int64)
        if rows.is_floating_point():
            raise DataError(f"row numbers are integers, got {rows.dtype}")
        if int(rows.min()) < -len(self) or int(rows.max()) >= len(self):
            raise DataError(f"row number out of range: {int(rows.min())}..{int(rows.max())} for {len(self)} rows")
        return rows.to(torch.int64) % len(self)

    def _map_values(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a change that keeps shapes to the storage of every tensor column; shared offsets stay shared."""
        moved: dict[int, Tensor] = {}

        def move(column: Tensor) -> Tensor:
            if not jg.is_jagged(column):
                return change(column)
            values, offsets = jg.parts(column)
            if id(offsets) not in moved:
                moved[id(offsets)] = change(offsets)
            return jg.jagged(change(values), moved[id(offsets)])

        return type(self)({key: move(column) for key, column in self.batch.items()}, self.non_tensor_batch, self.meta_info)

    def _map_rows(
        self,
        dense: Callable[[Tensor], Tensor],
        ragged: Callable[[Tensor], RaggedMove],
        objects: Callable[[ObjectColumn], ObjectColumn],
    ) -> Self:
        """Apply one row operation to every column; the work on offsets is done once for all columns that share them."""
        moved: dict[int, RaggedMove] = {}

        def move(column: Tensor) -> Tensor:
            if not jg.is_jagged(column):
                return dense(column)
            values, offsets = jg.parts(column)
            if id(offsets) not in moved:
                moved[id(offsets)] = ragged(offsets)
            index, new_offsets = moved[id(offsets)]
            return jg.jagged(values[index], new_offsets)

        return type(self)(
            {key: move(column) for key, column in self.batch.items()},
            {key: objects(rows) for key, rows in self.non_tensor_batch.items()},
            copy.deepcopy(self.meta_info),
        )


def object_column(rows: ObjectColumn | Sequence[Any]) -> ObjectColumn:
    """One Python object per row as a 1-d object array, whatever the rows are (lists of equal length stay lists)."""
    if isinstance(rows, np.ndarray) and rows.dtype == object and rows.ndim == 1:
        return rows
    column = np.empty(len(rows), dtype=object)
    for row, value in enumerate(rows):
        column[row] = value
    return column


def _rebuild(cls: type[DataProto], packed: wire.Packed, objects: dict[str, ObjectColumn], meta: dict[str, Any]) -> DataProto:
    return cls(wire.unpack(packed), objects, meta)


def _intern_offsets(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    known: list[Tensor] = []
    interned: dict[str, Tensor] = {}
    for key, column in batch.items():
        interned[key] = column
        if not jg.is_jagged(column):
            continue
        values, offsets = jg.parts(column)
        if int(offsets[0]) != 0 or int(offsets[-1]) != len(values):
            covered = f"{int(offsets[0])}..{int(offsets[-1])}"
            raise DataError(f"jagged column {key!r} has {len(values)} values, but its offsets cover {covered}")
        shared = next((seen for seen in known if seen is offsets or torch.equal(seen, offsets)), None)
        if shared is None:
            known.append(offsets)
        elif shared is not offsets:
            interned[key] = jg.jagged(values, shared)
    return interned


def _pick(kind: str, table: dict[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    if keys is None:
        return dict(table)
    picked = {}
    for key in keys:
        if key not in table:
            raise DataError(f"no {kind} {key!r}{nearest(key, table)}; there are: {', '.join(table) or 'none'}")
        picked[key] = table[key]
    return picked


def _same_keys(kind: str, head: Mapping[str, Any], part: Mapping[str, Any], number: int) -> None:
    if head.keys() != part.keys():
        missing, extra = sorted(head.keys() - part.keys()), sorted(part.keys() - head.keys())
        raise DataError(f"concat: part {number} differs from part 0 in its {kind}s: missing {missing}, extra {extra}")


def _concat_columns(key: str, columns: list[Tensor]) -> Tensor:
    kinds = {(column.dtype, jg.is_jagged(column)) for column in columns}
    if len(kinds) > 1:
        raise DataError(f"concat: column {key!r} differs between parts: {', '.join(wire.describe(c) for c in columns)}")
    if not jg.is_jagged(columns[0]):
        shapes = {column.shape[1:] for column in columns}
        if len(shapes) > 1:
            raise DataError(f"concat: rows of column {key!r} have different shapes: {sorted(map(tuple, shapes))}; make it jagged")
        return torch.cat(columns)
    values, offsets = zip(*(jg.parts(column) for column in columns), strict=True)
    if len({rows.shape[1:] for rows in values}) > 1:
        raise DataError(f"concat: column {key!r} differs between parts: {', '.join(wire.describe(c) for c in columns)}")
    return jg.jagged(torch.cat(values), jg.offsets_of(torch.cat([o.diff() for o in offsets])))


def _merge_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for meta in metas for key in meta):
        found = [(number, meta[key]) for number, meta in enumerate(metas) if key in meta]
        (first_number, first), rest = found[0], found[1:]
        if isinstance(first, Mergeable):
            merged[key] = first.merge([value for _, value in rest])
            continue
        for number, value in rest:
            if not wire.equal(first, value):
                raise DataError(f"concat: meta {key!r} is {first!r} in part {first_number} but {value!r} in part {number}")
        merged[key] = copy.deepcopy(first)
    return merged

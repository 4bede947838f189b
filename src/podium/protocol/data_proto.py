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
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import ChunkError, DataError
from podium.protocol import columns as col
from podium.protocol import jagged as jg
from podium.protocol import wire
from podium.protocol.columns import ObjectColumn
from podium.protocol.meta import AUTO_PADDING_KEY, PADDING_ROWS_KEY, copy_meta, merge_meta, meta_of_rows, private_meta

if TYPE_CHECKING:
    from tensordict import TensorDict

RowIndex: TypeAlias = Tensor | NDArray[Any] | Sequence[int] | Sequence[bool]
RaggedMove: TypeAlias = tuple[slice | Tensor, Tensor]
"""What a row operation does to a jagged column: which values to take, and the offsets of the result."""


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
        *,
        auto_padding: bool = False,
    ) -> None:
        """Take columns as they are (storage is shared). DataError when two columns disagree on the row count.

        `auto_padding` allows dispatch to pad the rows to equal shards; the mark stays with them through every operation.
        """
        self.batch = {} if batch is None else col.intern_offsets(batch)  # a TensorDict has no truth value
        objects = non_tensor_batch.items() if non_tensor_batch else ()
        self.non_tensor_batch = {key: col.object_column(rows) for key, rows in objects}
        self.meta_info = dict(meta_info) if meta_info else {}
        if auto_padding:
            self.meta_info[AUTO_PADDING_KEY] = True
        col.check_row_counts(self.batch, self.non_tensor_batch)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, ObjectColumn | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        auto_padding: bool = False,
    ) -> Self:
        """The constructor under the name that verl's users know."""
        return cls(tensors, non_tensors, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(cls, data: TensorDict) -> Self:
        """Its tensors (storage is shared), its `NonTensorStack`s as object columns, its `NonTensorData` as meta.

        DataError for nested TensorDicts and for a batch size of more than one dim.
        """
        from podium.protocol import tensordicts

        return cls(*tensordicts.take_apart(data))

    def to_tensordict(self) -> TensorDict:
        """The same rows for code that works on TensorDicts; storage is shared. The inverse of `from_tensordict`.

        DataError when a column and a meta key have one name.
        """
        from podium.protocol import tensordicts

        return tensordicts.put_together(len(self), *self._tables())

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        for column in self.batch.values():
            return jg.num_rows(column)
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
            range(first, last),
        )

    def select_idxs(self, index: RowIndex) -> Self:
        """The rows that a boolean mask [B] marks, or the rows of the given numbers [B'], in that order; copies."""
        rows = self._row_numbers(index)
        return self._map_rows(
            lambda column: column[rows.to(column.device)],
            lambda offsets: jg.gather_index(offsets, rows.to(offsets.device)),
            lambda objects: objects[rows.numpy()],
            rows,
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
        return self._cut([part * size + min(part, extra) for part in range(num_parts + 1)])

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` parts of equal size. ChunkError when the rows do not divide; `partition` takes any number."""
        if chunks < 1 or len(self) % chunks:
            raise ChunkError(f"{len(self)} rows cannot be cut into {chunks} equal parts; partition({chunks}) allows uneven ones")
        return self.partition(chunks)

    def split(self, split_size: int) -> list[Self]:
        """Consecutive parts of `split_size` rows; the last one may be short. A batch of no rows has no parts."""
        if split_size < 1:
            raise DataError(f"split needs parts of at least one row, got split_size={split_size}")
        return self._cut([*range(0, len(self), split_size), len(self)])

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """The rows of all parts, in order. Every part must have the same columns, of the same dtype and kind.

        Meta is merged: keys may be missing in some parts; a `Mergeable` value merges itself; any other must be equal.
        """
        if not parts:
            raise DataError("concat needs at least one batch")
        tensors, objects, metas = zip(*(part._tables() for part in parts), strict=True)
        col.same_keys("tensor column", tensors)
        col.same_keys("object column", objects)
        return cls(
            col.concat_tensors(tensors),
            {key: np.concatenate([table[key] for table in objects]) for key in objects[0]},
            merge_meta(metas, parts),
        )

    # -- padding ------------------------------------------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Whether dispatch may pad these rows to equal shards (`auto_padding` of the constructor)."""
        return bool(self.meta_info.get(AUTO_PADDING_KEY, False))

    @property
    def padding_mask(self) -> Tensor:
        """[B] bool: True for rows that dispatch copied to make shards equal. A loss or a metric leaves them out."""
        mask = torch.zeros(len(self), dtype=torch.bool)
        mask[[row for row in self.meta_info.get(PADDING_ROWS_KEY, ()) if row < len(mask)]] = True
        return mask

    # -- columns ------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Only the named columns; None keeps all of that kind. Storage is shared, unknown names are errors."""
        return type(self)(
            col.pick("tensor column", self.batch, batch_keys),
            col.pick("object column", self.non_tensor_batch, non_tensor_batch_keys),
            col.pick("meta key", self.meta_info, meta_info_keys) | private_meta(self.meta_info),
        )

    def pop(
        self, batch_keys: Iterable[str] = (), non_tensor_batch_keys: Iterable[str] = (), meta_info_keys: Iterable[str] = ()
    ) -> Self:
        """Take the named columns out of this batch and return them as one of their own."""
        names = [list(keys) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        taken = self.select(*names)
        for table, keys in zip(self._tables(), names, strict=True):
            for key in dict.fromkeys(keys):
                del table[key]
        return taken

    def rename(self, old_key: str, new_key: str) -> Self:
        """Rename a tensor column in place; returns self."""
        col.pick("tensor column", self.batch, [old_key])
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
        return type(self)(cloned.batch, copy.deepcopy(self.non_tensor_batch), copy_meta(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()

    def __copy__(self) -> Self:
        return self.select()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        objects = {key: list(rows) for key, rows in self.non_tensor_batch.items()}
        packed = wire.pack(self.batch, buffers=protocol.__index__() >= 5)
        return _rebuild, (type(self), packed, objects, self.meta_info)

    def __repr__(self) -> str:
        columns = [f"{key}: {wire.describe(column)}" for key, column in self.batch.items()]
        columns += [f"{key}: objects" for key in self.non_tensor_batch]
        return f"{type(self).__name__}({len(self)} rows; {', '.join(columns)}; meta: {', '.join(self.meta_info) or 'none'})"

    # -- inside -------------------------------------------------------------------------------------------------------

    def _tables(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.batch, self.non_tensor_batch, self.meta_info

    def _become(self, other: Self) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = other._tables()

    @classmethod
    def _made_of(cls, batch: dict[str, Tensor], objects: dict[str, ObjectColumn], meta: dict[str, Any]) -> Self:
        # Without the constructor's checks, which would cost as much as the views: for rows of what has passed them.
        made = cls.__new__(cls)
        made.batch, made.non_tensor_batch, made.meta_info = batch, objects, meta
        return made

    def _checked(self) -> DataProto:
        """The columns as the constructor takes them: a user may have assigned some since, `data.batch["x"] = ...`."""
        return DataProto(self.batch, self.non_tensor_batch)

    def _cut(self, bounds: Sequence[int]) -> list[Self]:
        """Views of rows [bounds[i], bounds[i + 1]) for each i; the bounds run from 0 to the last row."""
        source = self._checked()
        tensors = col.cut_tensors(source.batch, bounds)
        return [
            self._made_of(
                batch,
                {key: rows[start:stop] for key, rows in source.non_tensor_batch.items()},
                meta_of_rows(self.meta_info, range(start, stop)),
            )
            for (start, stop), batch in zip(pairwise(bounds), tensors, strict=True)
        ]

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
        numbers: range | Tensor,
    ) -> Self:
        """Apply one row operation, which takes rows of these numbers, to every column; columns that share offsets still do."""
        moved: dict[int, RaggedMove] = {}

        def move(column: Tensor) -> Tensor:
            if not jg.is_jagged(column):
                return dense(column)
            values, offsets = jg.parts(column)
            if id(offsets) not in moved:
                moved[id(offsets)] = ragged(offsets)
            index, new_offsets = moved[id(offsets)]
            return jg.jagged(values[index], new_offsets)

        source = self._checked()
        return self._made_of(
            {key: move(column) for key, column in source.batch.items()},
            {key: objects(rows) for key, rows in source.non_tensor_batch.items()},
            meta_of_rows(self.meta_info, numbers),
        )


def _rebuild(cls: type[DataProto], packed: wire.Packed, objects: dict[str, list[Any]], meta: dict[str, Any]) -> DataProto:
    return cls(wire.unpack(packed), objects, meta)

"""`DataProto`: the rows that travel between the driver and the workers.

Three kinds of column share one row count: `batch` holds tensors (dense [B, ...] or jagged [B, *, ...]), `non_tensor_batch`
holds one Python object per row, `meta_info` holds values of the whole batch. Jagged columns of equal lengths share one
offsets tensor, so they can be added and multiplied.

`union`, `pop`, `rename` and `reorder` change the object they are called on, as users of verl expect; everything else
returns a new one. A failed operation leaves its inputs as they were, and no result shares meta that can be changed. Rows that
stay where they were made are `RemoteRows`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import columns as col
from podium.protocol import disk, formatting, indexing, joining, merging, row_dicts, wire
from podium.protocol import jagged as jg
from podium.protocol import meta as mt
from podium.protocol import row_moves as moves
from podium.protocol.arrays import tensor_bytes
from podium.protocol.batch import Batch, Columns, batch_of, tensors_of
from podium.protocol.columns import ObjectColumn
from podium.protocol.indexing import RowIndex
from podium.protocol.row_dicts import DataProtoItem
from podium.protocol.row_operations import RowOperations

if TYPE_CHECKING:
    from tensordict import TensorDict


class DataProto(RowOperations):
    """Rows with named columns. `len()` is the number of rows.

    >>> data = DataProto.from_dict({"x": torch.arange(3)}, {"name": ["a", "b", "c"]}, {"step": 7})
    >>> len(data), data[1:].batch["x"].tolist(), data.non_tensor_batch["name"].tolist(), data.meta_info
    (3, [1, 2], ['a', 'b', 'c'], {'step': 7})
    """

    non_tensor_batch: dict[str, ObjectColumn]
    meta_info: dict[str, Any]

    def __init__(
        self,
        batch: Columns | None = None,
        non_tensor_batch: Mapping[str, ObjectColumn | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        *,
        auto_padding: bool = False,
    ) -> None:
        """Take columns and meta values as they are: storage is shared. DataError if columns differ in row count or share a name.

        `auto_padding` allows dispatch to pad the rows to equal shards; it stays with the rows through every operation.
        """
        tensors = Batch(tensors_of(batch))
        is_even = col.is_even(tensors)
        self._batch = tensors if is_even else Batch(col.intern_offsets(tensors))
        self.non_tensor_batch = col.array_columns(non_tensor_batch) if non_tensor_batch else {}
        self.meta_info = dict(meta_info) if meta_info else {}
        if not isinstance(auto_padding, bool):
            raise DataError(f"auto_padding must be True or False, got {auto_padding!r}")
        if auto_padding:
            self.meta_info[mt.AUTO_PADDING_KEY] = True
        if self.non_tensor_batch or not is_even:
            col.check_row_counts(self.batch, self.non_tensor_batch)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, ObjectColumn | Sequence[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """The constructor under the name that verl's users know. DataError for other than one batch dim."""
        _check_batch_dims(num_batch_dims)
        return cls(tensors, non_tensors, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | NDArray[Any]],
        meta_info: Mapping[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Tensors and numpy arrays in one dict: tensor and object columns. DataError for a value of another type."""
        for key, value in data.items():
            if not isinstance(value, Tensor | np.ndarray):
                raise DataError(f"column {key!r} is a {type(value).__name__}: make it a tensor or, by object_column, an array")
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        objects = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        return cls(tensors, objects, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Mapping[str, Any]], meta_info: Mapping[str, Any] | None = None, *, stack: Iterable[str] = ()
    ) -> Self:
        """One dict per row; the columns are the union of their keys, None where a row lacks one.

        Keys that every row has become tensor columns where all values are numbers ([B], of their own type) or tensors: jagged
        ones, also where all are equally long, or [B, ...] for 0-d tensors and the keys in `stack`. All else is objects, and so
        are numbers that no type holds without changing one; ints beside floats are float64.
        """
        return cls(*row_dicts.columns_of(rows, stack), meta_info)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """Its tensors (storage is shared), its `NonTensorStack`s as object columns, copies of its `NonTensorData` as meta.

        `meta_info` adds to the meta. DataError for nested TensorDicts, for a batch size of more than one dim, and for a key of
        `meta_info` that the TensorDict has with another value.
        """
        from podium.protocol import tensordicts

        _check_batch_dims(num_batch_dims)
        made = cls(*tensordicts.take_apart(tensor_dict))
        return made.union(DataProto(meta_info=meta_info)) if meta_info else made

    def to_tensordict(self) -> TensorDict:
        """The same rows for code that works on TensorDicts; storage is shared, meta is not. The inverse of `from_tensordict`.

        DataError when a column and a meta key have one name.
        """
        from podium.protocol import tensordicts

        return tensordicts.put_together(len(self), *self._checked_tables())

    @property
    def batch(self) -> Batch:
        """The tensor columns. A dict or a TensorDict may be assigned."""
        return self._batch

    @batch.setter
    def batch(self, columns: Columns | None) -> None:
        self._batch = batch_of(columns)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        for column in self.batch.values():
            return jg.num_rows(column)
        for rows in self.non_tensor_batch.values():
            return len(rows)
        return 0

    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> DataProtoItem: ...
    @overload
    def __getitem__(self, index: slice | RowIndex) -> Self: ...
    def __getitem__(self, index: int | np.integer[Any] | slice | RowIndex) -> Self | DataProtoItem:
        """A slice (views where the step is 1), a boolean mask, or row numbers; by one number the row itself, as views."""
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        return self._item(int(index)) if isinstance(index, int | np.integer) else self.select_idxs(index)

    def __iter__(self) -> Iterator[DataProtoItem]:
        return map(self._item, range(len(self)))

    def _item(self, number: int) -> DataProtoItem:
        count = len(self)
        row = int(indexing.row_numbers([number], count))
        return row_dicts.item(self.batch, self.non_tensor_batch, self.meta_info, row, count)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows [start:end:step] with Python's rules. Tensor columns are views when the step is 1."""
        rows = range(len(self))[slice(start, end, step)]
        if rows.step != 1:
            return self.select_idxs(torch.tensor(rows, dtype=torch.int64))
        first, last = rows.start, max(rows.start, rows.stop)
        source = self._checked()
        return self._made_of(
            moves.slice_tensors(source.batch, first, last),
            {key: rows[first:last] for key, rows in source.non_tensor_batch.items()},
            mt.meta_of_rows(self.meta_info, range(first, last), len(source)),
        )

    def select_idxs(self, idxs: RowIndex) -> Self:
        """The rows that a boolean mask [B] marks, or the rows of the given numbers [B'], in that order; copies."""
        rows = indexing.row_numbers(idxs, len(self))
        source = self._checked()
        return self._made_of(
            moves.select_tensors(source.batch, rows),
            {key: objects[rows.numpy()] for key, objects in source.non_tensor_batch.items()},
            mt.meta_of_rows(self.meta_info, rows, len(source)),
        )

    def reorder(self, indices: RowIndex) -> None:
        """Put the rows of these numbers, which may be some or repeat, in that order, in place: `select_idxs` of this object."""
        self._become(self.select_idxs(indices))

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> Self:
        """Cut each row of the named columns, tensors or arrays, into `n_split` equal pieces that become rows; repeat all others.

        [B, S, ...] becomes [B * n, S / n, ...], row by row. None names every tensor column whose rows have a length: jagged
        ones, and dense ones of two dims or more. DataError names the column, and the row of a jagged one, that does not divide.
        """
        n_split = col.whole_number("n_split", n_split)
        named = None if split_keys is None else col.names(split_keys)
        arrays = {key: rows for key, rows in self._arrays().items() if key in (named or ())}
        cut_arrays = {key: moves.unfold_array(key, rows, n_split) for key, rows in arrays.items()}
        pieces = moves.unfold_table(self._checked().batch, n_split, named and [key for key in named if key not in arrays])
        whole = [key for key in self.batch if key not in pieces], [key for key in self.non_tensor_batch if key not in arrays]
        repeated = self.select(*whole).repeat(n_split)
        tensors = {key: pieces[key] if key in pieces else repeated.batch[key] for key in self.batch}
        numbers = torch.arange(len(self)).repeat_interleave(n_split)
        meta = mt.meta_of_rows(self.meta_info, numbers, len(self))
        return type(self)(tensors, repeated.non_tensor_batch | cut_arrays, meta)

    @classmethod
    def concat(
        cls,
        data: Sequence[Self],
        *,
        missing: Literal["error", "none"] = "error",
    ) -> Self:
        """The rows of all data, in order. Every part must have the same columns, of the same dtype and kind.

        With `missing="none"` the result is what one worker would have made of all rows. A column that a part lacks, or has as
        objects, becomes objects, None where it is missing. Numbers of several types get one that holds them all, or become
        objects. Parts without rows do not affect types.
        Meta may be missing in some data. A `Mergeable` value merges itself; any other must be equal.
        """
        if not data:
            raise DataError("concat needs at least one batch")
        if missing not in ("error", "none"):
            raise DataError(f"missing must be 'error' or 'none', got {missing!r}")
        tensors, objects, metas = zip(*(part._tables() for part in data), strict=True)
        objects = tuple(map(col.array_columns, objects))
        if missing == "none":
            tensors, objects = moves.none_for_missing(tensors, objects, [len(part) for part in data])
        moves.same_keys("tensor column", tensors)
        moves.same_keys("object column", objects)
        return cls(
            moves.concat_tensors(tensors),
            {key: col.joined_arrays(key, [table[key] for table in objects]) for key in objects[0]},
            merging.merge_meta(metas, data),
        )

    # -- padding ------------------------------------------------------------------------------------------------------

    def is_padding_enabled(self) -> bool:
        """Whether dispatch may pad these rows to equal shards (`auto_padding` of the constructor)."""
        return bool(self.meta_info.get(mt.AUTO_PADDING_KEY, False))

    @property
    def padding_mask(self) -> Tensor:
        """[B] bool: True for rows that are copies, which fill up a shard or a mini-batch. A loss or a metric leaves them out.

        DataError if the meta has the marks of a batch of another length.
        """
        return mt.padding_mask(self.meta_info, len(self))

    def filled(self, rows: Tensor, size: int, *, copied: int = -1) -> Self:
        """The rows of these numbers and then, up to `size`, copies of the row `copied`, which the meta marks as padding."""
        if len(rows) == size:
            return self.select_idxs(rows)
        padding = torch.full((size - len(rows),), copied)
        filled = self.select_idxs(torch.cat([rows, padding]))
        marked = filled.padding_mask[: len(rows)].nonzero().flatten().tolist()
        mt.mark_padding(filled.meta_info, [*marked, *range(len(rows), size)], size)
        return filled

    def padding(self, padding_size: int, padding_candidate: Literal["first", "last", ""] = "last") -> None:
        """Add copies of the last row, or of the "first", in place. `padding_mask` marks them."""
        padding_size = col.whole_number("padding_size", padding_size)
        if padding_candidate not in ("first", "last", ""):
            raise DataError(f"padding copies the 'first' or the 'last' row, got padding_candidate={padding_candidate!r}")
        if padding_size < 0 or (padding_size and not len(self)):
            raise DataError(f"{padding_size} rows of padding cannot be added to {len(self)} rows")
        copied = 0 if padding_candidate == "first" else -1
        self._become(self.filled(torch.arange(len(self)), len(self) + padding_size, copied=copied))

    def unmarked(self) -> Self:
        """The same rows without marks of padding: all count as real."""
        real = self.select()
        mt.unmark(real.meta_info)
        return real

    # -- columns ------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Only the named columns; None keeps all of that kind. Unknown names are errors.

        Storage is shared; with `deepcopy` the objects of the rows are copied.
        """
        objects = col.pick("object column", self.non_tensor_batch, non_tensor_batch_keys)
        meta = col.pick("meta key", self.meta_info, meta_info_keys) | mt.private_meta(self.meta_info)
        return type(self)(
            col.pick("tensor column", self.batch, batch_keys),
            copy.deepcopy(objects) if deepcopy else objects,
            mt.copy_meta(meta),
        )

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Take the named columns out of this batch and return them as one of their own; None takes none of that kind."""
        names = [col.names(keys or ()) for keys in (batch_keys, non_tensor_batch_keys, meta_info_keys)]
        taken = self.select(names[0], names[1], names[2])
        for table, keys in zip(self._tables(), names, strict=True):
            for key in dict.fromkeys(keys):
                del table[key]
        return taken

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename tensor columns in place, one or several at once (two may swap their names); returns self."""
        self.batch = col.renamed(self.batch, self.non_tensor_batch, old_keys, new_keys)
        return self

    def union(self, other: DataProto, *, on: str | None = None) -> Self:
        """Add the other batch's columns and meta to this one, in place; returns self.

        With `on`, a column of distinct values that both have, the other's rows are first put into this batch's order; else row
        b is row b. A name that both have must be of one kind of column and hold equal values; otherwise DataError names it, and
        where values differ the row and both of them, and nothing is changed. The column `on` stays this batch's.
        """
        theirs = other if on is None else self._matched(other, on)
        if all(part.batch or part.non_tensor_batch for part in (self, theirs)):
            joining.check_same_rows(len(self), len(theirs))
        self._become(type(self)(*joining.join_tables(self._checked_tables(), theirs._checked_tables())))
        return self

    # -- whole batches ------------------------------------------------------------------------------------------------

    def check_consistency(self) -> None:
        """DataError when columns that were assigned since, as in `data.batch["x"] = ...`, disagree on the row count."""
        self._checked()

    def save_to_disk(self, filepath: str | Path) -> None:
        """Write one safetensors file, whole or not at all.

        DataError names a column, an object and its row, or a meta key that a file cannot hold.
        """
        disk.save(Path(filepath), self._checked_tables())

    @classmethod
    def load_from_disk(cls, filepath: str | Path) -> Self:
        """What `save_to_disk` wrote, on the CPU. Nothing in the file is run. DataError for one that is missing or damaged."""
        return cls(*disk.load(Path(filepath)))

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors to `device`, in place; returns self. What is there already is kept."""
        self.batch = self.batch.to(device)
        return self

    def clone(self) -> Self:
        """A batch that shares nothing that can be changed with this one."""
        return type(self)(self.batch.clone(), copy.deepcopy(self.non_tensor_batch), mt.copy_meta(self.meta_info))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.clone()

    def __copy__(self) -> Self:
        return self.select()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        buffers = protocol.__index__() >= 5
        packed = wire.pack(self._checked().batch, buffers=buffers)
        objects = {key: wire.pack_array(rows, buffers=buffers) for key, rows in self._arrays().items()}
        if type(self) is not DataProto:
            return _rebuild, (type(self), packed, objects, self.meta_info)
        return rows_of, (packed, self.meta_info, objects) if objects else (packed, self.meta_info)

    def __repr__(self) -> str:
        columns = [f"{key}: {formatting.describe(column)}" for key, column in self.batch.items()]
        columns += [f"{key}: {formatting.describe_array(rows)}" for key, rows in self._arrays().items()]
        return f"{type(self).__name__}({len(self)} rows; {', '.join(columns)}; meta: {', '.join(self.meta_info) or 'none'})"

    def get_data_info(self) -> str:
        """A line for each column and each value of the meta: its kind, and where it is."""
        tensors = [f"  {key}: {formatting.describe(column)} on {column.device}" for key, column in self.batch.items()]
        arrays = [f"  {key}: {formatting.describe_array(rows)}" for key, rows in self._arrays().items()]
        meta = [f"  {key}: {type(value).__name__}" for key, value in self.meta_info.items()]
        return "\n".join(["batch", *tensors, "non_tensor_batch", *arrays, "meta_info", *meta])

    def print_size(self, prefix: str = "") -> None:
        """Print how many GiB the tensors and the numpy arrays have; of objects, their references alone."""
        tensors = sum(map(tensor_bytes, self.batch.values())) / 2**30
        arrays = sum(rows.nbytes for rows in self._arrays().values()) / 2**30
        sizes = f"tensors: {tensors:.6f} GiB, non_tensor_batch: {arrays:.6f} GiB"
        print(f"{prefix}, {sizes}" if prefix else sizes)  # noqa: T201 - which its name says

    # -- inside -------------------------------------------------------------------------------------------------------

    def _tables(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return self.batch, self.non_tensor_batch, self.meta_info

    def _arrays(self) -> dict[str, ObjectColumn]:
        """The columns of objects and numbers as arrays: a user may have assigned a list."""
        return col.array_columns(self.non_tensor_batch) if self.non_tensor_batch else {}

    def _become(self, other: Self) -> None:
        self.batch, self.non_tensor_batch, self.meta_info = other._tables()

    def _matched(self, other: DataProto, on: str) -> DataProto:
        """The other batch's rows in the order of these, without the column `on`."""
        rows = other.select_idxs(joining.rows_by(on, self._tables(), other._tables()))
        rows.batch.pop(on, None)
        rows.non_tensor_batch.pop(on, None)
        return rows

    @classmethod
    def _made_of(cls, batch: Mapping[str, Tensor], objects: dict[str, ObjectColumn], meta: dict[str, Any]) -> Self:
        # For rows of a checked batch: the constructor's checks would cost as much as the views.
        made = cls.__new__(cls)
        made._batch = Batch(batch)
        made.non_tensor_batch, made.meta_info = objects, meta
        return made

    def _checked(self) -> DataProto:
        """The columns, checked and converted as in the constructor: a user may have assigned some, `data.batch["x"] = ...`."""
        if not self.non_tensor_batch and col.is_even(self.batch):
            return self
        return DataProto(self.batch, self.non_tensor_batch)

    def _checked_tables(self) -> joining.Tables:
        source = self._checked()
        return source.batch, source.non_tensor_batch, self.meta_info

    def _cut(self, bounds: Sequence[int]) -> list[Self]:
        """Views of rows [bounds[i], bounds[i + 1]) for each i; the bounds run from 0 to the last row."""
        source = self._checked()
        objects = [{key: rows[start:stop] for key, rows in source.non_tensor_batch.items()} for start, stop in pairwise(bounds)]
        metas = [mt.meta_of_rows(self.meta_info, range(start, stop), bounds[-1]) for start, stop in pairwise(bounds)]
        return list(map(self._made_of, moves.cut_tensors(source.batch, bounds), objects, metas))


def rows_of(packed: wire.Packed, meta: dict[str, Any], objects: Mapping[str, wire.ArrayRecord] | None = None) -> DataProto:
    """Rows from their records. They were checked where they were packed, so they are not checked again."""
    columns = {key: wire.unpack_array(record) for key, record in objects.items()} if objects else {}
    return DataProto._made_of(wire.unpack(packed), columns, meta)


def _check_batch_dims(count: int) -> None:
    if count != 1:
        raise DataError(f"rows have one batch dim, got num_batch_dims={count}: what is behind the first dim belongs to the row")


def _rebuild(cls: type[DataProto], packed: wire.Packed, objects: dict[str, wire.ArrayRecord], meta: dict[str, Any]) -> DataProto:
    return cls(wire.unpack(packed), {key: wire.unpack_array(record) for key, record in objects.items()}, meta)

"""`RemoteRows`: rows that stay where they were made. Row operations move row numbers and no column.

They are a small `DataProto` (`local`) of the columns in this process: small ones and, for each source of remote columns, the
number that every row has in it. So each row operation is that of `DataProto` on the numbers, with its rules and messages. Nothing
here changes: every operation returns new rows. `remote_concat` joins them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from podium.errors import DataError, nearest
from podium.protocol import columns as col
from podium.protocol import jagged as jg
from podium.protocol import joining
from podium.protocol import meta as mt
from podium.protocol.blocks import INTERNAL, Block, Header, Source, check_name, check_names
from podium.protocol.column_types import ColumnType, bytes_of_columns
from podium.protocol.columns import ObjectColumn
from podium.protocol.data_proto import DataProto
from podium.protocol.indexing import RowIndex
from podium.protocol.row_operations import RowOperations

NUMBERS, LENGTHS = "<numbers {}>", "<lengths {}>"
"""Internal columns of `local`: the number of each row in a source [B], and the length of each row there [B]."""


@dataclass(frozen=True)
class RemoteColumn:
    """A column whose rows are not all in `local`."""

    numbers: str
    """The internal column with its rows' numbers. Its source has this name too."""
    lengths: str | None
    """The internal column with its rows' lengths; None for a dense column."""
    name: str
    """The column's name in its blocks."""
    column_type: ColumnType


class RemoteRows(RowOperations):
    """Rows of which this process has the small columns, the meta and the lengths; `get` reads the others.

    `local`, `remote` and `sources` are for `podium.protocol` alone.
    """

    def __init__(
        self, local: DataProto, remote: Mapping[str, RemoteColumn], sources: Mapping[str, Source], *, is_tensordict: bool
    ) -> None:
        self.local = local
        self.remote = dict(remote)
        self.sources = {column.numbers: sources[column.numbers] for column in self.remote.values()}
        self.is_tensordict = is_tensordict

    @classmethod
    def of(cls, header: Header, block: Block) -> Self:
        """The rows of one rank's result."""
        if not header.column_types:
            return cls(header.local, {}, {}, is_tensordict=header.is_tensordict)
        numbers = NUMBERS.format(0)
        names: dict[int, str] = {}  # columns of equal lengths share the tensor
        for lengths in header.lengths.values():
            names.setdefault(id(lengths), LENGTHS.format(len(names)))
        internal = {numbers: torch.arange(header.num_rows)} | {names[id(one)]: one for one in header.lengths.values()}
        remote = {
            key: RemoteColumn(numbers, names[id(header.lengths[key])] if key in header.lengths else None, key, column_type)
            for key, column_type in header.column_types.items()
        }
        local = DataProto({**header.local.batch, **internal}, header.local.non_tensor_batch, header.local.meta_info)
        return cls(local, remote, {numbers: Source((block,), (header.num_rows,))}, is_tensordict=header.is_tensordict)

    @classmethod
    def of_local(cls, rows: DataProto) -> Self:
        """Rows of which this process has all columns. DataError for column names that remote rows cannot have."""
        check_names(rows)
        return cls(rows.select(), {}, {}, is_tensordict=False)

    # -- what is known without reading --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.local)

    @property
    def meta_info(self) -> dict[str, Any]:
        """A copy of the meta."""
        return mt.copy_meta(self.local.meta_info)

    def column_names(self) -> set[str]:
        """The names of all columns, local and remote."""
        return {*self.local_tensors(), *self.local.non_tensor_batch, *self.remote}

    def lengths(self, key: str) -> Tensor:
        """[B] int64: the length of each row of a jagged column, without reading it. DataError for one that is not jagged."""
        self._check_known([key])
        column = self.remote.get(key)
        if column is not None and column.lengths is not None:
            return self.local.batch[column.lengths].clone()
        if column is None and key in self.local.batch and jg.is_jagged(self.local.batch[key]):
            return jg.lengths_of(self.local.batch[key])
        raise DataError(f"column {key!r} is not jagged, so its rows do not have lengths")

    def is_here(self, key: str) -> bool:
        """Whether this process has all rows of the column, so that `get` fetches nothing of it."""
        self._check_known([key])
        return key not in self.column_bytes()

    def column_bytes(self) -> dict[str, int]:
        """Bytes of these rows that `get` would fetch, by column; of objects, an estimate."""
        sizes, own = {key: self._bytes(column) for key, column in self.remote.items()}, self._driver_bytes()
        return {key: size - own.get(key, 0) for key, size in sizes.items() if key not in own or own[key] < size}

    def local_bytes(self) -> dict[str, int]:
        """Bytes of these rows that this process has, by column."""
        return bytes_of_columns(self._only_local()) | self._driver_bytes()

    def _driver_bytes(self) -> dict[str, int]:
        """Bytes of remote columns in rows that the driver itself added, by column; columns without any are left out."""
        found: dict[str, int] = {}
        for key, column in self.remote.items():
            source = self.sources[column.numbers]
            if not len(source.of_driver):
                continue
            rows = torch.isin(source.owners(self.local.batch[column.numbers]), source.of_driver)
            values = int(rows.sum() if column.lengths is None else self.local.batch[column.lengths][rows].sum())
            found |= {key: values * column.column_type.value_bytes} if values else {}
        return found

    def _bytes(self, column: RemoteColumn) -> int:
        values = len(self) if column.lengths is None else int(self.local.batch[column.lengths].sum())
        return values * column.column_type.value_bytes

    def is_padding_enabled(self) -> bool:
        """See `DataProto.is_padding_enabled`."""
        return self.local.is_padding_enabled()

    @property
    def padding_mask(self) -> Tensor:
        """See `DataProto.padding_mask`."""
        return self.local.padding_mask

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: slice | RowIndex) -> Self:
        if isinstance(index, int | np.integer):
            raise DataError(f"one remote row must be read by get(): .get()[{index}]; for a part, use [{index}:{index} + 1]")
        return self.replaced(self.local[index])

    def select_idxs(self, idxs: RowIndex) -> Self:
        return self.replaced(self.local.select_idxs(idxs))

    def filled(self, rows: Tensor, size: int) -> Self:
        return self.replaced(self.local.filled(rows, size))

    def unmarked(self) -> Self:
        """See `DataProto.unmarked`."""
        return self.replaced(self.local.unmarked())

    def _cut(self, bounds: Sequence[int]) -> list[Self]:
        return list(map(self.replaced, self.local._cut(bounds)))

    # -- columns ------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Only the named columns, as `DataProto.select`: tensors by the first list, objects by the second."""
        tensors = list(col.pick("tensor column", self.tensor_columns(), batch_keys))
        objects = list(col.pick("object column", self.object_columns(), non_tensor_batch_keys))
        return self._only(tensors, objects, meta_info_keys)

    def pick(self, keys: Iterable[str]) -> Self:
        """Only the named columns, tensors or objects. DataError names one that is not there and the nearest that is."""
        keys = col.names(keys)
        self._check_known(keys)
        objects = list(filter(self._is_object, keys))
        return self._only([key for key in keys if key not in objects], objects, None)

    def drop(self, keys: Iterable[str]) -> Self:
        """All columns but the named ones."""
        keys = col.names(keys)
        self._check_known(keys)
        return self.pick([key for key in {**self.tensor_columns(), **self.object_columns()} if key not in keys])

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """The same rows with tensor columns renamed, as `DataProto.rename`. No object column may have a new name."""
        for name in [new_keys] if isinstance(new_keys, str) else new_keys:
            check_name(name)
        every = {key: torch.empty(0) for key in self.tensor_columns()}
        changed = dict(zip(every, col.renamed(every, list(self.object_columns()), old_keys, new_keys), strict=True))
        local = self.local_of({changed.get(key, key): column for key, column in self.local.batch.items()})
        return self.replaced(local, remote={changed.get(key, key): column for key, column in self.remote.items()})

    def union(self, other: DataProto | RemoteRows, *, on: str | None = None) -> Self:
        """These columns and the other's, as `DataProto.union`, but as new rows; values of this process are copied.

        Values of a remote column that both have are not compared, but for `on`. It must be the very same rows of the very same
        column; otherwise DataError.
        """
        theirs = other if isinstance(other, RemoteRows) else RemoteRows.of_local(other.clone())
        if on is not None:
            theirs = theirs.select_idxs(_rows_by(on, self, theirs)).drop([on])
        if self.column_names() and theirs.column_names():
            joining.check_same_rows(len(self), len(theirs))
        self._check_disjoint(theirs)
        theirs = theirs._renumbered(
            first=1 + max((_number(name) for name in self.local.batch if name.startswith(INTERNAL)), default=-1)
        )
        added = {key: column for key, column in theirs.remote.items() if key not in self.remote}
        local = self.local.select().union(theirs.local.select([*theirs.local_tensors(), *_internal_columns(added)]))
        return self.replaced(local, remote=self.remote | added, sources={**self.sources, **theirs.sources})

    def _renumbered(self, first: int) -> Self:
        """The same rows, with other names for the internal columns."""
        names = {
            name: f"{name.rpartition(' ')[0]} {first + _number(name)}>" for name in self.local.batch if name.startswith(INTERNAL)
        }
        local = self.local_of({names.get(key, key): column for key, column in self.local.batch.items()})
        remote = {
            key: replace(column, numbers=names[column.numbers], lengths=column.lengths and names[column.lengths])
            for key, column in self.remote.items()
        }
        return self.replaced(local, remote=remote, sources={names[name]: source for name, source in self.sources.items()})

    def _check_disjoint(self, theirs: RemoteRows) -> None:
        for key in sorted(self.column_names() & theirs.column_names()):
            if self._is_object(key) != theirs._is_object(key):
                raise DataError(
                    f"union: column {key!r} has tensors in one batch and objects in the other, but remote rows have one "
                    "column of a name: rename it, or leave it out of one of them by select()"
                )
            if self._origin(key) != theirs._origin(key) or not torch.equal(self._numbers_of(key), theirs._numbers_of(key)):
                raise DataError(
                    f"union: column {key!r} is in both batches and remote, so its values are not compared: leave it out "
                    "of one of them by select(), or rename it"
                )

    def _origin(self, key: str) -> tuple[str, Source] | None:
        column = self.remote.get(key)
        return None if column is None else (column.name, self.sources[column.numbers])

    def _numbers_of(self, key: str) -> Tensor:
        column = self.remote.get(key)  # local values are compared by the union of `local`
        return torch.empty(0) if column is None else self.local.batch[column.numbers]

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, keys: Iterable[str] | None = None) -> Any:
        """The rows as a DataProto (or the TensorDict that they were), with those columns only; None is all. Private copies.

        Of remote columns, only these rows are read.
        """
        wanted = self if keys is None else self.pick(keys)
        return wanted._read(wanted._only_local().clone())

    def fetched(self) -> Any:
        """`get` for rows that have just arrived. Their local columns are not copied: no other object refers to them."""
        return self._read(self._only_local())

    def _read(self, local: DataProto) -> Any:
        tensors, objects = dict(local.batch), dict(local.non_tensor_batch)
        by_source: dict[str, list[str]] = {}
        for key, column in self.remote.items():
            by_source.setdefault(column.numbers, []).append(key)
        for numbers, keys in by_source.items():
            read = self._read_source(numbers, keys)
            tensors |= read.batch
            objects |= read.non_tensor_batch
        rows = DataProto(tensors, objects, local.meta_info)
        return rows.to_tensordict() if self.is_tensordict else rows

    def _read_source(self, numbers: str, keys: Sequence[str]) -> DataProto:
        names = {key: self.remote[key].name for key in keys}
        rows = self.local.batch[numbers]
        if not len(rows):
            empty = {key: self.remote[key].column_type.empty() for key in keys}
            tensors = {key: column for key, column in empty.items() if isinstance(column, Tensor)}
            return DataProto(tensors, {key: column for key, column in empty.items() if isinstance(column, np.ndarray)})
        found = self.sources[numbers].read(list(dict.fromkeys(names.values())), rows)
        tensors = {key: found.batch[name] for key, name in names.items() if name in found.batch}
        objects: dict[str, ObjectColumn] = {  # some of the rows of a column may have a narrower dtype than all of them
            key: col.as_dtype(key, found.non_tensor_batch[name], np.dtype(self.remote[key].column_type.array_dtype))
            for key, name in names.items()
            if name in found.non_tensor_batch
        }
        return DataProto(tensors, objects)

    # -- sending ------------------------------------------------------------------------------------------------------

    def narrowed(self) -> Self:
        """The same rows, to be sent: of the fewest blocks, and without the lengths, which only the driver needs."""
        tensors = dict(self.local_tensors())
        sources = {}
        for numbers, source in self.sources.items():
            keys = [column.name for column in self.remote.values() if column.numbers == numbers]
            sources[numbers], tensors[numbers] = source.narrowed(self.local.batch[numbers], keys)
        remote = {key: replace(column, lengths=None) for key, column in self.remote.items()}
        return self.replaced(self.local_of(tensors), remote=remote, sources=sources)

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all sources."""
        return [block for source in self.sources.values() for block in source.blocks]

    def with_blocks(self, replacement: Callable[[Block], Block]) -> Self:
        """The same rows, with each block replaced."""
        sources = {
            numbers: Source(tuple(map(replacement, source.blocks)), source.sizes) for numbers, source in self.sources.items()
        }
        return self.replaced(self.local, sources=sources)

    def __repr__(self) -> str:
        local = [repr(self._only_local())] if self.local_tensors() or self.local.non_tensor_batch else []
        remote = [f"{key}: {column.column_type}" for key, column in self.remote.items()]
        return (
            f"{type(self).__name__}({len(self)} rows; elsewhere: {', '.join(remote) or 'nothing'}; {', '.join(['here', *local])})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it never changes

    # -- for this package ---------------------------------------------------------------------------------------------

    def replaced(
        self,
        local: DataProto,
        *,
        remote: Mapping[str, RemoteColumn] | None = None,
        sources: Mapping[str, Source] | None = None,
    ) -> Self:
        """Rows with these parts, and the other parts of these rows."""
        remote, sources = self.remote if remote is None else remote, self.sources if sources is None else sources
        return type(self)(local, remote, sources, is_tensordict=self.is_tensordict)

    def local_of(self, tensors: Mapping[str, Tensor]) -> DataProto:
        """`local` with these tensor columns instead of its own."""
        return DataProto(tensors, self.local.non_tensor_batch, self.local.meta_info)

    def local_tensors(self) -> dict[str, Tensor]:
        """The tensor columns of `local`, without the internal ones."""
        return {key: column for key, column in self.local.batch.items() if not key.startswith(INTERNAL)}

    def tensor_columns(self) -> dict[str, object]:
        """The tensor columns, local and remote, by name."""
        return {**self.local_tensors(), **{key: one for key, one in self.remote.items() if not one.column_type.is_object}}

    def object_columns(self) -> dict[str, object]:
        """The object columns, local and remote, by name."""
        return {**self.local.non_tensor_batch, **{key: one for key, one in self.remote.items() if one.column_type.is_object}}

    def _only_local(self) -> DataProto:
        return self.local.select(list(self.local_tensors()))

    def _only(self, tensors: list[str], objects: list[str], meta_info_keys: Iterable[str] | None) -> Self:
        remote = {key: self.remote[key] for key in (*tensors, *objects) if key in self.remote}
        kept = [*(key for key in tensors if key not in remote), *_internal_columns(remote)]
        return self.replaced(
            self.local.select(kept, [key for key in objects if key not in remote], meta_info_keys), remote=remote
        )

    def _is_object(self, key: str) -> bool:
        return key in self.object_columns()

    def _check_known(self, keys: Iterable[str]) -> None:
        known = self.column_names()
        for key in keys:
            if key not in known:
                raise DataError(f"no column {key!r}{nearest(key, known)}; there are: {', '.join(sorted(known)) or 'none'}")


def _internal_columns(remote: Mapping[str, RemoteColumn]) -> list[str]:
    names = [name for column in remote.values() for name in (column.numbers, column.lengths) if name is not None]
    return list(dict.fromkeys(names))


def _number(name: str) -> int:
    return int(name.rstrip(">").rpartition(" ")[2])


def _rows_by(on: str, mine: RemoteRows, theirs: RemoteRows) -> Tensor:
    sides = [_read_column(rows, on) for rows in (mine, theirs)]
    return joining.rows_by(on, *((side.batch, side.non_tensor_batch, {}) for side in sides))


def _read_column(rows: RemoteRows, key: str) -> DataProto:
    found = rows.get([key])
    return found if isinstance(found, DataProto) else DataProto.from_tensordict(found)

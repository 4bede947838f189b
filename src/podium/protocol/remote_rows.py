"""`RemoteRows`: rows that stay where they were made. Row operations move numbers and no bytes.

They are a small `DataProto` (`_local`) whose columns lie in this process: small columns, and for each source of columns
that lie elsewhere the number that every row has in it. So each row operation is that of `DataProto` on the numbers, with its
rules and messages. Nothing here changes: every operation returns new rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError, nearest
from podium.protocol import columns as col
from podium.protocol import jagged as jg
from podium.protocol import joining
from podium.protocol import meta as mt
from podium.protocol import row_moves as moves
from podium.protocol.blocks import INTERNAL, Block, Header, LocalBlock, Source, check_name, check_names
from podium.protocol.column_types import ColumnType, bytes_of_columns, joined_type
from podium.protocol.columns import ObjectColumn
from podium.protocol.data_proto import DataProto
from podium.protocol.indexing import LastBatch, RowIndex

NUMBERS, LENGTHS = "<numbers {}>", "<lengths {}>"
"""Columns of `_local` that are ours: what number each row has in a source [B], and how long it is there [B]."""


@dataclass(frozen=True)
class RemoteColumn:
    """A column that lies elsewhere."""

    numbers: str
    """The column of `_local` with its rows' numbers; by this name its source is found too."""
    lengths: str | None
    """The column of `_local` with its rows' lengths, where it is jagged."""
    name: str
    """What it is called where it lies."""
    column_type: ColumnType


class RemoteRows:
    """Rows of which this process has the small columns, the meta and the lengths; `get` reads the others."""

    def __init__(
        self, local: DataProto, remote: Mapping[str, RemoteColumn], sources: Mapping[str, Source], *, is_tensordict: bool
    ) -> None:
        self._local = local
        self._remote = dict(remote)
        self._sources = {remote.numbers: sources[remote.numbers] for remote in self._remote.values()}
        self.is_tensordict = is_tensordict

    @classmethod
    def of(cls, header: Header, block: Block) -> Self:
        """The rows of one rank's result."""
        numbers = NUMBERS.format(0)
        if not header.column_types:
            return cls(header.local, {}, {}, is_tensordict=header.is_tensordict)
        names = {id(lengths): LENGTHS.format(number) for number, lengths in enumerate(_distinct(header.lengths.values()))}
        ours = {numbers: torch.arange(header.num_rows)} | {names[id(one)]: one for one in header.lengths.values()}
        remote = {
            key: RemoteColumn(numbers, names[id(header.lengths[key])] if key in header.lengths else None, key, kind)
            for key, kind in header.column_types.items()
        }
        here = DataProto({**header.local.batch, **ours}, header.local.non_tensor_batch, header.local.meta_info)
        return cls(here, remote, {numbers: Source((block,), (header.num_rows,))}, is_tensordict=header.is_tensordict)

    @classmethod
    def of_local(cls, rows: DataProto) -> Self:
        """Rows that are in this process, all of their columns. DataError for names that rows which stay cannot have."""
        check_names(rows)
        return cls(rows.select(), {}, {}, is_tensordict=False)

    # -- what is known of them ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._local)

    @property
    def meta_info(self) -> dict[str, Any]:
        """A copy of the meta."""
        return mt.copy_meta(self._local.meta_info)

    def column_names(self) -> set[str]:
        """The names of all columns, wherever they lie."""
        return {*self._local_tensors(), *self._local.non_tensor_batch, *self._remote}

    def lengths(self, key: str) -> Tensor:
        """[B] int64: the length of each row of a jagged column, without reading it. DataError for one that is not jagged."""
        self._check_known([key])
        remote = self._remote.get(key)
        if remote is not None and remote.lengths is not None:
            return self._local.batch[remote.lengths].clone()
        if remote is None and key in self._local.batch and jg.is_jagged(self._local.batch[key]):
            return jg.lengths_of(self._local.batch[key])
        raise DataError(f"column {key!r} is not jagged: its rows have no lengths of their own")

    def is_here(self, key: str) -> bool:
        """Whether all rows of the column are in this process, so that `get` fetches nothing of it."""
        self._check_known([key])
        return key not in self.column_bytes()

    def column_bytes(self) -> dict[str, int]:
        """How many bytes these rows have of each column that lies elsewhere; of objects, about how many.

        Of a column that joins rows of this process to others, without the bytes that are here.
        """
        sizes, here = {key: self._bytes(remote) for key, remote in self._remote.items()}, self._driver_bytes()
        return {key: size - here.get(key, 0) for key, size in sizes.items() if key not in here or here[key] < size}

    def local_bytes(self) -> dict[str, int]:
        """How many bytes are here, by column: of columns that are here all, of others those of the driver's own rows."""
        return bytes_of_columns(self._only_local()) | self._driver_bytes()

    def _driver_bytes(self) -> dict[str, int]:
        """By column that lies elsewhere: how many bytes of it are the driver's own rows; columns without any are left out."""
        found: dict[str, int] = {}
        for key, remote in self._remote.items():
            source = self._sources[remote.numbers]
            if not len(source.of_driver):
                continue
            rows = torch.isin(source.owners(self._local.batch[remote.numbers]), source.of_driver)
            values = int(rows.sum() if remote.lengths is None else self._local.batch[remote.lengths][rows].sum())
            found |= {key: values * remote.column_type.value_bytes} if values else {}
        return found

    def is_padding_enabled(self) -> bool:
        return self._local.is_padding_enabled()

    @property
    def padding_mask(self) -> Tensor:
        """See `DataProto.padding_mask`."""
        return self._local.padding_mask

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __getitem__(self, index: slice | RowIndex) -> Self:
        if isinstance(index, int | np.integer):
            raise DataError(
                f"one row of rows that lie elsewhere is read by get(): .get()[{index}], or [{index}:{index} + 1] for a part"
            )
        return self._with(self._local[index])

    def select_idxs(self, idxs: RowIndex) -> Self:
        return self._with(self._local.select_idxs(idxs))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        return self._with(self._local.repeat(repeat_times, interleave))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | NDArray[Any]) -> Self:
        return self._with(self._local.sample_level_repeat(repeat_times))

    def partition(self, num_parts: int) -> list[Self]:
        return list(map(self._with, self._local.partition(num_parts)))

    def chunk(self, chunks: int) -> list[Self]:
        return list(map(self._with, self._local.chunk(chunks)))

    def split(self, split_size: int) -> list[Self]:
        return list(map(self._with, self._local.split(split_size)))

    def make_iterator(
        self, mini_batch_size: int, epochs: int, seed: int | None = None, *, last: LastBatch = "error"
    ) -> Iterator[Self]:
        return map(self._with, self._local.make_iterator(mini_batch_size, epochs, seed, last=last))

    def filled(self, rows: Tensor, size: int) -> Self:
        """The given rows and then, up to `size`, copies of the last one of all, which the meta marks as padding."""
        return self._with(self._local.filled(rows, size))

    def unmarked(self) -> Self:
        """The same rows without the mark of padding."""
        return self._with(self._local.unmarked())

    @classmethod
    def concat(cls, data: Sequence[Self]) -> Self:
        """The rows of all parts in order, as `DataProto.concat`."""
        _check_same_columns(data)
        keys = {key: column.name for part in reversed(data) for key, column in part._remote.items()}
        parts = [part._as_remote(keys) for part in data]
        lengths = {key: _lengths_of(parts, key) for key in keys}
        names = {places: LENGTHS.format(number) for number, places in enumerate(dict.fromkeys(filter(None, lengths.values())))}
        remote: dict[str, RemoteColumn] = {}
        sources: dict[str, Source] = {}
        ours: list[dict[str, Tensor]] = [{} for _ in parts]
        for number, (places, members) in enumerate(_groups(parts, keys).items()):
            numbers = NUMBERS.format(number)
            sources[numbers], firsts = _end_to_end([part._sources[name] for part, name in zip(parts, places, strict=True)])
            for part, name, first, columns in zip(parts, places, firsts, ours, strict=True):
                columns[numbers] = part._local.batch[name] + first
            for key in members:
                remote[key] = _joined_column(key, numbers, names.get(lengths[key] or ()), parts)
        for places, joined_lengths in names.items():
            for part, name, columns in zip(parts, places, ours, strict=True):
                columns[joined_lengths] = part._local.batch[name]
        here = [part._local_of({**part._local_tensors(), **columns}) for part, columns in zip(parts, ours, strict=True)]
        joined = DataProto.concat(here)
        return cls(joined, remote, sources, is_tensordict=parts[0].is_tensordict)

    # -- columns ------------------------------------------------------------------------------------------------------

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Only the named columns, as `DataProto.select`: tensors by the first list, objects by the second."""
        tensors = self._names(batch_keys, "tensor column", is_object=False)
        objects = self._names(non_tensor_batch_keys, "object column", is_object=True)
        return self._only(tensors, objects, meta_info_keys)

    def drop(self, keys: Iterable[str]) -> Self:
        """Without the named columns."""
        keys = col.names(keys)
        self._check_known(keys)
        kept = self.column_names() - set(keys)
        return self.pick([key for key in (*self._local.batch, *self._local.non_tensor_batch, *self._remote) if key in kept])

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """The same rows, some tensor columns under other names, as `DataProto.rename`; object columns keep theirs."""
        for name in [new_keys] if isinstance(new_keys, str) else new_keys:
            check_name(name)
        objects = list(filter(self._is_object, self.column_names()))
        every = {key: torch.empty(0) for key in (*self._local_tensors(), *_remote_where(self._remote, is_object=False))}
        changed = dict(zip(every, col.renamed(every, objects, old_keys, new_keys), strict=True))
        here = self._local_of({changed.get(key, key): column for key, column in self._local.batch.items()})
        return self._with(here, remote={changed.get(key, key): column for key, column in self._remote.items()})

    def union(self, other: DataProto | RemoteRows, *, on: str | None = None) -> Self:
        """These columns and the other's, as `DataProto.union`, but as new rows; values of this process are copied.

        Of a column that both have and that lies elsewhere, the values are not compared, but for `on`: it must be the very same
        rows of the very same column. Otherwise DataError.
        """
        theirs = other if isinstance(other, RemoteRows) else RemoteRows.of_local(other.clone())
        if on is not None:
            theirs = theirs.select_idxs(_rows_by(on, self, theirs)).drop([on])
        if all(rows.column_names() for rows in (self, theirs)):
            joining.check_same_rows(len(self), len(theirs))
        self._check_disjoint(theirs)
        mine = self._remote
        theirs = theirs._renumbered(
            first=1 + max((_number(name) for name in self._local.batch if name.startswith(INTERNAL)), default=-1)
        )
        added = {key: column for key, column in theirs._remote.items() if key not in mine}
        here = self._local.select().union(theirs._only_ours(added))
        return self._with(here, remote=mine | added, sources={**self._sources, **theirs._sources})

    def get(self, keys: Iterable[str] | None = None) -> Any:
        """The rows as a DataProto (or the TensorDict that they were), with those columns only; None is all. Private copies.

        Of what lies elsewhere, only these rows of these columns are read.
        """
        wanted = self if keys is None else self.pick(keys)
        return wanted._assembled(wanted._only_local().clone())

    def fetched(self) -> Any:
        """`get` for rows that have just arrived: their columns belong to the caller alone, so they are not copied again."""
        return self._assembled(self._only_local())

    def pick(self, keys: Iterable[str]) -> Self:
        """Only the named columns, tensors or objects. DataError names one that is not there and the nearest that is."""
        keys = col.names(keys)
        self._check_known(keys)
        objects = list(filter(self._is_object, keys))
        return self._only([key for key in keys if key not in objects], objects, None)

    # -- on their way -------------------------------------------------------------------------------------------------

    def narrowed(self) -> Self:
        """The same rows, of the fewest blocks, without what only the driver needs: to be sent."""
        tensors = dict(self._local_tensors())
        sources = {}
        for numbers, source in self._sources.items():
            keys = [remote.name for remote in self._remote.values() if remote.numbers == numbers]
            sources[numbers], tensors[numbers] = source.narrowed(self._local.batch[numbers], keys)
        remote = {key: replace(column, lengths=None) for key, column in self._remote.items()}
        return self._with(self._local_of(tensors), remote=remote, sources=sources)

    @property
    def blocks(self) -> list[Block]:
        """Where the columns lie."""
        return [block for source in self._sources.values() for block in source.blocks]

    def with_blocks(self, replacement: Callable[[Block], Block]) -> Self:
        """The same rows, each block replaced by what stands for it elsewhere."""
        sources = {
            numbers: Source(tuple(map(replacement, source.blocks)), source.sizes) for numbers, source in self._sources.items()
        }
        return self._with(self._local, sources=sources)

    def __repr__(self) -> str:
        local = [repr(self._only_local())] if self._local_tensors() or self._local.non_tensor_batch else []
        remote = [f"{key}: {column.column_type}" for key, column in self._remote.items()]
        return (
            f"{type(self).__name__}({len(self)} rows; elsewhere: {', '.join(remote) or 'nothing'}; {', '.join(['here', *local])})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # nothing of it changes

    # -- inside -------------------------------------------------------------------------------------------------------

    def _assembled(self, local: DataProto) -> Any:
        tensors, objects = dict(local.batch), dict(local.non_tensor_batch)
        by_source: dict[str, list[str]] = {}
        for key, remote in self._remote.items():
            by_source.setdefault(remote.numbers, []).append(key)
        for numbers, keys in by_source.items():
            read = self._read(numbers, keys)
            tensors |= read.batch
            objects |= read.non_tensor_batch
        rows = DataProto(tensors, objects, local.meta_info)
        return rows.to_tensordict() if self.is_tensordict else rows

    def _with(
        self, here: DataProto, *, remote: Mapping[str, RemoteColumn] | None = None, sources: Mapping[str, Source] | None = None
    ) -> Self:
        remote, sources = self._remote if remote is None else remote, self._sources if sources is None else sources
        return type(self)(here, remote, sources, is_tensordict=self.is_tensordict)

    def _local_tensors(self) -> dict[str, Tensor]:
        return {key: column for key, column in self._local.batch.items() if not key.startswith(INTERNAL)}

    def _only_local(self) -> DataProto:
        return self._local.select(list(self._local_tensors()))

    def _ours_of(self, remote: Mapping[str, RemoteColumn]) -> list[str]:
        names = [name for column in remote.values() for name in (column.numbers, column.lengths) if name is not None]
        return list(dict.fromkeys(names))

    def _only(self, tensors: list[str], objects: list[str], meta_info_keys: Iterable[str] | None) -> Self:
        remote = {key: self._remote[key] for key in (*tensors, *objects) if key in self._remote}
        local = [key for key in tensors if key not in remote]
        here = self._local.select([*local, *self._ours_of(remote)], [key for key in objects if key not in remote], meta_info_keys)
        return self._with(here, remote=remote)

    def _only_ours(self, remote: Mapping[str, RemoteColumn]) -> DataProto:
        return self._local.select([*self._local_tensors(), *self._ours_of(remote)])

    def _local_of(self, tensors: Mapping[str, Tensor]) -> DataProto:
        return DataProto(tensors, self._local.non_tensor_batch, self._local.meta_info)

    def _names(self, keys: Iterable[str] | None, kind: str, *, is_object: bool) -> list[str]:
        local: Mapping[str, Any] = self._local.non_tensor_batch if is_object else self._local_tensors()
        return list(col.pick(kind, {**local, **_remote_where(self._remote, is_object=is_object)}, keys))

    def _check_known(self, keys: Iterable[str]) -> None:
        known = self.column_names()
        for key in keys:
            if key not in known:
                raise DataError(f"no column {key!r}{nearest(key, known)}; there are: {', '.join(sorted(known)) or 'none'}")

    def _check_disjoint(self, theirs: RemoteRows) -> None:
        for key in sorted(self.column_names() & theirs.column_names()):
            if self._is_object(key) != theirs._is_object(key):
                raise DataError(
                    f"union: column {key!r} is of tensors in one batch and of objects in the other; of rows that stay, each name "
                    "is one column: rename it, or leave it out of one of them by select()"
                )
            if self._place_of(key) != theirs._place_of(key) or not torch.equal(self._numbers_of(key), theirs._numbers_of(key)):
                raise DataError(
                    f"union: column {key!r} is in both batches and lies elsewhere, where its values are not compared: leave it "
                    "out of one of them by select(), or rename it"
                )

    def _is_object(self, key: str) -> bool:
        return self._remote[key].column_type.is_object if key in self._remote else key in self._local.non_tensor_batch

    def _place_of(self, key: str) -> tuple[str, Source] | None:
        remote = self._remote.get(key)
        return None if remote is None else (remote.name, self._sources[remote.numbers])

    def _numbers_of(self, key: str) -> Tensor:
        remote = self._remote.get(key)  # values that are here are compared later
        return torch.empty(0) if remote is None else self._local.batch[remote.numbers]

    def _renumbered(self, first: int) -> Self:
        """The same rows, with other names for our own columns."""
        names = {name: _with_number(name, first + _number(name)) for name in self._local.batch if name.startswith(INTERNAL)}
        here = self._local_of({names.get(key, key): column for key, column in self._local.batch.items()})
        remote = {
            key: replace(one, numbers=names[one.numbers], lengths=None if one.lengths is None else names[one.lengths])
            for key, one in self._remote.items()
        }
        return self._with(here, remote=remote, sources={names[name]: source for name, source in self._sources.items()})

    def _as_remote(self, names: Mapping[str, str]) -> Self:
        """The same rows, with those columns as if they lay elsewhere, where they have these names."""
        local: dict[str, str] = {}  # by name: a block has each once
        for key, name in names.items():
            if key not in self._remote:
                local.setdefault(name, key)
        if not local:
            return self
        here = self._local
        tensors = {name: here.batch[key] for name, key in local.items() if key in here.batch}
        objects = {name: here.non_tensor_batch[key] for name, key in local.items() if key not in here.batch}
        types = {name: ColumnType.of(column) for name, column in tensors.items()}
        types |= {name: ColumnType.of(rows) for name, rows in objects.items()}
        lengths = {name: jg.lengths_of(column) for name, column in tensors.items() if jg.is_jagged(column)}
        moved = RemoteRows.of(Header(DataProto(), len(self), types, lengths), LocalBlock(DataProto(tensors, objects)))
        remote = {key: moved._remote[name] for name, key in local.items()}
        moved = RemoteRows(moved._local, remote, moved._sources, is_tensordict=False)
        rest = [key for key in here.batch if key not in remote], [key for key in here.non_tensor_batch if key not in remote]
        return self._with(here.select(*rest)).union(moved)._as_remote(names)

    def _read(self, numbers: str, keys: Sequence[str]) -> DataProto:
        names = {key: self._remote[key].name for key in keys}
        rows = self._local.batch[numbers]
        if not len(rows):
            empty = {key: self._remote[key].column_type.empty() for key in keys}
            tensors = {key: column for key, column in empty.items() if isinstance(column, Tensor)}
            return DataProto(tensors, {key: column for key, column in empty.items() if isinstance(column, np.ndarray)})
        found = self._sources[numbers].read(list(dict.fromkeys(names.values())), rows)
        tensors = {key: found.batch[name] for key, name in names.items() if name in found.batch}
        objects: dict[str, ObjectColumn] = {  # of some of the rows, a column of several dtypes may have fewer
            key: col.as_dtype(key, found.non_tensor_batch[name], np.dtype(self._remote[key].column_type.array_dtype))
            for key, name in names.items()
            if name in found.non_tensor_batch
        }
        return DataProto(tensors, objects)

    def _bytes(self, remote: RemoteColumn) -> int:
        values = len(self) if remote.lengths is None else int(self._local.batch[remote.lengths].sum())
        return values * remote.column_type.value_bytes


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


def _number(name: str) -> int:
    return int(name.rstrip(">").rpartition(" ")[2])


def _with_number(name: str, number: int) -> str:
    return f"{name.rpartition(' ')[0]} {number}>"


def _remote_where(remote: Mapping[str, RemoteColumn], *, is_object: bool) -> dict[str, RemoteColumn]:
    return {key: column for key, column in remote.items() if column.column_type.is_object == is_object}


def _check_same_columns(parts: Sequence[RemoteRows]) -> None:
    tensors = [{**part._local_tensors(), **_remote_where(part._remote, is_object=False)} for part in parts]
    objects = [{**part._local.non_tensor_batch, **_remote_where(part._remote, is_object=True)} for part in parts]
    if parts:
        moves.same_keys("tensor column", tensors)
        moves.same_keys("object column", objects)


def _groups(parts: Sequence[RemoteRows], keys: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """The columns that have the same places in every part, by the names of their numbers in each."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for key in keys:
        groups.setdefault(tuple(part._remote[key].numbers for part in parts), []).append(key)
    return groups


def _lengths_of(parts: Sequence[RemoteRows], key: str) -> tuple[str, ...] | None:
    names = [part._remote[key].lengths for part in parts]
    return tuple(name for name in names if name is not None) if names[0] is not None else None


def _joined_column(key: str, numbers: str, lengths: str | None, parts: Sequence[RemoteRows]) -> RemoteColumn:
    columns = [part._remote[key] for part in parts]
    deciding = [part._remote[key].column_type for part in parts if len(part)]  # as in `joined_arrays`
    kind = joined_type(key, deciding if deciding and deciding[0].is_object else [column.column_type for column in columns])
    if len({column.name for column in columns}) > 1:
        names = ", ".join(repr(column.name) for column in columns)
        raise DataError(
            f"concat: column {key!r} is called {names} where the parts lie, and must be called the same there: rename after the "
            "concat, let the methods that make it agree on a name, or read the rows first by get()"
        )
    return RemoteColumn(numbers, lengths, columns[0].name, kind)


def _end_to_end(sources: Sequence[Source]) -> tuple[Source, list[int]]:
    """One source of all of them, each counted once, and the number in it of the first row of each."""
    firsts: dict[Source, int] = {}
    size = 0
    for source in sources:
        if source not in firsts:
            firsts[source] = size
            size += source.num_rows
    blocks = tuple(block for source in firsts for block in source.blocks)
    sizes = tuple(rows for source in firsts for rows in source.sizes)
    return Source(blocks, sizes), [firsts[source] for source in sources]


def _rows_by(on: str, mine: RemoteRows, theirs: RemoteRows) -> Tensor:
    sides = [DataProto(rows.batch, rows.non_tensor_batch) for rows in (_plain(mine, on), _plain(theirs, on))]
    return joining.rows_by(on, *((side.batch, side.non_tensor_batch, side.meta_info) for side in sides))


def _plain(rows: RemoteRows, key: str) -> DataProto:
    found = rows.get([key])
    return found if isinstance(found, DataProto) else DataProto.from_tensordict(found)

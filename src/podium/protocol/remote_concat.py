"""Joining `RemoteRows` end to end: only row numbers and small columns move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol import row_moves as moves
from podium.protocol.blocks import Header, LocalBlock, Source
from podium.protocol.column_types import ColumnType, joined_type
from podium.protocol.data_proto import DataProto
from podium.protocol.remote_rows import LENGTHS, NUMBERS, RemoteColumn, RemoteRows


def concat_remote_rows(data: Sequence[RemoteRows]) -> RemoteRows:
    """The rows of all parts in order, as `DataProto.concat`."""
    if not data:
        raise DataError("concat needs at least one batch")
    moves.same_keys("tensor column", [part.tensor_columns() for part in data])
    moves.same_keys("object column", [part.object_columns() for part in data])
    names = {key: column.name for part in reversed(data) for key, column in part.remote.items()}
    parts = [_as_remote(part, names) for part in data]
    internal: list[dict[str, Tensor]] = [{} for _ in parts]
    lengths = _join_lengths(parts, names, internal)
    remote: dict[str, RemoteColumn] = {}
    sources: dict[str, Source] = {}
    for number, (places, keys) in enumerate(_by_numbers(parts, names).items()):
        numbers = NUMBERS.format(number)
        sources[numbers], firsts = _end_to_end([part.sources[name] for part, name in zip(parts, places, strict=True)])
        for part, name, first, columns in zip(parts, places, firsts, internal, strict=True):
            columns[numbers] = part.local.batch[name] + first
        for key in keys:
            remote[key] = _joined_column(key, numbers, lengths.get(key), parts)
    locals_ = [part.local_of({**part.local_tensors(), **columns}) for part, columns in zip(parts, internal, strict=True)]
    joined = DataProto.concat(locals_)
    return RemoteRows(joined, remote, sources, is_tensordict=parts[0].is_tensordict)


def _as_remote(rows: RemoteRows, names: Mapping[str, str]) -> RemoteRows:
    """The same rows, with these columns as remote ones: they are so in another part, by these names in its blocks."""
    moving: dict[str, str] = {}  # a block has each name once
    for key, name in names.items():
        if key not in rows.remote:
            moving.setdefault(name, key)
    if not moving:
        return rows
    local = rows.local
    tensors = {name: local.batch[key] for name, key in moving.items() if key in local.batch}
    objects = {name: local.non_tensor_batch[key] for name, key in moving.items() if key not in local.batch}
    types = {name: ColumnType.of(column) for name, column in tensors.items()}
    types |= {name: ColumnType.of(column) for name, column in objects.items()}
    lengths = {name: jg.lengths_of(column) for name, column in tensors.items() if jg.is_jagged(column)}
    moved = RemoteRows.of(Header(DataProto(), len(rows), types, lengths), LocalBlock(DataProto(tensors, objects)))
    moved = moved.replaced(moved.local, remote={key: moved.remote[name] for name, key in moving.items()})
    kept = local.select(
        [key for key in local.batch if key not in moved.remote],
        [key for key in local.non_tensor_batch if key not in moved.remote],
    )
    return _as_remote(rows.replaced(kept).union(moved), names)


def _join_lengths(parts: Sequence[RemoteRows], keys: Iterable[str], internal: Sequence[dict[str, Tensor]]) -> dict[str, str]:
    """Add the internal columns of lengths to each part. Returns their names, by key of the jagged columns."""
    places = {key: tuple([part.remote[key].lengths for part in parts]) for key in keys}
    distinct = dict.fromkeys(names for names in places.values() if names[0] is not None)
    joined = {names: LENGTHS.format(number) for number, names in enumerate(distinct)}
    for names, name in joined.items():
        for part, own, columns in zip(parts, names, internal, strict=True):
            if own is not None:
                columns[name] = part.local.batch[own]
    return {key: joined[names] for key, names in places.items() if names in joined}


def _by_numbers(parts: Sequence[RemoteRows], keys: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    """The columns that share row numbers in every part, by the names of the numbers in each."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for key in keys:
        groups.setdefault(tuple(part.remote[key].numbers for part in parts), []).append(key)
    return groups


def _joined_column(key: str, numbers: str, lengths: str | None, parts: Sequence[RemoteRows]) -> RemoteColumn:
    columns = [part.remote[key] for part in parts]
    deciding = [part.remote[key].column_type for part in parts if len(part)]  # as in `joined_arrays`
    types = deciding if deciding and deciding[0].is_object else [column.column_type for column in columns]
    column_type = joined_type(key, types)
    if len({column.name for column in columns}) > 1:
        names = ", ".join(repr(column.name) for column in columns)
        raise DataError(
            f"concat: remote column {key!r} must have one name in the parts' blocks, got {names}: rename after the concat, "
            "let the methods that make it agree on a name, or read the rows first by get()"
        )
    return RemoteColumn(numbers, lengths, columns[0].name, column_type)


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

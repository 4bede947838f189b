"""A parquet file as entries of plain JSON values: only the columns that a row is made of, a batch of rows at a time.

docs/tasks.md has the table of types. Text travels as bytes and is decoded row by row, so that an error names its row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeAlias

from podium.errors import DataError, MissingExtraError, TaskError

BATCH_ROWS = 1024
"""Rows that are in memory as Arrow arrays at a time."""
Entry: TypeAlias = Callable[[], dict[str, Any]]
"""Gives the columns of a row. DataError for bytes that are not UTF-8."""


def parquet_library(path: str) -> Any:
    """pyarrow.parquet; MissingExtraError without pyarrow."""
    try:
        import pyarrow.parquet as parquet
    except ImportError as exc:
        raise MissingExtraError("pyarrow", "parquet", f"the parquet file {path}") from exc
    return parquet


def parquet_entries(
    path: str, columns: Collection[str], *, unread: Collection[str], text_only: Collection[str]
) -> Iterator[Entry]:
    """The rows of a file, in order, with those of `columns` that it has. A dotted name is a field of a struct.

    Columns in `unread` are named by an entry (their value is True) but not read. `text_only` columns must not hold times or
    decimals, which have several texts. TaskError for a file that cannot be read, and for a type that has no JSON value.
    """
    file = _opened(path)
    schema = file.schema_arrow
    found = [column for column in columns if column in schema.names]
    for column in found:
        if schema.names.count(column) > 1:
            raise TaskError(f"{path} has {schema.names.count(column)} columns {column}: rename or drop all but one of them")
    _check_types(path, schema, found, text_only=text_only)
    named = dict.fromkeys((name for name in schema.names if name in unread), True)
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=found):
            plain = [_plain(column) for column in batch.columns]
            kinds = dict(zip(batch.schema.names, (column.type for column in plain), strict=True))
            for row in zip(*(column.to_pylist() for column in plain), strict=True):
                yield partial(_row, dict(zip(kinds, row, strict=True)), kinds, named)
    except (OSError, ValueError) as exc:  # pyarrow's ArrowInvalid is a ValueError
        raise TaskError(f"{path} cannot be read as parquet: {exc}") from exc


def column_names(path: str) -> list[str]:
    """The columns of a file. TaskError for a file that cannot be read."""
    names: list[str] = _opened(path).schema_arrow.names
    return names


def _row(entry: dict[str, Any], kinds: dict[str, Any], named: dict[str, Any]) -> dict[str, Any]:
    return {**named, **{name: _decoded(value, name, kinds[name]) for name, value in entry.items()}}


def _opened(path: str) -> Any:
    try:
        return parquet_library(path).ParquetFile(path, pre_buffer=False)
    except (OSError, ValueError) as exc:  # pyarrow's ArrowInvalid is a ValueError
        raise TaskError(f"{path} cannot be read as parquet: {exc}") from exc


def _field_type(schema: Any, column: str) -> Any:
    """The Arrow type of a column; of `reward_model.ground_truth` that of the field; None for one that is not there."""
    import pyarrow as pa

    name, _, field = column.partition(".")
    if name not in schema.names:
        return None
    kind = schema.field(name).type
    if not field:
        return kind
    return kind.field(field).type if pa.types.is_struct(kind) and kind.get_field_index(field) >= 0 else None


def _check_types(path: str, schema: Any, columns: Collection[str], *, text_only: Collection[str]) -> None:
    import pyarrow as pa

    for column in text_only:
        kind: Any = _field_type(schema, column)
        if kind is not None and (pa.types.is_temporal(kind) or pa.types.is_decimal(kind)):
            raise TaskError(
                f"{path}: the column {column} is of type {kind}, whose values can be written in several ways, so exact match "
                "cannot compare them: store them as text, or set reward.function"
            )
    for column in columns:
        try:
            _read_as(_field_type(schema, column))
        except DataError as exc:
            raise TaskError(f"{path}: the column {column} has the type {exc}, which is not read: store it as text") from exc


def _plain(column: Any) -> Any:
    """The array with types whose Python values are JSON values, or bytes."""
    first, then = _read_as(column.type), _read_as(column.type, narrow_floats="float64")
    return column.cast(first).cast(then) if then != column.type else column


def _read_as(kind: Any, *, narrow_floats: str = "string") -> Any:
    """The type as which an Arrow type is read. DataError names one that is not.

    A float32 is read by way of its shortest text: 0.1 stays 0.1, not 0.10000000149011612.
    """
    import pyarrow as pa

    types: Any = pa.types
    inner = partial(_read_as, narrow_floats=narrow_floats)
    if types.is_struct(kind):
        return pa.struct([kind.field(place).with_type(inner(kind.field(place).type)) for place in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(inner(kind.key_type), inner(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_type))
    if types.is_dictionary(kind):
        return inner(kind.value_type)
    if types.is_float16(kind) or types.is_float32(kind):
        return getattr(pa, narrow_floats)()
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_time(kind) or types.is_decimal(kind):
        return pa.string()
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return pa.large_binary()
    if types.is_fixed_size_binary(kind) or types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return kind
    if types.is_null(kind) or types.is_boolean(kind) or types.is_integer(kind) or types.is_float64(kind):
        return kind
    raise DataError(str(kind))


def _decoded(value: Any, column: str, kind: Any) -> Any:
    """The value, which is of the Arrow type `kind`, with text in place of bytes, and a map as an object, also an empty one."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as exc:
            raise DataError(f"{column} holds bytes that are not UTF-8 text: {exc}") from None
    if isinstance(value, dict):
        return {key: _decoded(item, f"{column}.{key}", kind.field(key).type) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if hasattr(kind, "item_type"):  # a map, as pairs
        return {str(_decoded(key, column, kind.key_type)): _decoded(item, column, kind.item_type) for key, item in value}
    return [_decoded(item, column, kind.value_type) for item in value]

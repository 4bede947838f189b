"""What `DataProto` asks of columns when it takes them in: their kinds, their row counts, the offsets that they share."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError, UnknownNameError, nearest
from podium.protocol import jagged as jg

ObjectColumn: TypeAlias = NDArray[Any]
"""[B, ...]: a Python object per row, or numbers of numpy's own dtype."""
_KEPT_KINDS = frozenset("biufcmM")
"""Of numpy's dtypes, those that a column keeps: bools, numbers, and times."""


def array_column(rows: ObjectColumn | Sequence[Any]) -> ObjectColumn:
    """A numpy array [B, ...] of objects, numbers or times as it is, one of text with Python's strings; else `object_column`.

    Numbers in another byte order than this machine's are copied, for torch does not take them.
    """
    if type(rows) is np.ndarray and rows.ndim:
        if rows.dtype == object or rows.dtype.kind in _KEPT_KINDS:
            return rows if rows.dtype.isnative else rows.astype(rows.dtype.newbyteorder("="))
        if rows.dtype.kind in "US":
            return rows.astype(object)
    return object_column(rows)


def object_column(rows: ObjectColumn | Sequence[Any]) -> ObjectColumn:
    """One Python object per row as a 1-d object array, whatever the rows are (lists of equal length stay lists)."""
    if isinstance(rows, np.ndarray) and rows.dtype == object and rows.ndim == 1:
        return rows
    is_list = rows.ndim > 0 if isinstance(rows, np.ndarray) else isinstance(rows, Sequence)
    if isinstance(rows, str | bytes | Mapping) or not is_list:
        raise DataError(f"an object column must be a list or an array of one object per row, got {type(rows).__name__} {rows!r}")
    if isinstance(rows, np.ndarray) and rows.dtype.kind in "US":
        rows = rows.tolist()  # Python's own strings
    return np.fromiter(rows, dtype=object, count=len(rows))


def array_columns(table: Mapping[str, ObjectColumn | Sequence[Any]]) -> dict[str, ObjectColumn]:
    """Each as an `array_column`. DataError names one that cannot be."""
    columns = {}
    for key, rows in table.items():
        try:
            columns[key] = array_column(rows)
        except DataError as exc:
            raise DataError(f"column {key!r}: {exc}") from exc
    return columns


def is_even(batch: Mapping[str, Tensor]) -> bool:
    """Whether there are columns, and all are plain dense ones of one row count, as in most batches: nothing is left to check."""
    counts = {
        column.shape[0]
        if type(column) is Tensor and column.layout is torch.strided and not column.is_nested and column.ndim
        else -1
        for column in batch.values()
    }
    return len(counts) == 1 and -1 not in counts


def intern_offsets(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same columns; jagged ones of equal lengths share one offsets tensor, so that they can be multiplied.

    All offsets become int64: torch makes jagged tensors of int32 ones too. DataError for a column that is not a tensor, and where
    the offsets of one do not cover its values.
    """
    columns = dict(batch)
    known: list[Tensor] = []
    widened: dict[int, Tensor] = {}
    for key, column in batch.items():
        if not isinstance(column, Tensor):
            raise DataError(
                f"tensor column {key!r} is of type {type(column).__name__}: make it a tensor, or put it into non_tensor_batch"
            )
        if jg.is_jagged(column):
            values, offsets = jg.parts(column)
            first = 0 if any(seen is offsets for seen in known) else int(offsets[0])
            _check_cover(key, values, int(offsets[-1]), first)
            known.append(offsets)
            if offsets.dtype is not torch.int64:
                columns[key] = jg.like(column, values, widened.setdefault(id(offsets), offsets.to(torch.int64)))
    return jg.interned(columns)


def _check_cover(key: str, values: Tensor, end: int, start: int) -> None:
    if start != 0 or end != len(values):
        raise DataError(f"jagged column {key!r} has {len(values)} values, but its offsets cover {start}..{end}")


def joined_dtype(dtypes: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype of joined arrays: their own, or numpy's common one. Object where there is none, or where one is object."""
    distinct = list(dict.fromkeys(dtypes))
    kinds = {dtype.kind for dtype in distinct}
    if len(kinds) > 1 and kinds & {"m", "M"}:  # numpy takes numbers for durations, and durations for dates
        return np.dtype(object)
    try:
        return np.result_type(*distinct)
    except TypeError:  # months and days
        return np.dtype(object)


def as_dtype(key: str, column: ObjectColumn, dtype: np.dtype[Any]) -> ObjectColumn:
    """The column in a `joined_dtype`. DataError for an int or a time that it does not hold exactly."""
    if column.dtype == dtype:
        return column
    if dtype.kind == "O":
        return object_column(column)
    wider = column.astype(dtype)
    changed = column[~_is_kept(column, wider)]
    if changed.size:
        raise DataError(
            f"concat: column {key!r} is {column.dtype} in one part and of another dtype elsewhere, and {changed.flat[0]} is not "
            f"exact as {dtype}: let all parts have one dtype"
        )
    return wider


def _is_kept(column: ObjectColumn, wider: ObjectColumn) -> NDArray[np.bool_]:
    """Which numbers, of the column's shape, a `joined_dtype` holds: ints may be no floats, and times out of its range."""
    is_kept: NDArray[np.bool_] = np.ones(column.shape, dtype=bool)
    if column.dtype.kind in "mM":
        is_kept = (wider.astype(column.dtype) == column) | np.isnat(column)
    if column.dtype.kind in "iu" and wider.dtype.kind in "fc":
        with np.errstate(invalid="ignore"):
            back = wider.real.astype(column.dtype)  # beyond its range some processors give the largest int
        is_kept = (back == column) & (wider.real < float(np.iinfo(column.dtype).max + 1))
    return is_kept


def joined_arrays(key: str, columns: Sequence[ObjectColumn]) -> ObjectColumn:
    """The rows of all parts of a column in order, in their `joined_dtype`; parts without rows do not decide it.

    DataError where rows of numbers differ in shape.
    """
    columns = [column for column in columns if len(column)] or columns[:1]
    dtype = joined_dtype(column.dtype for column in columns)
    columns = [as_dtype(key, column, dtype) for column in columns]
    shapes = {column.shape[1:] for column in columns}
    if len(shapes) > 1:
        columns = list(map(object_column, columns)) if dtype.kind == "O" else refuse_shapes(key, shapes)
    return np.concatenate(columns)


def refuse_shapes(key: str, shapes: Iterable[tuple[int, ...]]) -> NoReturn:
    """DataError for parts of a numpy column whose rows differ in shape."""
    raise DataError(f"concat: rows of column {key!r} have different shapes: {sorted(shapes)}; make it objects, by object_column")


def check_row_counts(batch: Mapping[str, Tensor], objects: Mapping[str, ObjectColumn]) -> None:
    """DataError when columns disagree on the row count or have one name, or a tensor has no rows or cannot be cut into them."""
    head: tuple[str, int] | None = None
    for key, column in batch.items():
        if not jg.is_jagged(column):  # which has both; asking a nested tensor would cost as much as a view of it
            if not column.ndim:
                raise DataError(f"tensor column {key!r} has no row dimension; a value of the whole batch belongs in meta_info")
            check_layout(key, column)
        head = _same_count(head, key, jg.num_rows(column))
    for key, rows in objects.items():
        if key in batch:
            raise DataError(f"column {key!r} is both a tensor column and an object column: give one of them another name")
        head = _same_count(head, key, len(rows))


def check_layout(key: str, column: Tensor) -> None:
    """DataError for a layout, such as a sparse one, of which rows cannot be cut."""
    if column.layout is not torch.strided and not jg.is_jagged(column):
        raise DataError(
            f"tensor column {key!r} has layout {column.layout}, of which rows cannot be cut: use .to_dense(), a jagged column, "
            "or put it into meta_info, whole"
        )


def _same_count(head: tuple[str, int] | None, key: str, count: int) -> tuple[str, int]:
    if head is not None and count != head[1]:
        raise DataError(f"column {key!r} has {count} rows, but {head[0]!r} has {head[1]}")
    return head or (key, count)


def whole_number(what: str, value: SupportsIndex) -> int:
    """The number, of Python, numpy or torch. DataError for any other value, which `what` names."""
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool | np.bool_) and getattr(value, "dtype", None) is not torch.bool:
            return operator.index(value)
    except TypeError:
        pass
    raise DataError(f"{what} must be a whole number, got {value!r}")


def names(keys: Iterable[str]) -> list[str]:
    """The names as a list. DataError for a string, whose letters would be taken for names."""
    if isinstance(keys, str):
        raise DataError(f"names must be a list, got the string {keys!r}; write [{keys!r}]")
    return list(keys)


def pick(kind: str, table: Mapping[str, Any], keys: Iterable[str] | None) -> dict[str, Any]:
    """The named entries, in that order; None is all. DataError names an unknown one and the nearest that there is."""
    if keys is None:
        return dict(table)
    picked = {}
    for key in names(keys):
        if key not in table:
            raise UnknownNameError(f"no {kind} {key!r}{nearest(key, table)}; there are: {', '.join(table) or 'none'}")
        picked[key] = table[key]
    return picked


def renamed(
    batch: Mapping[str, Tensor], objects: Iterable[str], old_keys: str | Sequence[str], new_keys: str | Sequence[str]
) -> dict[str, Tensor]:
    """The columns in their order, some under other names. DataError when two would have one name, or one would have two.

    `objects` are the names of the object columns, which no tensor column may take.
    """
    old, new = ([keys] if isinstance(keys, str) else list(keys) for keys in (old_keys, new_keys))
    if len(old) != len(new):
        raise DataError(f"rename needs as many new names as old ones, got {len(old)} and {len(new)}: {old} to {new}")
    pick("tensor column", batch, old)
    changed = dict(zip(old, new, strict=True))
    if len(changed) < len(old):
        raise DataError(f"rename names a column twice: {old} to {new}; a column gets one new name")
    after = [changed.get(key, key) for key in batch]
    for key, name in changed.items():
        if after.count(name) > 1:
            raise DataError(f"tensor column {name!r} exists already; pop it before renaming {key!r}")
        if name in objects:
            raise DataError(f"object column {name!r} exists already; pop it before renaming {key!r}")
    return dict(zip(after, batch.values(), strict=True))


def as_objects(column: Tensor | ObjectColumn) -> ObjectColumn:
    """One Python object per row of any column: numbers of a [B] tensor, tensors (views) of any other; numpy's of an array."""
    if not isinstance(column, Tensor):
        return object_column(column)
    if not jg.is_jagged(column) and column.dim() == 1:
        return object_column(column.tolist())
    return object_column([jg.row_of(column, row) for row in range(jg.num_rows(column))])

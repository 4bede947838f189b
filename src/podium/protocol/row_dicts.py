"""Rows as dicts: one row of a batch (`DataProtoItem`), and columns made of dicts whose keys may differ.

What kind of column a key becomes is decided by its values and never by how long they happen to be: tensors of one dim or more
become jagged even when all are equally long. Two workers' batches, joined with `missing="none"`, give what one worker would have
made of all the rows: ints (int64) and floats (float64) become float64 there, too. `joined_numbers` finds the type, here and in
`concat`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.columns import ObjectColumn, object_column, pick

_NUMBERS = (bool, int, float, np.bool_, np.number)
_INT64 = range(-(2**63), 2**63)
_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = frozenset([*_INTS, "bool", "float16", "float32", "float64", "complex64", "complex128"])
"""What numpy and torch both have, by numpy's names."""


@dataclass(frozen=True)
class DataProtoItem:
    """One row of a `DataProto`: views of its tensors (a jagged column's row without padding), its objects, a copy of the meta."""

    batch: dict[str, Tensor]
    non_tensor_batch: dict[str, Any]
    meta_info: dict[str, Any]


def item(batch: Mapping[str, Tensor], objects: Mapping[str, ObjectColumn], meta: dict[str, Any], row: int) -> DataProtoItem:
    """The row of that number."""
    tensors = {key: jg.row_of(column, row) for key, column in batch.items()}
    return DataProtoItem(tensors, {key: rows[row] for key, rows in objects.items()}, meta)


def columns_of(rows: Sequence[Mapping[str, Any]], dense: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, ObjectColumn]]:
    """Tensor and object columns of the rows; their keys are those of any row, in the order in which they first appear."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is a {type(row).__name__}, not a dict: {row!r}")
    if rows and not any(rows):
        raise DataError(
            f"none of the {len(rows)} rows has a key, and columns count the rows: give each a value at least, as an id"
        )
    stacked = dict(pick("column", {key: None for row in rows for key in row}, dense if rows else ()))
    tensors: dict[str, Tensor] = {}
    objects: dict[str, ObjectColumn] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        column = _column(key, values, key in stacked)
        if isinstance(column, Tensor):
            tensors[key] = column
        else:
            objects[key] = column
    return tensors, objects


def joined_numbers(values: Sequence[Any]) -> NDArray[Any] | None:
    """[B] the numbers as one array; None where they are of no one kind, as bools and ints, or no type of torch holds them all.

    Numbers of one type keep it. Others get the one that numpy finds for them (int16 for int8 and int16, float64 for ints and
    floats); but ints for which numpy finds a float, as uint64 beside int64, get int64. None where that would change a number.
    """
    kinds = set(map(type, values))
    are_bools = {issubclass(kind, bool | np.bool_) for kind in kinds}
    has_ints = any(issubclass(kind, int) for kind in kinds)
    if len(are_bools) > 1 or (has_ints and any(isinstance(value, int) and value not in _INT64 for value in values)):
        return None
    array = np.asarray(values)
    if array.dtype.name not in _DTYPES:
        return None
    if array.dtype.kind not in "fc" or not (has_ints or any(issubclass(kind, np.integer) for kind in kinds)):
        return array
    ints = [(row, int(value)) for row, value in enumerate(values) if isinstance(value, int | np.integer)]
    if len(ints) == len(values) > 0:  # uint64 beside others
        return np.array([value for _, value in ints]) if all(value in _INT64 for _, value in ints) else None
    return array if all(array[row].item() == value for row, value in ints) else None  # numpy would compare rounded values


def _column(key: str, values: Sequence[Any], stack: bool) -> Tensor | ObjectColumn:
    if all(isinstance(value, Tensor) for value in values):
        return _of_tensors(key, values, stack)
    numbers = joined_numbers(values) if all(isinstance(value, _NUMBERS) for value in values) else None
    if numbers is not None:
        return torch.from_numpy(numbers)
    if stack:
        row = next((number for number, value in enumerate(values) if not isinstance(value, Tensor)), 0)
        raise DataError(f"column {key!r} is to be stacked, but is {values[row]!r} in row {row}")
    return object_column(values)


def _of_tensors(key: str, values: Sequence[Tensor], stack: bool) -> Tensor:
    for number, value in enumerate(values):
        _check_plain(key, number, value, values[0])
    if not stack and values[0].dim():
        try:
            return jg.jagged_from_rows(values)
        except DataError as exc:
            raise DataError(f"column {key!r}: {exc}; make it objects, or one shape") from exc
    for number, value in enumerate(values):
        if value.dtype != values[0].dtype or value.shape != values[0].shape:
            raise DataError(
                f"column {key!r}: row {number} is {value.dtype}{list(value.shape)}, but row 0 is "
                f"{values[0].dtype}{list(values[0].shape)}"
            )
    return torch.stack(list(values))


def _check_plain(key: str, number: int, value: Tensor, first: Tensor) -> None:
    """DataError for a tensor that cannot be joined with those of other rows."""
    if jg.is_jagged(value):
        raise DataError(
            f"column {key!r}: row {number} is a nested tensor, but a row has a dense one: give its values and its lengths as "
            "two keys, or list(value.unbind()), which stays an object"
        )
    if value.layout is not torch.strided:
        raise DataError(
            f"column {key!r}: row {number} has layout {value.layout}, and cannot be joined with others: use .to_dense()"
        )
    if value.device != first.device:
        raise DataError(
            f"column {key!r}: row {number} is on {value.device}, but row 0 is on {first.device}: move them to one device"
        )

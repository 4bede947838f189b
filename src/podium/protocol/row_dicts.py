"""Rows as dicts: one row of a batch (`DataProtoItem`), and columns made of dicts whose keys may differ.

What kind of column a key becomes is decided by its values and never by chance agreement: tensors of one dim or more become
jagged even when all are equally long, so that two workers' batches always fit each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.columns import ObjectColumn, object_column, pick

_NUMBERS = (bool, int, float, np.bool_, np.number)
_INT64 = range(-(2**63), 2**63)


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


def _column(key: str, values: Sequence[Any], stack: bool) -> Tensor | ObjectColumn:
    if all(isinstance(value, Tensor) for value in values):
        return _of_tensors(key, values, stack)
    if all(isinstance(value, _NUMBERS) for value in values):
        return _of_numbers(values)
    if stack:
        row = next(number for number, value in enumerate(values) if not isinstance(value, Tensor))
        raise DataError(f"column {key!r} is to be stacked, but is {values[row]!r} in row {row}")
    return object_column(values)


def _of_tensors(key: str, values: Sequence[Tensor], stack: bool) -> Tensor:
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


def _of_numbers(values: Sequence[Any]) -> Tensor | ObjectColumn:
    """Numbers keep their type: bool, int64, float64 (also where ints and floats mix), or numpy's own. Others stay objects."""
    are_bools = {isinstance(value, bool | np.bool_) for value in values}
    if len(are_bools) > 1 or any(type(value) is int and value not in _INT64 for value in values):
        return object_column(values)
    return torch.from_numpy(np.asarray(values))

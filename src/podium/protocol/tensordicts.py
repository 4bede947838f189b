"""To and from tensordict's `TensorDict`. This module is imported when a caller has a TensorDict or asks for one, not before.

    tensor, jagged nested tensor <-> tensor column; NonTensorStack <-> object column; NonTensorData <-> meta value

A numpy column of numbers is a stack of numpy's own; its dtype travels beside it, in a `NonTensorData` under `ARRAYS_KEY`.
No row operation goes through tensordict's own: they differ between its versions, fail on some batches, and part the offsets
that jagged columns share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from podium.errors import DataError
from podium.protocol.columns import ObjectColumn
from podium.protocol.meta import copy_meta

Tables: TypeAlias = tuple[dict[str, Tensor], dict[str, ObjectColumn | Sequence[Any]], dict[str, Any]]
ARRAYS_KEY = "_podium_arrays"
"""An entry of a TensorDict: by name, numpy's dtype and the shape of a row, for columns that do not hold plain objects."""


def num_rows(data: TensorDict) -> int:
    """B. DataError for a batch of more than one dim; one of no dims has no rows, and may hold values of the whole batch only."""
    if data.batch_dims > 1:
        raise DataError(f"rows need a batch size of one dim, this TensorDict has {tuple(data.batch_size)}; flatten it first")
    return data.batch_size[0] if data.batch_dims else 0


def column_names(data: TensorDict) -> set[str]:
    """The names of its columns: of all entries but the `NonTensorData`, which are meta."""
    return {key for key, value in data.items() if not isinstance(value, NonTensorData)}


def take_apart(data: TensorDict) -> Tables:
    """Tensor columns, object columns and meta of a TensorDict; storage is shared, the meta is copied."""
    num_rows(data)
    tensors: dict[str, Tensor] = {}
    objects: dict[str, ObjectColumn | Sequence[Any]] = {}
    meta: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, NonTensorData):
            meta[key] = value.data
        elif isinstance(value, NonTensorStack):
            objects[key] = value.tolist()
        elif isinstance(value, Tensor):
            tensors[key] = value
        else:
            raise DataError(f"entry {key!r} of the TensorDict is a {type(value).__name__}; rows hold no nested ones, flatten it")
    for key, (dtype, row_shape) in meta.pop(ARRAYS_KEY, {}).items():
        if key in objects:
            objects[key] = _array_of(list(objects[key]), np.dtype(dtype), row_shape)
    if not data.batch_dims and (tensors or objects):
        raise DataError(f"entry {next(iter(tensors | objects))!r} has no rows: the batch size is (); make it batch_size=[B]")
    return tensors, objects, copy_meta(meta)


def _array_of(rows: Sequence[Any], dtype: np.dtype[Any], row_shape: tuple[int, ...]) -> ObjectColumn | Sequence[Any]:
    """The rows as the array that they were; as they are where others have been put in their place."""
    if any(getattr(row, "dtype", None) != dtype or row.shape != row_shape for row in rows):
        return rows
    array: ObjectColumn = np.array(rows, dtype).reshape(len(rows), *row_shape)
    return array


def put_together(
    rows: int, tensors: Mapping[str, Tensor], objects: Mapping[str, ObjectColumn], meta: Mapping[str, Any]
) -> TensorDict:
    """A TensorDict of batch size [rows], or [] where there is no column; storage is shared, the meta is copied."""
    doubled = sorted((tensors.keys() & objects.keys()) | ((tensors.keys() | objects.keys()) & meta.keys()))
    if doubled:
        raise DataError(f"a TensorDict has one entry of a name; {doubled} name two of: tensor column, object column, meta key")
    arrays = {key: (rows.dtype.str, rows.shape[1:]) for key, rows in objects.items() if rows.dtype != object or rows.ndim > 1}
    entries = copy_meta(meta) | ({ARRAYS_KEY: arrays} if arrays else {})
    values = {key: NonTensorData(value) for key, value in entries.items()}
    data = TensorDict({**tensors, **values}, batch_size=[rows] if tensors or objects else [])
    for key, column in objects.items():
        set_entry(data, key, NonTensorStack(*map(NonTensorData, column)))
    return data


def set_entry(data: TensorDict, key: str, value: Any) -> None:
    """Set an entry that fits, in place: `set` of tensordict 0.10 fails on a stack of no rows, for its checks look into a row."""
    data._set_str(key, value, inplace=False, validated=True, non_blocking=False)

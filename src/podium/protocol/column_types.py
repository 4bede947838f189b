"""Column types: what the driver knows of a remote column: its dtype, the shape of its rows, and its size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.arrays import dtype_of, tensor_bytes
from podium.protocol.columns import ObjectColumn, joined_dtype, refuse_shapes
from podium.protocol.data_proto import DataProto

SAMPLED_ROWS = 64
"""The size of a column of objects is estimated from this many of them."""


@dataclass(frozen=True)
class ColumnType:
    """The type of a column."""

    dtype: str
    """Torch's name of the dtype; empty for a numpy column."""
    row_shape: tuple[int, ...] = ()
    """The shape of a row of a dense column or a numpy array, or of a value of a jagged one."""
    ragged_dim: int = 0
    """The dim of the column that is ragged; 0 for a dense column."""
    array_dtype: str = ""
    """Numpy's name of the dtype of a column that is a numpy array; empty for one of tensors."""
    object_bytes: int = field(default=0, compare=False)
    """The estimated bytes of a row of a numpy column."""

    @classmethod
    def of(cls, column: Tensor | ObjectColumn) -> ColumnType:
        if isinstance(column, np.ndarray):
            size = -(-about_bytes(column) // max(1, len(column)))
            return cls("", column.shape[1:], array_dtype=column.dtype.str, object_bytes=size)
        name = str(column.dtype).removeprefix("torch.")
        if jg.is_jagged(column):
            return cls(name, tuple(jg.parts(column)[0].shape[1:]), jg.ragged_dim(column))
        return cls(name, tuple(column.shape[1:]))

    @property
    def is_object(self) -> bool:
        return not self.dtype

    @property
    def value_bytes(self) -> int:
        """Bytes of a row of a dense column, or of a value of a jagged one; of objects, an estimate."""
        if self.is_object:
            return self.object_bytes
        return int(np.prod(self.row_shape, dtype=np.int64)) * dtype_of(self.dtype).itemsize

    def empty(self) -> Tensor | ObjectColumn:
        """A column of this type without rows."""
        if self.is_object:
            return np.empty((0, *self.row_shape), self.array_dtype)
        values = torch.empty((0, *self.row_shape), dtype=dtype_of(self.dtype))
        return jg.jagged(values, torch.zeros(1, dtype=torch.int64), self.ragged_dim) if self.ragged_dim else values

    def __str__(self) -> str:
        if self.is_object:
            return "objects" if self.array_dtype == "|O" else f"numpy {np.dtype(self.array_dtype)}"
        shape: list[int | str] = list(self.row_shape)
        if self.ragged_dim:
            shape.insert(self.ragged_dim - 1, "*")
        return f"{self.dtype}[{', '.join(['B', *map(str, shape)])}]"


def joined_type(key: str, types: Sequence[ColumnType]) -> ColumnType:
    """The type of the column that joins parts of these types. DataError if they cannot be joined.

    Arrays have the dtype of `joined_dtype` and are as large as the largest part's.
    """
    if all(one.is_object for one in types):
        dtype = joined_dtype(np.dtype(one.array_dtype) for one in types)
        shapes = {one.row_shape for one in types}
        if len(shapes) > 1 and dtype.kind != "O":
            refuse_shapes(key, shapes)
        size = max(one.object_bytes for one in types)
        return ColumnType("", shapes.pop() if len(shapes) == 1 else (), array_dtype=dtype.str, object_bytes=size)
    if len(set(types)) > 1:
        if len({(one.dtype, one.ragged_dim) for one in types}) == 1 and not types[0].ragged_dim:
            shapes = {one.row_shape for one in types}
            raise DataError(f"concat: rows of column {key!r} have different shapes: {sorted(shapes)}; make it jagged")
        raise DataError(f"concat: column {key!r} differs between parts: {', '.join(map(str, types))}")
    return types[0]


def bytes_of_columns(rows: DataProto) -> dict[str, int]:
    """The bytes of each column; of objects, an estimate."""
    tensors = {key: tensor_bytes(column) for key, column in rows.batch.items()}
    return tensors | {key: about_bytes(column) for key, column in rows.non_tensor_batch.items()}


def about_bytes(column: ObjectColumn) -> int:
    """The bytes of a numpy column; of objects, an estimate from `SAMPLED_ROWS` of them."""
    if isinstance(column, np.ndarray) and column.dtype != object:
        return column.nbytes
    step = max(1, len(column) // SAMPLED_ROWS)
    return step * sum(_object_bytes(value) for value in column[::step])


def _object_bytes(value: Any, depth: int = 3) -> int:
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, DataProto):
        return sum(bytes_of_columns(value).values())
    if depth and is_dataclass(value) and not isinstance(value, type):
        return sum(_object_bytes(getattr(value, part.name, None), depth - 1) for part in fields(value))
    if depth and isinstance(value, list | tuple | set):
        return sum(_object_bytes(item, depth - 1) for item in value)
    if depth and isinstance(value, Mapping):
        return sum(_object_bytes(key, depth - 1) + _object_bytes(item, depth - 1) for key, item in value.items())
    return 8

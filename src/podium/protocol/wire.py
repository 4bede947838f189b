"""How columns are pickled: as records of Python's own types, which any process can read, whatever its settings are.

A tensor becomes (dtype, shape, data). The data of a small tensor is `bytes` inside the message. The data of a large one is a
`PickleBuffer`, which a transport with out-of-band buffers (Ray's object store) copies once and pickle does not copy. Jagged
columns that share offsets still share them in the receiver. A received tensor is private and writable: read-only data is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.arrays import array_of, read_as
from podium.protocol.columns import check_layout

WIRE_VERSION = 4
IN_BAND_BYTES = 4096
"""Tensors up to this size are bytes in the message: there, a copy costs less than a transport needs for a buffer."""

Data: TypeAlias = bytes | memoryview | PickleBuffer
"""Elements in C order: bytes in the message, a buffer beside it, or what a transport gives back for one."""
TensorRecord: TypeAlias = tuple[str, tuple[int, ...], Data]
"""Torch's name of the dtype, the shape, and the elements."""
ColumnRecord: TypeAlias = tuple[str, TensorRecord, int | None, int]
"""The column's name, its tensor (a jagged one's values), the index of its offsets (None: dense), its ragged dim."""
ArrayRecord: TypeAlias = tuple[str, tuple[int, ...], Data | list[Any]]
"""Numpy's name of the dtype, the shape, and the elements of a numpy column; "O" and a list of those of an array of objects."""
Packed: TypeAlias = tuple[int, Sequence[ColumnRecord], Sequence[TensorRecord]]
"""The wire's version, the columns in order, and the offsets that jagged columns share."""


def pack(batch: Mapping[str, Tensor], *, buffers: bool) -> Packed:
    """The columns of a batch as records. With `buffers` (pickle protocol 5), large contiguous columns are not copied.

    DataError for layouts of which rows cannot be cut.
    """
    places: dict[int, int] = {}
    offsets: list[TensorRecord] = []
    columns: list[ColumnRecord] = []
    for key, column in batch.items():
        if not jg.is_jagged(column):
            check_layout(key, column)
            columns.append((key, _record(column, buffers), None, 0))
            continue
        values, own = jg.parts(column)
        if id(own) not in places:
            places[id(own)] = len(offsets)
            offsets.append(_record(own, buffers))
        columns.append((key, _record(values, buffers), places[id(own)], jg.ragged_dim(column)))
    return WIRE_VERSION, columns, offsets


def unpack(packed: Packed) -> dict[str, Tensor]:
    """The columns of records, on the CPU, private and writable.

    DataError for records of another version, and for a dtype that this version of torch does not have.
    """
    version, columns, records = packed
    if version != WIRE_VERSION:
        raise DataError(f"a batch of wire version {version} arrived, this process reads {WIRE_VERSION}; run one version")
    offsets = list(map(_tensor, records))
    return {
        key: _tensor(record) if number is None else jg.jagged(_tensor(record), offsets[number], ragged_dim)
        for key, record, number, ragged_dim in columns
    }


def pack_array(column: NDArray[Any], *, buffers: bool) -> ArrayRecord:
    """A numpy column [B, ...] as a record. With `buffers` (pickle protocol 5), a large one is not copied."""
    if column.dtype == object:
        return "O", column.shape, column.ravel().tolist()
    if buffers and column.nbytes > IN_BAND_BYTES:
        return column.dtype.str, column.shape, PickleBuffer(np.ascontiguousarray(column).view(np.uint8).data)
    return column.dtype.str, column.shape, column.tobytes()


def unpack_array(record: ArrayRecord) -> NDArray[Any]:
    """The numpy column of a record, private and writable."""
    name, shape, data = record
    if isinstance(data, list):
        return np.fromiter(data, dtype=object, count=len(data)).reshape(shape)
    return _writable(shape, np.dtype(name), data)


def _record(tensor: Tensor, buffers: bool) -> TensorRecord:
    name, array = array_of(tensor)
    if buffers and array.nbytes > IN_BAND_BYTES:
        return name, array.shape, PickleBuffer(np.ascontiguousarray(array).data)
    return name, array.shape, array.tobytes()


def _tensor(record: TensorRecord) -> Tensor:
    name, shape, data = record
    carrier, dtype = read_as(name)
    tensor = torch.from_numpy(_writable(shape, carrier, data))
    return tensor if dtype is None else tensor.view(dtype)


def _writable(shape: tuple[int, ...], dtype: np.dtype[Any], data: Data) -> NDArray[Any]:
    array: NDArray[Any] = np.ndarray(shape, dtype, bytearray(data) if type(data) is bytes else data)  # type: ignore[arg-type]
    return array if array.flags.writeable else array.copy()

"""How tensors travel: records of Python's own types that say what they hold, whatever the settings of the process that reads.

A tensor becomes (dtype, shape, data). Small ones are `bytes` inside the message, which costs a tiny batch next to nothing;
larger ones are `PickleBuffer`s, which a transport that honours out-of-band buffers (Ray's object store) copies once and pickle
not at all. Jagged columns that share offsets still share them on the other side. A received tensor is private and writable:
read-only data is copied, for torch cannot protect it; or, inside `as_shared`, it is a guarded view of the data. Records can be
joined as they are, small ones without a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol import memory
from podium.protocol.arrays import Arrays, NamedArray, array_of, read_as
from podium.protocol.guard import shared, tensor_over

WIRE_VERSION = 4
IN_BAND_BYTES = 4096
"""Tensors up to this size are bytes in the message: up to about here a copy costs less than a transport's care of a buffer."""

Data: TypeAlias = bytes | memoryview | PickleBuffer
"""Elements in C order: bytes in the message, a buffer beside it, or what a transport gives back for one."""
TensorRecord: TypeAlias = tuple[str, tuple[int, ...], Data]
"""Torch's name of the dtype, the shape, and the elements."""
ColumnRecord: TypeAlias = tuple[str, TensorRecord, int | None, int]
"""The column's name, its tensor (a jagged one's values), which of the batch's offsets it has (None: dense), its ragged dim."""
ArrayRecord: TypeAlias = tuple[str, tuple[int, ...], Data | list[Any]]
"""Numpy's name of the dtype, the shape, and the elements of a numpy column; "O" and a list of those of an array of objects."""
Packed: TypeAlias = tuple[int, Sequence[ColumnRecord], Sequence[TensorRecord]]
"""The wire's version, the columns in order, and the offsets that jagged columns share."""


def pack(arrays: Arrays, *, buffers: bool) -> Packed:
    """Columns to records. With `buffers` (pickle protocol 5), large contiguous ones are not copied."""
    columns = [(key, _record(named, buffers), number, ragged_dim) for key, named, number, ragged_dim in arrays.columns]
    return WIRE_VERSION, columns, [_record(named, buffers) for named in arrays.offsets]


def packed_if_small(arrays: Arrays) -> Packed | None:
    """Records that are whole in themselves; None where a tensor has more bytes than belong in a message."""
    if any(named[1].nbytes > IN_BAND_BYTES for _, named, _, _ in arrays.columns):
        return None
    return None if any(own.nbytes > IN_BAND_BYTES for _, own in arrays.offsets) else pack(arrays, buffers=False)


def repacked(packed: Packed, *, buffers: bool) -> Packed:
    """What has arrived, to travel on."""
    _, columns, offsets = packed
    again = [(key, _record_again(record, buffers), number, ragged_dim) for key, record, number, ragged_dim in columns]
    return WIRE_VERSION, again, [_record_again(record, buffers) for record in offsets]


def is_small(packed: Packed) -> bool:
    """Whether these are records as `packed_if_small` gives them."""
    return all(map(_is_in_band, _records(packed)))


def unpack(packed: Packed, *, is_shared: bool = False) -> dict[str, Tensor]:
    """Records to columns on the CPU, private and writable or, with `is_shared`, guarded views of what arrived."""
    _, columns, records = packed
    tensor_of = _shared_tensor if is_shared else _private_tensor
    offsets = [_private_tensor(record) for record in records]
    return {
        key: tensor_of(record) if number is None else jg.jagged(tensor_of(record), offsets[number], ragged_dim)
        for key, record, number, ragged_dim in columns
    }


def joined(parts: Sequence[Packed]) -> Packed | None:
    """The rows of all parts, in order, as records of new memory; None where the parts do not have the same columns in order."""
    if any(len(columns) != len(parts[0][1]) for _, columns, _ in parts):
        return None
    numbers: dict[tuple[int | None, ...], int] = {}
    made: list[ColumnRecord] = []
    for same in zip(*[columns for _, columns, _ in parts], strict=True):
        key, _, number, ragged_dim = same[0]
        if any((name, place is None, dim) != (key, number is None, ragged_dim) for name, _, place, dim in same):
            return None
        values = _joined([record for _, record, _, _ in same])
        if values is None:
            return None
        places = tuple([place for _, _, place, _ in same])
        own = None if number is None else numbers.setdefault(places, len(numbers))
        made.append((key, values, own, ragged_dim))
    return WIRE_VERSION, made, [_joined_offsets(parts, places) for places in numbers]


def is_private(packed: Packed) -> bool:
    """Whether nobody else can write to what arrived: it is in the message, or in memory that the reader was given to write to."""
    return all(type(data) is bytes or not memoryview(data).readonly for _, _, data in _records(packed))


def check_readable(packed: Packed) -> None:
    """DataError for records of another version than ours, and for a dtype that this version of torch does not have."""
    if packed[0] != WIRE_VERSION:
        raise DataError(f"a batch of wire version {packed[0]} arrived, this process reads {WIRE_VERSION}; run one version")
    for _, (name, _, _), _, _ in packed[1]:
        read_as(name)


def pack_array(column: NDArray[Any], *, buffers: bool) -> ArrayRecord:
    """A numpy column [B, ...] to a record; with `buffers` (pickle protocol 5), a large one is not copied."""
    if column.dtype == object:
        return "O", column.shape, column.ravel().tolist()
    if buffers and column.nbytes > IN_BAND_BYTES:
        return column.dtype.str, column.shape, PickleBuffer(np.ascontiguousarray(column).view(np.uint8).data)
    return column.dtype.str, column.shape, column.tobytes()


def unpack_array(record: ArrayRecord, *, is_shared: bool = False) -> NDArray[Any]:
    """The column of a record, private and writable, or with `is_shared` over the memory that arrived, which stays read-only."""
    name, shape, data = record
    if isinstance(data, list):
        return np.fromiter(data, dtype=object, count=len(data)).reshape(shape)
    array: NDArray[Any] = np.ndarray(shape, name, data)  # type: ignore[arg-type]  # any buffer will do
    return array if is_shared or array.flags.writeable else array.copy()


_reading = threading.local()


@contextmanager
def as_shared() -> Iterator[None]:
    """In this block, and thread, what is unpickled becomes guarded views: no large column is copied."""
    before = reads_shared()
    _reading.is_shared = True
    try:
        yield
    finally:
        _reading.is_shared = before


def reads_shared() -> bool:
    """Whether this is inside `as_shared`."""
    return getattr(_reading, "is_shared", False)


# A tiny batch is read and written in between other work, so most of its cost is code that is in no cache: here each call counts.


def _records(packed: Packed) -> list[TensorRecord]:
    _, columns, offsets = packed
    return [*[record for _, record, _, _ in columns], *offsets]


def _record(named: NamedArray, buffers: bool) -> TensorRecord:
    name, array = named
    if buffers and array.nbytes > IN_BAND_BYTES:
        return name, array.shape, PickleBuffer(np.ascontiguousarray(array).data)
    return name, array.shape, array.tobytes()


def _record_again(record: TensorRecord, buffers: bool) -> TensorRecord:
    name, shape, data = record
    if _is_in_band(record):
        return record
    return name, shape, PickleBuffer(data) if buffers else bytes(memoryview(data))


def _is_in_band(record: TensorRecord) -> bool:
    return type(record[2]) is bytes and len(record[2]) <= IN_BAND_BYTES


def _joined(records: Sequence[TensorRecord]) -> TensorRecord | None:
    name, (_, *row), _ = records[0]
    if any((other, list(shape[1:])) != (name, row) for other, shape, _ in records):
        return None
    shape = (sum([shape[0] for _, shape, _ in records]), *row)
    held = [data for _, _, data in records if type(data) is bytes]
    if len(held) == len(records):
        return name, shape, b"".join(held)
    return name, shape, array_of(memory.cat([_view(record) for record in records]))[1].data


def _joined_offsets(parts: Sequence[Packed], places: Sequence[int | None]) -> TensorRecord:
    own = [records[place] for (_, _, records), place in zip(parts, places, strict=True) if place is not None]
    return _record(array_of(jg.concat_offsets([_private_tensor(record) for record in own])), buffers=False)


def _private_tensor(record: TensorRecord) -> Tensor:
    name, shape, data = record
    carrier, dtype = read_as(name)
    array: NDArray[Any] = np.ndarray(shape, carrier, bytearray(data) if type(data) is bytes else data)  # type: ignore[arg-type]
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if dtype is None else tensor.view(dtype)


def _shared_tensor(record: TensorRecord) -> Tensor:
    return shared(_view(record))


def _view(record: TensorRecord) -> Tensor:
    """A tensor over the record's own memory, which nobody may write."""
    name, shape, data = record
    carrier, dtype = read_as(name)
    tensor = tensor_over(np.ndarray(shape, carrier, data))  # type: ignore[arg-type]  # any buffer will do
    return tensor if dtype is None else tensor.view(dtype)

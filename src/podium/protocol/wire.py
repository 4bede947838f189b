"""How tensors travel: records of Python's own types that say what they hold, whatever the settings of the process that reads.

A tensor becomes (dtype, shape, data). Small ones are `bytes` inside the message, which costs a tiny batch next to nothing;
larger ones are `PickleBuffer`s, which a transport that honours out-of-band buffers (Ray's object store) copies once and pickle
not at all. Jagged columns that share offsets still share them on the other side. A received tensor is private and writable:
read-only data is copied, for torch cannot protect it; or, `as_shared`, it is a guarded view of the data. Also here: equality
and description of columns, which need the same case analysis.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pickle import PickleBuffer
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.columns import check_layout
from podium.protocol.guard import shared, tensor_over, unguarded

WIRE_VERSION = 3
IN_BAND_BYTES = 4096
"""Tensors up to this size are bytes in the message: up to about here a copy costs less than a transport's care of a buffer."""
FEW = 8
"""Tensors of up to so many elements are shown whole in errors."""

TensorRecord: TypeAlias = tuple[str, tuple[int, ...], bytes | bytearray | PickleBuffer]
"""Torch's name of the dtype, the shape, and the elements in C order."""
ColumnRecord: TypeAlias = tuple[str, TensorRecord, int | None, int]
"""The column's name, its tensor (a jagged one's values), which of the batch's offsets it has (None: dense), its ragged dim."""
Packed: TypeAlias = tuple[int, Sequence[ColumnRecord], Sequence[TensorRecord]]
"""The wire's version, the columns in order, and the offsets that jagged columns share."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack(batch: Mapping[str, Tensor], *, buffers: bool) -> Packed:
    """Columns to records. With `buffers` (pickle protocol 5), large contiguous CPU tensors are not copied."""
    offsets: list[Tensor] = []
    columns: list[ColumnRecord] = []
    for key, column in batch.items():
        if not jg.is_jagged(column):
            check_layout(key, column)
            columns.append((key, _pack_tensor(column, buffers), None, 0))
        else:
            values, own = jg.parts(column)
            number = next((i for i, seen in enumerate(offsets) if seen is own), len(offsets))
            if number == len(offsets):
                offsets.append(own)
            columns.append((key, _pack_tensor(values, buffers), number, jg.ragged_dim(column)))
    return WIRE_VERSION, columns, [_pack_tensor(own, buffers) for own in offsets]


def pack_arrays(arrays: Mapping[str, tuple[str, NDArray[Any]]], *, buffers: bool) -> Packed:
    """`pack` of dense columns that are given as `array_of` has them."""
    return WIRE_VERSION, [(key, _record(name, array, buffers), None, 0) for key, (name, array) in arrays.items()], []


def unpack(packed: Packed) -> dict[str, Tensor]:
    """Records to columns on the CPU, private and writable or, inside `as_shared`, guarded views of what arrived."""
    check_version(packed)
    _, columns, records = packed
    tensor_of = _shared_tensor if reads_shared() else _private_tensor
    offsets = [_private_tensor(record) for record in records]
    return {
        key: tensor_of(record) if number is None else jg.jagged(tensor_of(record), offsets[number], ragged_dim)
        for key, record, number, ragged_dim in columns
    }


def check_version(packed: Packed) -> None:
    """DataError for records of another version than ours."""
    if packed[0] != WIRE_VERSION:
        raise DataError(f"a batch of wire version {packed[0]} arrived, this process reads {WIRE_VERSION}; run one version")


def agrees(packed: Packed) -> bool:
    """Whether what is packed are dense columns of one row count: then a batch of them has nothing to check."""
    _, columns, offsets = packed
    counts = {shape[:1] for _, (_, shape, _), _, _ in columns}
    return not offsets and len(counts) == 1 and () not in counts


def is_in_band(packed: Packed) -> bool:
    """Whether all that is packed is in the records themselves."""
    return all(type(data) is bytes for _, (_, _, data), _, _ in packed[1])


def joined(parts: Sequence[Packed]) -> Packed | None:
    """The records of the rows of all parts, in order: dense columns, in band; None where these differ in names or kinds."""
    columns: list[ColumnRecord] = []
    for same in zip(*(part[1] for part in parts), strict=False):
        key, (name, shape, _), _, _ = same[0]
        if any(column[0] != key or column[1][0] != name or column[1][1][1:] != shape[1:] for column in same):
            return None
        if not all(type(column[1][2]) is bytes for column in same):
            return None
        rows = sum([column[1][1][0] for column in same])
        columns.append((key, (name, (rows, *shape[1:]), bytearray().join([column[1][2] for column in same])), None, 0))
    return (WIRE_VERSION, columns, []) if all(len(part[1]) == len(columns) for part in parts) else None


_reading = threading.local()


def reads_shared() -> bool:
    """Whether this is inside `as_shared`."""
    return getattr(_reading, "is_shared", False)


@contextmanager
def as_shared() -> Iterator[None]:
    """In this block, and thread, tensors are unpacked as guarded views; whoever unpickles rows in it copies no large column."""
    before = reads_shared()
    _reading.is_shared = True
    try:
        yield
    finally:
        _reading.is_shared = before


# A tiny batch is read and written in between other work, so most of its cost is code that is in no cache: here each call counts.


def array_of(tensor: Tensor) -> tuple[str, NDArray[Any]]:
    """Torch's name of a dense tensor's dtype, and its elements; they are shared with a tensor on the CPU."""
    if type(tensor) is Tensor:
        try:  # numpy takes most as they are
            array = tensor.numpy()
        except (RuntimeError, TypeError):
            pass
        else:
            return _numpys_name(array.dtype.char), array
    name, carrier = _written_as(tensor.dtype)
    tensor = unguarded(tensor)
    bits = tensor if carrier is tensor.dtype else tensor.detach().resolve_conj().view(carrier)
    try:
        return name, bits.numpy()
    except (RuntimeError, TypeError):  # it is on a device, has a graph, or is a lazy conjugate: `force` is slower
        return name, bits.numpy(force=True)


def _pack_tensor(tensor: Tensor, buffers: bool) -> TensorRecord:
    return _record(*array_of(tensor), buffers)


def _record(name: str, array: NDArray[Any], buffers: bool) -> TensorRecord:
    if buffers and array.nbytes > IN_BAND_BYTES:
        return name, array.shape, PickleBuffer(np.ascontiguousarray(array).data)
    return name, array.shape, array.tobytes()


@cache
def _numpys_name(char: str) -> str:
    """The name of numpy's dtype, which is torch's too where both have it."""
    return np.dtype(char).name


def _private_tensor(record: TensorRecord) -> Tensor:
    name, shape, data = record
    carrier, dtype = _read_as(name)
    array: NDArray[Any] = np.ndarray(shape, carrier, bytearray(data) if type(data) is bytes else data)  # type: ignore[arg-type]
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor if dtype is None else tensor.view(dtype)


def _shared_tensor(record: TensorRecord) -> Tensor:
    name, shape, data = record
    carrier, dtype = _read_as(name)
    tensor = tensor_over(np.ndarray(shape, carrier, data))  # type: ignore[arg-type]
    return shared(tensor if dtype is None else tensor.view(dtype))


@cache
def _written_as(dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """A dtype's name, and the dtype of the same width as which numpy takes it: an integer one where numpy has none (bfloat16)."""
    try:
        torch.empty(0, dtype=dtype).numpy()
    except TypeError:
        return str(dtype).removeprefix("torch."), _INTEGERS[dtype.itemsize]
    return str(dtype).removeprefix("torch."), dtype


@cache
def _read_as(name: str) -> tuple[np.dtype[Any], torch.dtype | None]:
    """The numpy dtype that carries torch's dtype of this name, and torch's own where the two differ."""
    dtype = dtype_of(name)
    _, carrier = _written_as(dtype)
    return torch.empty(0, dtype=carrier).numpy().dtype, None if carrier is dtype else dtype


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of this name. DataError for one that this version of torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"a tensor of dtype {name!r} arrived, which torch {torch.__version__} does not have; run one version")
    return dtype


def equal(left: Any, right: Any) -> bool:
    """Typed equality: tensors and arrays by value, dtype and shape with NaN equal to NaN; containers item by item."""
    if left is right:
        return True
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and _tensors_equal(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and _arrays_equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and type(left) is type(right):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right) or (left != left and right != right)


def _tensors_equal(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or jg.is_jagged(left) != jg.is_jagged(right):
        return False
    if jg.is_jagged(left):
        return jg.ragged_dim(left) == jg.ragged_dim(right) and all(
            _tensors_equal(mine, theirs) for mine, theirs in zip(jg.parts(left), jg.parts(right), strict=True)
        )
    if left.shape != right.shape:
        return False
    return torch.equal(left, right) or (left.is_floating_point() and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True))


def _arrays_equal(left: NDArray[Any], right: NDArray[Any]) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(equal, left.flat, right.flat))
    return bool(np.array_equal(left, right, equal_nan=np.issubdtype(left.dtype, np.inexact)))


def describe(column: Tensor) -> str:
    """A column's kind for people: `int64[8, *]` for a jagged one, `float32[8, 3]` for a dense one."""
    name = str(column.dtype).removeprefix("torch.")
    shape: list[int | str]
    if not jg.is_jagged(column):
        shape = [*column.shape]
    else:
        shape = [jg.num_rows(column), *jg.parts(column)[0].shape[1:]]
        shape.insert(jg.ragged_dim(column), "*")
    return f"{name}[{', '.join(map(str, shape))}]"


def short(value: Any) -> str:
    """A value in an error: a small one as it is, of a large tensor its kind only."""
    if isinstance(value, Tensor):
        few = not jg.is_jagged(value) and value.numel() <= FEW
        return f"{describe(value)}{f' {value.tolist()}' if few else ''}" if value.dim() else str(value.item())
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."

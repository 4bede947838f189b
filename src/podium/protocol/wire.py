"""How tensors travel: self-describing records whose bytes pickle protocol 5 can carry out of band.

A tensor becomes (dtype, shape, bytes as a numpy array), so that any transport which honours out-of-band buffers (Ray's
object store) copies it once and not at all on the way through pickle. Jagged columns that share offsets still share them
on the other side. A received tensor is always private and writable: read-only buffers are copied, for torch cannot
protect them. Also here: equality and description of columns, which need the same case analysis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg

WIRE_VERSION = 1


@dataclass(frozen=True)
class PackedTensor:
    """`dtype` is torch's name for it, `data` is uint8 and holds the contiguous tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class Packed:
    """Columns in order: a dense one as (tensor, None), a jagged one as (values, number of its offsets)."""

    version: int
    columns: dict[str, tuple[PackedTensor, int | None]]
    offsets: list[PackedTensor]


def pack(batch: Mapping[str, Tensor]) -> Packed:
    """Columns to records; contiguous CPU tensors are not copied."""
    columns: dict[str, tuple[PackedTensor, int | None]] = {}
    offsets: list[Tensor] = []
    for key, column in batch.items():
        if not jg.is_jagged(column):
            columns[key] = (_pack_tensor(column), None)
            continue
        values, own = jg.parts(column)
        number = next((i for i, seen in enumerate(offsets) if seen is own), len(offsets))
        if number == len(offsets):
            offsets.append(own)
        columns[key] = (_pack_tensor(values), number)
    return Packed(WIRE_VERSION, columns, [_pack_tensor(o) for o in offsets])


def unpack(packed: Packed) -> dict[str, Tensor]:
    """Records to columns on the CPU, private and writable."""
    if packed.version != WIRE_VERSION:
        raise DataError(f"a batch of wire version {packed.version} arrived, this process reads {WIRE_VERSION}; run one version")
    offsets = [_unpack_tensor(record) for record in packed.offsets]
    return {
        key: _unpack_tensor(record) if number is None else jg.jagged(_unpack_tensor(record), offsets[number])
        for key, (record, number) in packed.columns.items()
    }


def _pack_tensor(tensor: Tensor) -> PackedTensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, dtype=np.uint8)
    return PackedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _unpack_tensor(packed: PackedTensor) -> Tensor:
    dtype: torch.dtype = getattr(torch, packed.dtype)
    if packed.data.size == 0:
        return torch.empty(packed.shape, dtype=dtype)
    data = packed.data if packed.data.flags.writeable else packed.data.copy()
    return torch.from_numpy(data).view(dtype).reshape(packed.shape)


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
        return all(_tensors_equal(mine, theirs) for mine, theirs in zip(jg.parts(left), jg.parts(right), strict=True))
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
    shape = [column.shape[0], "*", *column.values().shape[1:]] if jg.is_jagged(column) else list(column.shape)
    return f"{name}[{', '.join(map(str, shape))}]"

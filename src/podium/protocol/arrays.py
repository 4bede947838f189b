"""Tensor columns as numpy sees them: what is cut, packed and joined where no tensor is asked for.

On a tiny batch an operation of torch, whose code is in no cache by then, costs ten times numpy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol import memory
from podium.protocol.columns import check_layout
from podium.protocol.guard import unguarded

NamedArray: TypeAlias = tuple[str, NDArray[Any]]
"""Torch's name of a dtype, and elements of it: as integers of its width where numpy does not have it (bfloat16)."""
ColumnArray: TypeAlias = tuple[str, NamedArray, int | None, int]
"""A column's name, its elements (a jagged one's values, the ragged dim in front), which of the batch's offsets it has (None:
dense), its ragged dim."""


@dataclass(frozen=True)
class Arrays:
    """Columns of one row count. Those of tensors on the CPU share their memory."""

    columns: list[ColumnArray]
    offsets: list[NamedArray]
    """Those of jagged columns, which columns of equal lengths share."""

    def cut(self, start: int, stop: int) -> Arrays:
        """Rows [start, stop): elements as views, offsets anew, since they begin with 0."""
        edges = [(int(offsets[start]), int(offsets[stop])) for _, offsets in self.offsets]
        columns: list[ColumnArray] = []
        for key, (name, array), number, ragged_dim in self.columns:
            first, last = (start, stop) if number is None else edges[number]
            columns.append((key, (name, array[first:last]), number, ragged_dim))
        moved = [(name, one[start : stop + 1] - first) for (name, one), (first, _) in zip(self.offsets, edges, strict=True)]
        return Arrays(columns, moved) if len(moved) < 2 else _interned(columns, moved)


def _interned(columns: list[ColumnArray], offsets: list[NamedArray]) -> Arrays:
    """Of rows that were cut, columns may have come to have equal lengths."""
    kept: dict[bytes, int] = {}
    places = [kept.setdefault(own.tobytes(), len(kept)) for _, own in offsets]
    columns = [(key, named, None if number is None else places[number], dim) for key, named, number, dim in columns]
    return Arrays(columns, [offsets[places.index(place)] for place in kept.values()])


def plain_arrays(batch: Mapping[str, Tensor]) -> Arrays | None:
    """The columns of a batch that numpy takes as they are, without a graph, on the CPU, of one row count; None for any others."""
    if not all(type(column) is Tensor for column in batch.values()):
        return None
    try:
        arrays = {key: column.numpy() for key, column in batch.items()}
    except (RuntimeError, TypeError):
        return None
    counts = {array.shape[0] if array.ndim else -1 for array in arrays.values()}
    if len(counts) != 1 or -1 in counts:
        return None
    return Arrays([(key, (_numpys_name(array.dtype.char), array), None, 0) for key, array in arrays.items()], [])


def arrays_of(batch: Mapping[str, Tensor]) -> Arrays:
    """The columns of a batch. DataError for layouts of which rows cannot be cut."""
    offsets: list[Tensor] = []
    columns: list[ColumnArray] = []
    for key, column in batch.items():
        if not jg.is_jagged(column):
            check_layout(key, column)
            columns.append((key, array_of(column), None, 0))
            continue
        values, own = jg.parts(column)
        number = next((i for i, seen in enumerate(offsets) if seen is own), len(offsets))
        if number == len(offsets):
            offsets.append(own)
        columns.append((key, array_of(values), number, jg.ragged_dim(column)))
    return Arrays(columns, list(map(array_of, offsets)))


def array_of(tensor: Tensor) -> NamedArray:
    """A dense tensor's elements, of one on the CPU without a copy but for lazy conjugates and negatives."""
    if type(tensor) is Tensor:
        try:  # numpy takes most as they are
            array = tensor.numpy()
        except (RuntimeError, TypeError):
            pass
        else:
            return _numpys_name(array.dtype.char), array
    name, carrier = written_as(tensor.dtype)
    tensor = unguarded(tensor)
    bits = tensor if carrier is tensor.dtype else tensor.detach().resolve_conj().view(carrier)
    try:
        return name, bits.numpy()
    except (RuntimeError, TypeError):  # it is on a device, has a graph, or is a lazy conjugate: `force` is slower
        return name, bits.numpy(force=True)


def tensor_bytes(column: Tensor) -> int:
    """Bytes of the values of a tensor column."""
    values = jg.parts(column)[0] if jg.is_jagged(column) else column
    return values.numel() * values.itemsize


def shares_memory(column: Tensor) -> bool:
    """Whether the column's arrays are its own memory."""
    if jg.is_jagged(column):
        return all(map(shares_memory, jg.parts(column)))
    return column.is_cpu and not (column.requires_grad or column.is_conj() or column.is_neg())


@cache
def _numpys_name(char: str) -> str:
    """The name of numpy's dtype, which is torch's too where both have it."""
    return np.dtype(char).name


@cache
def written_as(dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """A dtype's name, and the dtype of the same width as which numpy takes it: an integer one where numpy has none (bfloat16)."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return str(dtype).removeprefix("torch."), memory.INTEGERS[dtype.itemsize]
    return str(dtype).removeprefix("torch."), dtype


@cache
def read_as(name: str) -> tuple[np.dtype[Any], torch.dtype | None]:
    """The numpy dtype that carries torch's dtype of this name, and torch's own where the two differ."""
    dtype = dtype_of(name)
    _, carrier = written_as(dtype)
    return torch.empty(0, dtype=carrier, device="cpu").numpy().dtype, None if carrier is dtype else dtype


def dtype_of(name: str) -> torch.dtype:
    """Torch's dtype of this name. DataError for one that this version of torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"a tensor of dtype {name!r} arrived, which torch {torch.__version__} does not have; run one version")
    return dtype

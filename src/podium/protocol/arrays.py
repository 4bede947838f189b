"""The elements of tensors as numpy arrays, and the names of dtypes: what pickling and files need.

Numpy does not have some of torch's dtypes (bfloat16, float8). Their elements are integers of the same width here.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol import memory

NamedArray: TypeAlias = tuple[str, NDArray[Any]]
"""Torch's name of a dtype, and elements of it."""


def array_of(tensor: Tensor) -> NamedArray:
    """The elements of a dense tensor. They share its memory if it is on the CPU and is not a lazy conjugate or negative."""
    name, carrier = written_as(tensor.dtype)
    bits = tensor if carrier is tensor.dtype else tensor.detach().resolve_conj().view(carrier)
    try:
        return name, bits.numpy()
    except (RuntimeError, TypeError):  # on a device, with a graph, or a lazy conjugate; `force` is slower
        return name, bits.numpy(force=True)


def tensor_bytes(column: Tensor) -> int:
    """Bytes of the values of a tensor column."""
    values = jg.parts(column)[0] if jg.is_jagged(column) else column
    return values.numel() * values.itemsize


@cache
def written_as(dtype: torch.dtype) -> tuple[str, torch.dtype]:
    """The name of a dtype, and the dtype that its elements have in numpy: an integer one where numpy does not have it."""
    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
    except TypeError:
        return str(dtype).removeprefix("torch."), memory.INTEGERS[dtype.itemsize]
    return str(dtype).removeprefix("torch."), dtype


@cache
def read_as(name: str) -> tuple[np.dtype[Any], torch.dtype | None]:
    """The numpy dtype of elements of this torch dtype, and the torch dtype itself where it differs from that."""
    dtype = dtype_of(name)
    _, carrier = written_as(dtype)
    return torch.empty(0, dtype=carrier, device="cpu").numpy().dtype, None if carrier is dtype else dtype


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name. DataError if this version of torch does not have it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"a tensor of dtype {name!r} arrived, which torch {torch.__version__} does not have; run one version")
    return dtype

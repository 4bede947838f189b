"""Memory for the large results of row operations. It comes from numpy, which asks the kernel for huge pages; torch does not.

In pages of 4 KiB a result of tens of megabytes takes three times as long as in pages of 2 MiB, since the first touch of a page
is most of the time. This is so on Linux if `/sys/kernel/mm/transparent_hugepage/enabled` is `madvise`, as is usual.
Columns on a device, with a graph, or of a subclass of Tensor get torch's own memory.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

LARGE_BYTES = 4 << 20
"""From here on numpy asks for huge pages."""


def empty_like_rows(rows: Tensor, count: int) -> Tensor:
    """Uninitialised [count, ...] of the dtype, the device and the shape of a row of `rows` [N, ...]; contiguous.

    >>> empty_like_rows(torch.zeros(2, 3, dtype=torch.bfloat16), 5).shape
    torch.Size([5, 3])
    """
    shape = (count, *rows.shape[1:])
    size = rows.element_size() * math.prod(shape)
    if size < LARGE_BYTES or not _is_plain(rows):
        return rows.new_empty(shape)
    return torch.from_numpy(np.empty(size, np.uint8)).view(rows.dtype).view(shape)


def cat(parts: list[Tensor]) -> Tensor:
    """`torch.cat` of parts [N_i, ...] of one dtype and equal other dims, of which there is at least one."""
    if sum([part.nbytes for part in parts]) < LARGE_BYTES:
        return torch.cat(parts)
    if not all(map(_is_plain, parts)):
        return torch.cat(parts)
    return torch.cat(parts, out=empty_like_rows(parts[0], sum(map(len, parts))))


def index_select(rows: Tensor, index: Tensor) -> Tensor:
    """`rows.index_select(0, index)`, of every dtype."""
    bits = as_bits(rows)
    return _index_select(rows, index) if bits is rows else _index_select(bits, index).view(rows.dtype)


def _index_select(rows: Tensor, index: Tensor) -> Tensor:
    if rows.nbytes * len(index) < LARGE_BYTES * len(rows) or not _is_plain(rows):
        return rows.index_select(0, index)
    return torch.index_select(rows, 0, index, out=empty_like_rows(rows, len(index)))


def as_bits(values: Tensor) -> Tensor:
    """The same memory, as integers of the same width where torch cannot index values of the dtype (uint16, uint32, uint64)."""
    return values if _is_indexed(values.dtype) else values.view(INTEGERS[values.itemsize])


@cache
def _is_indexed(dtype: torch.dtype) -> bool:
    place = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        one = torch.empty(1, dtype=dtype, device="cpu")
        one[place] = one.index_select(0, place)
    except (NotImplementedError, RuntimeError):
        return dtype.itemsize not in INTEGERS
    return True


def _is_plain(rows: Tensor) -> bool:
    return type(rows) is Tensor and rows.device.type == "cpu" and rows.layout is torch.strided and not rows.requires_grad

"""How columns and values look in errors."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.protocol import jagged as jg

FEW = 8
"""Tensors of up to so many elements are shown whole."""
MOST_SHOWN_BITS = 10_000
"""Python turns no int of more than 4,300 digits into text, or back, which is some 14,000 bits."""


def describe(column: Tensor) -> str:
    """A column's kind for people: `int64[8, *]` for a jagged one, `float32[8, 3]` for a dense one.

    A user may have assigned something else since.
    """
    if not isinstance(column, Tensor):
        return f"a {type(column).__name__}, which is not a tensor"
    name = str(column.dtype).removeprefix("torch.")
    shape: list[int | str]
    if not jg.is_jagged(column):
        shape = [*column.shape]
    else:
        shape = [jg.num_rows(column), *jg.parts(column)[0].shape[1:]]
        shape.insert(jg.ragged_dim(column), "*")
    return f"{name}[{', '.join(map(str, shape))}]"


def describe_array(column: NDArray[Any]) -> str:
    """The kind of a column of `non_tensor_batch`: `objects`, or `numpy float32[8, 3]`."""
    is_plain = column.dtype == object and column.ndim == 1
    return "objects" if is_plain else f"numpy {column.dtype}[{', '.join(map(str, column.shape))}]"


def short(value: Any) -> str:
    """A value in an error: a small one as it is, of a large tensor its kind only."""
    if isinstance(value, Tensor):
        few = not jg.is_jagged(value) and value.layout is torch.strided and value.numel() <= FEW
        return f"{describe(value)}{f' {value.tolist()}' if few else ''}" if value.dim() else str(value.item())
    if isinstance(value, int) and value.bit_length() > MOST_SHOWN_BITS:
        return f"an int of {value.bit_length()} bits"
    try:
        return cut(repr(value))
    except Exception as exc:  # whatever a foreign type does when it is printed, and Python with the largest ints
        return f"a {type(value).__name__} that cannot be shown ({type(exc).__name__})"


def cut(text: str) -> str:
    """The text, a long one without its end."""
    return text if len(text) <= 120 else f"{text[:117]}..."

"""Whether two values are equal: NaN equals NaN, and tensors and arrays must have one dtype and shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.formatting import cut
from podium.protocol.meta import IMMUTABLE


def equal(left: Any, right: Any) -> bool:
    """Typed equality: tensors and arrays by value, dtype and shape with NaN equal to NaN; containers item by item.

    Containers are lists, tuples and mappings, and dataclasses whose own `==` fails. All else is asked by its own `==`.
    DataError for values that cannot be compared: whose `==` fails, or does not answer by true or false.
    """
    try:
        return _equal(left, right, {})
    except DataError:
        raise
    except Exception as exc:  # torch has no comparison for some layouts, and code of a user's types may raise anything
        raise _incomparable(left, right, exc) from exc


_Pairs: TypeAlias = dict[tuple[int, int], tuple[Any, Any]]
"""The pairs of containers met so far, by their ids, which stay theirs: a pair that differs ends the comparison."""


def _equal(left: Any, right: Any, met: _Pairs) -> bool:
    if left is right:
        return True
    if type(left) is type(right) and type(left) in IMMUTABLE:
        return _equal_by_their_own(left, right)
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and _tensors_equal(left, right)
    pair = (id(left), id(right))
    if pair in met:
        return True  # what differs is found where they were met first
    met[pair] = (left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and _arrays_equal(left, right, met)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key], met) for key in left)
    if type(left) is not type(right):
        return _equal_by_their_own(left, right)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right, repeat(met)))
    if isinstance(left, Mapping):
        keys = set(left.keys())
        return keys == set(right.keys()) and all(_equal(left[key], right[key], met) for key in keys)
    if is_dataclass(left) and not isinstance(left, type):
        return _dataclasses_equal(left, right, met)
    return _equal_by_their_own(left, right)


def _dataclasses_equal(left: Any, right: Any, met: _Pairs) -> bool:
    """By their own `==`; where that fails, as on tensors in a field, field by field."""
    try:
        return bool(left == right)
    except Exception:  # a user's type may raise anything
        names = [field.name for field in fields(left) if field.compare]
        return all(_equal(getattr(left, name), getattr(right, name), met) for name in names)


def _equal_by_their_own(left: Any, right: Any) -> bool:
    """By `==`; what does not equal itself is NaN."""
    try:
        return bool(left == right) or bool(left != left and right != right)
    except Exception as exc:  # a user's type may raise anything
        raise _incomparable(left, right, exc) from exc


def _incomparable(left: Any, right: Any, exc: Exception) -> DataError:
    kinds = " and ".join(dict.fromkeys([type(left).__name__, type(right).__name__]))
    return DataError(f"values of {kinds} cannot be compared ({type(exc).__name__}: {cut(str(exc))})")


def _tensors_equal(left: Tensor, right: Tensor) -> bool:
    if left.dtype == right.dtype and left.dtype.itemsize == 1 and left.is_floating_point() and not left.is_nested:
        left, right = left.float(), right.float()  # torch does not compare float8
    elif left.dtype is torch.complex32 and right.dtype is torch.complex32 and not left.is_nested:
        left, right = left.to(torch.complex64), right.to(torch.complex64)  # nor this
    if left.dtype != right.dtype or jg.is_jagged(left) != jg.is_jagged(right):
        return False
    if jg.is_jagged(left):
        return jg.ragged_dim(left) == jg.ragged_dim(right) and all(
            _tensors_equal(mine, theirs) for mine, theirs in zip(jg.parts(left), jg.parts(right), strict=True)
        )
    if left.shape != right.shape:
        return False
    if torch.equal(left, right):
        return True
    may_be_nan = left.is_floating_point() or left.is_complex()
    return may_be_nan and torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _arrays_equal(left: NDArray[Any], right: NDArray[Any], met: _Pairs) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype == object:
        return all(map(_equal, left.flat, right.flat, repeat(met)))
    return bool(np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM"))  # which have NaN, or NaT

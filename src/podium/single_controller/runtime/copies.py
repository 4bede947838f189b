"""Copies as if a value had crossed a process: what runs in the driver's own process behaves as what runs elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from podium.protocol import Batch

T = TypeVar("T")


def detached_copy(value: T) -> T:
    """A deep copy that shares nothing, whose tensors are detached: a graph lives and dies with the process that made it.

    Parameters stay parameters. Raises what `copy.deepcopy` raises, and DataError for a future.
    """
    with _Detached():
        return copy.deepcopy(value)


def detached(value: Any) -> Any:
    """The value with its tensors detached, those in tuples, lists and dicts included; storage is shared."""
    if carries_graph(value):
        return value.detach()
    if isinstance(value, Batch):
        return value.detach()
    if type(value) in (tuple, list):
        return type(value)(map(detached, value))
    return {key: detached(item) for key, item in value.items()} if type(value) is dict else value


def carries_graph(value: object) -> bool:
    """Whether it is a plain tensor that asks for a gradient; a parameter does too, and keeps that wherever it goes."""
    return type(value) is Tensor and value.requires_grad


class _Detached(TorchFunctionMode):
    """`copy.deepcopy` refuses a tensor that is not a leaf, and a clone of one would keep the graph."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone) and carries_graph(args[0]):
            args = (args[0].detach(), *args[1:])
        return func(*args, **(kwargs or {}))

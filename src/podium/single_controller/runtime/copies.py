"""Copies as if a value had crossed a process: what runs in the driver's own process behaves as what runs elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from podium.errors import DataError
from podium.protocol import Batch

T = TypeVar("T")

_as_sent: ContextVar[bool] = ContextVar("podium_as_sent", default=False)
"""Whether what is being copied is on its way to a rank."""


def copied_as_sent(value: T, memo: dict[int, Any] | None = None) -> T:
    """A deep copy of what is sent to ranks; futures in the memo stay as they are.

    DataError for any other future in it, since futures stay in the driver.
    """
    token = _as_sent.set(True)
    try:
        return copy.deepcopy(value, memo)
    finally:
        _as_sent.reset(token)


def refuse_to_be_sent() -> None:
    """DataError where a future is being copied in order to be sent."""
    if _as_sent.get():
        raise stays_in_driver()


def stays_in_driver() -> DataError:
    return DataError(
        "a future stays in the driver: it is replaced by its value where it is an argument itself, not inside a list or dict, "
        "and where the method was registered with materialize_futures=True; call .get() on it"
    )


def detached_copy(value: T) -> T:
    """A deep copy that shares nothing, whose tensors are detached: a graph lives and dies with the process that made it.

    Parameters stay parameters. Raises what `copy.deepcopy` raises, and DataError for a future.
    """
    with _Detached():
        return copied_as_sent(value)


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

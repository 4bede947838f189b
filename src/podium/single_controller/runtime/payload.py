"""A call's arguments, and a rank's result, as one thing that Ray carries without looking inside.

What is small becomes `bytes`: one argument of that kind is the cheapest that Ray knows. What holds large buffers becomes an
`Envelope`, whose buffers Ray's store takes out of band. Everything unpacked is the receiver's own and writable.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import cloudpickle
import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto, is_rows

_AS_IT_IS = (type(None), bool, int, float, str)  # Ray carries these well, and `unpack` leaves them alone


_WITH_BUFFERS = b"buffers:"
"""What a message begins with that holds its buffers; no pickle begins so."""
IN_MESSAGE_BYTES = 64 * 1024
"""Buffers of together more than this travel beside the message."""
FEW = 64
"""A longer list of simple values is left to cloudpickle, which looks at it in C."""


class HoldsReference(Exception):  # noqa: N818 - a signal to the caller, not an error
    """The value holds a reference that only Ray itself may carry."""


class Envelope:
    """A pickle and the buffers that it refers to."""

    def __init__(self, pickled: bytes, buffers: list[Any]) -> None:
        self.pickled = pickled
        self.buffers = buffers

    def __reduce__(self) -> tuple[Any, ...]:
        return Envelope, (self.pickled, [pickle.PickleBuffer(buffer) for buffer in self.buffers])


Packed: TypeAlias = bytes | Envelope | bool | int | float | str | None


def pack(value: Any, is_reference: Callable[[object], bool]) -> Packed:
    """The value ready to travel. HoldsReference when it holds one of Ray's references."""
    if type(value) in _AS_IT_IS:
        return value  # type: ignore[no-any-return]
    buffers: list[pickle.PickleBuffer] = []
    if _is_plain(value):
        pickled = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    else:
        stream = io.BytesIO()
        _Pickler(stream, buffers, is_reference).dump(value)
        pickled = stream.getvalue()
    if not buffers:
        return pickled
    if sum(buffer.raw().nbytes for buffer in buffers) > IN_MESSAGE_BYTES:
        return Envelope(pickled, list(buffers))
    return _WITH_BUFFERS + pickle.dumps((pickled, [bytearray(buffer) for buffer in buffers]), protocol=5)


def unpack(packed: Packed) -> Any:
    """What was packed."""
    if isinstance(packed, bytes):
        if not packed.startswith(_WITH_BUFFERS):
            return pickle.loads(packed)
        pickled, buffers = pickle.loads(memoryview(packed)[len(_WITH_BUFFERS) :])
        return pickle.loads(pickled, buffers=buffers)
    if isinstance(packed, Envelope):  # the store's memory is everyone's, and read-only
        return pickle.loads(packed.pickled, buffers=[bytearray(buffer) for buffer in packed.buffers])
    return packed


def _is_plain(value: object, depth: int = 4) -> bool:
    """Whether the value is made of rows and few simple values, which pickle alone carries as well, in half the time."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return True
    if kind is DataProto:
        return not value.non_tensor_batch and _is_plain(value.meta_info, depth)  # type: ignore[attr-defined]
    if kind not in (tuple, list, dict) or not depth or len(value) > FEW:  # type: ignore[arg-type]
        return False
    items: Iterable[object] = value.values() if kind is dict else value  # type: ignore[attr-defined,assignment]
    return all(_is_plain(item, depth - 1) for item in items)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """cloudpickle, since what is defined in the driver's script, and lambdas, must travel by value."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer], is_reference: Callable[[object], bool]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._is_reference = is_reference

    def reducer_override(self, value: Any) -> Any:
        if self._is_reference(value):
            raise HoldsReference
        if type(value) is Tensor and _has_plain_storage(value):
            return _tensor_of, (DataProto({"t": value}),)
        if _is_tensordict(value):
            with suppress(DataError):  # nested ones, and other than one batch dimension, travel as tensordict has it
                return _tensordict_of, (DataProto.from_tensordict(value),)
        return super().reducer_override(value)


# What holds tensors travels as rows do: torch's own pickling copies the storage three times, and all of it for a view.


def _has_plain_storage(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.requires_grad and tensor.dim() > 0


def _tensor_of(rows: DataProto) -> Tensor:
    return rows.batch["t"]


def _is_tensordict(value: object) -> bool:
    return is_rows(value) and not isinstance(value, DataProto)


def _tensordict_of(rows: DataProto) -> Any:
    return rows.to_tensordict()

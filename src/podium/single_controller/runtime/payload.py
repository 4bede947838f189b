"""A call's arguments, and a rank's result, as one thing that Ray carries without looking inside.

What is small becomes `bytes`: one argument of that kind is the cheapest that Ray knows. What holds large buffers becomes an
`Envelope`, whose buffers Ray's store takes out of band. Everything unpacked is the receiver's own and writable.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeAlias

import cloudpickle

from podium.protocol import DataProto

_AS_IT_IS = (type(None), bool, int, float, str)  # Ray carries these well, and `unpack` leaves them alone


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
    return Envelope(pickled, list(buffers)) if buffers else pickled


def unpack(packed: Packed) -> Any:
    """What was packed."""
    if isinstance(packed, bytes):
        return pickle.loads(packed)
    if isinstance(packed, Envelope):  # the store's memory is everyone's, and read-only
        return pickle.loads(packed.pickled, buffers=[bytearray(buffer) for buffer in packed.buffers])
    return packed


def _is_plain(value: object) -> bool:
    """Whether the value is made of rows and simple values only, which pickle alone carries as well, in half the time."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return True
    if kind is tuple or kind is list:
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    if kind is dict:
        return all(map(_is_plain, value.values()))  # type: ignore[attr-defined]
    return isinstance(value, DataProto) and not value.non_tensor_batch and _is_plain(value.meta_info)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """cloudpickle, since what is defined in the driver's script, and lambdas, must travel by value."""

    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer], is_reference: Callable[[object], bool]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._is_reference = is_reference

    def reducer_override(self, value: Any) -> Any:
        if self._is_reference(value):
            raise HoldsReference
        return super().reducer_override(value)

"""A call's arguments, and a rank's result, as one thing that Ray carries without looking inside.

What is small becomes `bytes`: one argument of that kind is the cheapest that Ray knows. What holds large buffers becomes an
`Envelope`, whose buffers Ray's store takes out of band. Everything that is unpacked is private and writable.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto, is_rows
from podium.protocol.columns import ObjectColumn
from podium.protocol.meta import IMMUTABLE, copy_meta
from podium.protocol.remote_rows import RemoteRows
from podium.single_controller.runtime.copies import carries_graph

NOTHING = b""
"""What None becomes: bytes are what Ray carries in the fewest steps, and most methods return None."""
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


Packed: TypeAlias = bytes | Envelope


def pack(value: Any, is_reference: Callable[[object], bool]) -> Packed:
    """The value as a message. HoldsReference if it holds one of Ray's references."""
    if value is None:
        return NOTHING
    buffers: list[pickle.PickleBuffer] = []
    if is_plain(value):
        message = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    else:
        stream = io.BytesIO()
        _Pickler(stream, buffers, is_reference).dump(value)
        message = stream.getvalue()
    if buffers:
        if sum(buffer.raw().nbytes for buffer in buffers) > IN_MESSAGE_BYTES:
            return Envelope(message, list(buffers))
        message = _WITH_BUFFERS + pickle.dumps((message, [bytearray(buffer) for buffer in buffers]), protocol=5)
    return message


def unpack(packed: Packed) -> Any:
    """The value of a message."""
    if not isinstance(packed, bytes):
        return pickle.loads(packed.pickled, buffers=map(_own_copy, packed.buffers))
    if not packed:
        return None
    if not packed.startswith(_WITH_BUFFERS):
        return pickle.loads(packed)
    pickled, buffers = pickle.loads(memoryview(packed)[len(_WITH_BUFFERS) :])
    return pickle.loads(pickled, buffers=buffers)


def unpack_views(packed: Envelope) -> Any:
    """The value of a message whose tensors are views of the message's own memory. The caller must copy them, and never write.

    That memory may be Ray's store, where a write changes the value for all readers, or ends the process.
    """
    return pickle.loads(packed.pickled, buffers=map(_as_if_writable, packed.buffers))


def unpack_to_join(packed: Packed) -> Any:
    """The value of a message, for a concat: large tensor columns are views (`unpack_views`), all else is private."""
    if not isinstance(packed, Envelope):
        return unpack(packed)
    rows = unpack_views(packed)
    if type(rows) is not DataProto:
        return unpack(packed)
    objects = {key: column if _is_simple(column) else copy.deepcopy(column) for key, column in rows.non_tensor_batch.items()}
    rows.non_tensor_batch, rows.meta_info = objects, copy_meta(rows.meta_info)
    return rows


def _is_simple(column: ObjectColumn) -> bool:
    return column.dtype != object or all(type(value) in IMMUTABLE for value in column)  # joined arrays are copied


def _own_copy(buffer: Any) -> NDArray[np.uint8]:
    """What lies in the store, everyone's and read-only, as memory of our own.

    Numpy asks the kernel for huge pages for it: a fresh page costs more than what is copied into it, so that a bytearray
    takes four times as long, and to use memory again would save little more.
    """
    return np.frombuffer(pickle.PickleBuffer(buffer).raw(), np.uint8).copy()


def _as_if_writable(buffer: Any) -> NDArray[np.uint8]:
    """The same memory as an array that claims to be writable, so that readers do not copy it, and torch does not warn of it."""
    return np.asarray(_Writable(np.frombuffer(pickle.PickleBuffer(buffer).raw(), np.uint8)))


class _Writable:
    """The memory of an array, as numpy asks for it."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.owner = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


_SIMPLE = (type(None), bool, int, float, str)
"""What pickle alone writes as well as cloudpickle."""


def is_plain(value: object, depth: int = 4) -> bool:
    """Whether the value is made of rows and few simple values, which pickle alone carries as well, in half the time."""
    kind = type(value)
    if kind in _SIMPLE:
        return True
    if kind is DataProto:
        return not value.non_tensor_batch and is_plain(value.meta_info, depth)  # type: ignore[attr-defined]
    if kind not in (tuple, list, dict) or not depth or len(value) > FEW:  # type: ignore[arg-type]
        return False
    if kind is dict and not all(type(key) in _SIMPLE for key in value):  # type: ignore[attr-defined]
        return False
    items: Iterable[object] = value.values() if kind is dict else value  # type: ignore[attr-defined,assignment]
    return all(is_plain(item, depth - 1) for item in items)


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
        if carries_graph(value):
            return value.detach().__reduce_ex__(5)
        if _is_tensordict(value):
            with suppress(DataError):  # nested ones, and other than one batch dimension, travel as tensordict has it
                return _tensordict_of, (DataProto.from_tensordict(value),)
        return super().reducer_override(value)


# What holds tensors travels as rows do: torch's own pickling copies the storage three times, and all of it for a view.


def _has_plain_storage(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.dim() > 0


def _tensor_of(rows: DataProto) -> Tensor:
    return rows.batch["t"]


def _is_tensordict(value: object) -> bool:
    return is_rows(value) and not isinstance(value, DataProto | RemoteRows)


def _tensordict_of(rows: DataProto) -> Any:
    return rows.to_tensordict()

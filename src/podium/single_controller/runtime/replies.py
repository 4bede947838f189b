"""How a rank's result travels: what its process sends for each kind of `Reply`, and how the driver reads that."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from podium.protocol import DataProto
from podium.protocol.rows import split_result
from podium.single_controller.runtime.base import Reply
from podium.single_controller.runtime.payload import (
    NOTHING,
    Envelope,
    HoldsReference,
    Packed,
    pack,
    unpack,
    unpack_to_join,
    unpack_views,
)


def encode_reply(result: Any, reply: Reply, is_reference: Callable[[object], bool], plain: Callable[[Any], Any]) -> Any:
    """What is sent for a result; for `Reply.REFERENCE` a pair, the header and the columns that stay.

    `plain` prepares what only the runtime's own serialization may carry: values that hold its references.
    """
    if reply is Reply.NOTHING:
        return NOTHING
    if reply is Reply.PLAIN:
        return plain(result)
    parts = split_result(result) if reply is Reply.REFERENCE else None
    header, columns = (result, None) if parts is None else (parts[0], encode_columns(parts[1]))
    try:
        packed: Any = pack(header, is_reference)
    except HoldsReference:
        packed = plain(header)
    return (packed, columns) if reply is Reply.REFERENCE else packed


def decode_reply(sent: Any, reply: Reply, *, is_joined: bool = False) -> Any:
    """The result, or the header of one that stays: the reader's own, and writable."""
    if reply is Reply.PLAIN or not isinstance(sent, Packed):
        return copy.deepcopy(sent)  # the runtime may hand out read-only memory that other readers share
    return unpack_to_join(sent) if is_joined else unpack(sent)


def encode_columns(columns: DataProto) -> Envelope | None:
    """Columns that stay where they were made; None where there are none."""
    if not columns.batch and not columns.non_tensor_batch:
        return None
    objects = {key: pickle.PickleBuffer(cloudpickle.dumps(column)) for key, column in columns.non_tensor_batch.items()}
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps((DataProto(columns.batch), objects), protocol=5, buffer_callback=buffers.append)
    return Envelope(pickled, list(buffers))


def decode_columns(columns: Envelope, keys: Sequence[str]) -> DataProto:
    """Those of the columns that have one of these names; tensors are views of the envelope's memory."""
    tensors, objects = unpack_views(columns)
    return DataProto(
        {key: column for key, column in tensors.batch.items() if key in keys},
        {key: pickle.loads(column) for key, column in objects.items() if key in keys},
    )

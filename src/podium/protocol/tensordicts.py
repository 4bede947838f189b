"""To and from tensordict's `TensorDict`. This module is imported when a caller has a TensorDict or asks for one, not before.

    tensor, jagged nested tensor <-> tensor column; NonTensorStack <-> object column; NonTensorData <-> meta value

No row operation goes through tensordict's own: they differ between its versions, fail on some batches, and part the offsets
that jagged columns share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from podium.errors import DataError
from podium.protocol.columns import ObjectColumn
from podium.protocol.meta import copy_meta

Tables: TypeAlias = tuple[dict[str, Tensor], dict[str, Sequence[Any]], dict[str, Any]]


def num_rows(data: TensorDict) -> int:
    """B. DataError for a batch of more than one dim; one of no dims has no rows, and may hold values of the whole batch only."""
    if data.batch_dims > 1:
        raise DataError(f"rows need a batch size of one dim, this TensorDict has {tuple(data.batch_size)}; flatten it first")
    return data.batch_size[0] if data.batch_dims else 0


def column_names(data: TensorDict) -> set[str]:
    """The names of its columns: of all entries but the `NonTensorData`, which are meta."""
    return {key for key, value in data.items() if not isinstance(value, NonTensorData)}


def take_apart(data: TensorDict) -> Tables:
    """Tensor columns, object columns and meta of a TensorDict; storage is shared, the meta is copied."""
    num_rows(data)
    tensors: dict[str, Tensor] = {}
    objects: dict[str, Sequence[Any]] = {}
    meta: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, NonTensorData):
            meta[key] = value.data
        elif isinstance(value, NonTensorStack):
            objects[key] = value.tolist()
        elif isinstance(value, Tensor):
            tensors[key] = value
        else:
            raise DataError(f"entry {key!r} of the TensorDict is a {type(value).__name__}; rows hold no nested ones, flatten it")
    if not data.batch_dims and (tensors or objects):
        raise DataError(f"entry {next(iter(tensors | objects))!r} has no rows: the batch size is (); make it batch_size=[B]")
    return tensors, objects, copy_meta(meta)


def put_together(
    rows: int, tensors: Mapping[str, Tensor], objects: Mapping[str, ObjectColumn], meta: Mapping[str, Any]
) -> TensorDict:
    """A TensorDict of batch size [rows], or [] where there is no column; storage is shared, the meta is copied."""
    doubled = sorted((tensors.keys() & objects.keys()) | ((tensors.keys() | objects.keys()) & meta.keys()))
    if doubled:
        raise DataError(f"a TensorDict has one entry of a name; {doubled} name two of: tensor column, object column, meta key")
    values = {key: NonTensorData(value) for key, value in copy_meta(meta).items()}
    data = TensorDict({**tensors, **values}, batch_size=[rows] if tensors or objects else [])
    for key, column in objects.items():
        set_entry(data, key, NonTensorStack(*map(NonTensorData, column)))
    return data


def set_entry(data: TensorDict, key: str, value: Any) -> None:
    """Set an entry that fits, in place: `set` of tensordict 0.10 fails on a stack of no rows, for its checks look into a row."""
    data._set_str(key, value, inplace=False, validated=True, non_blocking=False)

"""Functions that verl's clients import from `verl.protocol`, written with `podium.protocol`. New code does not need them."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import columns as col
from podium.protocol import jagged as jg
from podium.protocol import joining, row_dicts, wire
from podium.protocol.batch import Batch
from podium.protocol.data_proto import DataProto
from podium.protocol.row_dicts import DataProtoItem

if TYPE_CHECKING:
    from tensordict import TensorDict
    from torch.distributed import ProcessGroup

TableT = TypeVar("TableT", bound="Batch | TensorDict")
EncodedTensorDict: TypeAlias = tuple[tuple[int, ...], str | None, wire.Packed]
"""The batch size, the device (None: several), and the entries as they travel."""


def union_tensor_dict(tensor_dict1: TableT, tensor_dict2: TableT) -> TableT:
    """Add the entries of the second in place; returns the first. What both have must be equal, or DataError and no change."""
    if isinstance(tensor_dict1, Batch):
        tensor_dict1.update(DataProto(tensor_dict1).union(DataProto(tensor_dict2)).batch)
        return tensor_dict1
    from podium.compat.verl import tensordict_ops

    return cast(TableT, tensordict_ops.union_tensor_dict(tensor_dict1, cast("TensorDict", tensor_dict2)))


def union_numpy_dict(
    tensor_dict1: MutableMapping[str, NDArray[Any]], tensor_dict2: Mapping[str, NDArray[Any]]
) -> MutableMapping[str, NDArray[Any]]:
    """Add the arrays of the second in place; returns the first. What both have must be equal, or DataError and no change."""
    joined = joining.join_tables(({}, tensor_dict1, {}), ({}, tensor_dict2, {}))[1]
    tensor_dict1.update(joined)
    return tensor_dict1


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """The items as rows, without their meta; `data.select_idxs(numbers)` needs no items and keeps jagged columns jagged.

    Tensors of one shape in every item are stacked, [B, ...]; others are jagged. Numpy's numbers of one dtype are an array of it,
    all else is objects.
    """
    items = list(x)
    shapes: dict[str, set[torch.Size]] = {}
    for item in items:
        for key, value in item.batch.items():
            shapes.setdefault(key, set()).add(value.shape)
    tensors, _ = row_dicts.columns_of([item.batch for item in items], [key for key in shapes if len(shapes[key]) == 1])
    names = dict.fromkeys(key for item in items for key in item.non_tensor_batch)
    return DataProto(tensors, {key: _collated(key, items) for key in names})


def _collated(key: str, items: Sequence[DataProtoItem]) -> NDArray[Any]:
    rows = []
    for number, item in enumerate(items):
        if key not in item.non_tensor_batch:
            raise DataError(
                f"item {number} does not have {key!r}, which another item has; items that are joined must have the same columns"
            )
        rows.append(item.non_tensor_batch[key])
    if all(isinstance(row, np.generic) for row in rows) and len({row.dtype for row in rows}) == 1:
        return col.array_column(np.array(rows))
    return col.object_column(rows)


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Rows [B, ...] as `new_batch_size` rows [new, B / new, ...] of consecutive ones; storage is shared.

    DataError for jagged columns, and where the rows do not divide. Rows that were padding do not stay marked.
    """
    groups = col.whole_number("new_batch_size", new_batch_size)
    if groups < 1 or len(data) % groups:
        raise DataError(f"{len(data)} rows cannot be folded into {groups} equal groups")
    size = len(data) // groups
    data = data.unmarked()
    _check_dense(data, "folded")
    tensors = {key: column.reshape(groups, size, *column.shape[1:]) for key, column in data.batch.items()}
    arrays = {key: rows.reshape(groups, size, *rows.shape[1:]) for key, rows in data.non_tensor_batch.items()}
    return DataProto(tensors, arrays, data.meta_info)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The inverse of `fold_batch_dim`: the first `batch_dims` dims of every column become rows; storage is shared."""
    dims = col.whole_number("batch_dims", batch_dims)
    data = data.unmarked()
    _check_dense(data, "unfolded")
    dims_of = {key: column.ndim for key, column in data.batch.items()}
    for key, has in (dims_of | {key: rows.ndim for key, rows in data.non_tensor_batch.items()}).items():
        if not 1 <= dims <= has:
            raise DataError(f"column {key!r} has {has} dims, of which {dims} cannot become rows")
    tensors = {key: column.reshape(-1, *column.shape[dims:]) for key, column in data.batch.items()}
    arrays = {key: rows.reshape(-1, *rows.shape[dims:]) for key, rows in data.non_tensor_batch.items()}
    return DataProto(tensors, arrays, data.meta_info)


def _check_dense(data: DataProto, change: str) -> None:
    for key, column in data.batch.items():
        if jg.is_jagged(column):
            raise DataError(f"column {key!r} is jagged, and cannot be {change}: its rows have no dim in common; pad it first")


def all_gather_data_proto(data: DataProto, process_group: ProcessGroup | None) -> None:
    """Put the rows of all ranks of the group, in the order of ranks, into every rank's `data`, in place; each keeps its own meta.

    Every rank calls it. Ranks may have any numbers of rows, and jagged columns; tensors come back to the device they were on.
    """
    device = data.batch.device
    mine = data.select(meta_info_keys=[]).to("cpu")
    parts: list[DataProto] = [mine] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(parts, mine, group=process_group)
    joined = DataProto.concat(parts)
    joined.meta_info = data.unmarked().meta_info | joined.meta_info
    data.batch, data.non_tensor_batch, data.meta_info = joined.batch, joined.non_tensor_batch, joined.meta_info
    if device is not None:
        data.to(device)


def serialize_single_tensor(obj: Tensor) -> wire.TensorRecord:
    """(dtype, shape, elements) of a dense tensor."""
    (_, record, _, _), *_ = wire.pack({"": obj}, buffers=False)[1]
    return record


def deserialize_single_tensor(arr: wire.TensorRecord) -> Tensor:
    """The inverse of `serialize_single_tensor`: a tensor of its own memory, on the CPU."""
    return wire.unpack((wire.WIRE_VERSION, [("", arr, None, 0)], []))[""]


def serialize_tensordict(batch: Batch | TensorDict) -> EncodedTensorDict:
    """The tensors, dense or jagged, as plain values. DataError for any other entry, or nested layout."""
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, wire.pack(dict(cast("Batch", batch)), buffers=False)


def deserialize_tensordict(arr: EncodedTensorDict) -> TensorDict:
    """The inverse of `serialize_tensordict`."""
    from tensordict import TensorDict

    batch_size, device, packed = arr
    return TensorDict(wire.unpack(packed), batch_size=batch_size, device=device)

"""For workers that keep their rows in a TensorDict: the functions that verl's users know, over `DataProto`'s arithmetic.

    from podium.compat.verl import tensordict_ops as tu

They work on jagged and non-tensor columns alike, in every version of tensordict: nothing here runs tensordict's own row
operations. An entry is a tensor (dense or jagged), a `NonTensorStack` (an object per row) or `NonTensorData` (meta). This
module is not imported with the package, for it imports tensordict.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from podium.errors import DataError
from podium.protocol import equality, formatting, row_moves
from podium.protocol import jagged as jg
from podium.protocol.columns import pick
from podium.protocol.data_proto import DataProto
from podium.protocol.indexing import LastBatch, RowIndex
from podium.protocol.rows import concat_rows, pad_dataproto_to_divisor, unpad_dataproto
from podium.protocol.tensordicts import set_entry

# -- making -------------------------------------------------------------------------------------------------------------


def get_tensordict(tensor_dict: Mapping[str, Any], non_tensor_dict: Mapping[str, Any] | None = None) -> TensorDict:
    """Tensors, and lists or arrays of one object per row, as columns; `non_tensor_dict` as meta. DataError for other types."""
    tensors = {key: value for key, value in tensor_dict.items() if isinstance(value, Tensor)}
    objects = {key: _rows_of(key, value) for key, value in tensor_dict.items() if key not in tensors}
    return DataProto(tensors, objects, non_tensor_dict).to_tensordict()


def _rows_of(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple | np.ndarray | NonTensorStack):
        raise DataError(f"column {key!r} is a {type(value).__name__}; a value of the whole batch belongs in non_tensor_dict")
    rows = value.tolist() if isinstance(value, NonTensorStack) else list(value)
    if any(isinstance(row, Tensor) for row in rows):
        raise DataError(f"column {key!r} is a list of tensors; make it one by nested_tensor_from_tensor_list")
    return rows


def list_of_dict_to_tensordict(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """One dict per row, as `DataProto.from_rows`: the union of their keys, None where a row lacks one."""
    return DataProto.from_rows(rows).to_tensordict()


def nested_tensor_from_tensor_list(tensors: Sequence[Tensor], ragged_idx: int | None = None) -> Tensor:
    """A jagged column of these rows, ragged in dim `ragged_idx` of the column; None: in the last one."""
    return jg.jagged_from_rows(tensors, (tensors[0].dim() if tensors else 1) if ragged_idx is None else ragged_idx)


# -- single entries -----------------------------------------------------------------------------------------------------


def assign_non_tensor_data(data: TensorDict, key: str, value: Any) -> TensorDict:
    """Set a value of the whole batch, in place, also where it is a list; returns `data`."""
    set_entry(data, key, value if isinstance(value, NonTensorData) else NonTensorData(value))
    return data


def assign_non_tensor_stack(data: TensorDict, key: str, rows: Sequence[Any] | NonTensorStack) -> TensorDict:
    """Set one object per row, in place; returns `data`. DataError where there are not as many as rows."""
    set_entry(data, key, _stack_for(data, key, rows))
    return data


def _stack_for(data: TensorDict, key: str, rows: Sequence[Any] | NonTensorStack) -> NonTensorStack:
    objects = rows.tolist() if isinstance(rows, NonTensorStack) else list(rows)
    if [len(objects)] != list(data.batch_size):
        raise DataError(f"column {key!r} has {len(objects)} rows, but the batch size is {tuple(data.batch_size)}")
    return NonTensorStack(*map(NonTensorData, objects))


def assign_non_tensor(data: TensorDict, **values: Any) -> TensorDict:
    """Set entries in place: lists and stacks as one object per row, all else as meta; `NonTensorData([..])` is meta too.

    DataError where a column has not as many objects as rows; then nothing is set.
    """
    stacks = {key: _stack_for(data, key, value) for key, value in values.items() if isinstance(value, list | NonTensorStack)}
    for key, value in values.items():
        if key in stacks:
            set_entry(data, key, stacks[key])
        else:
            assign_non_tensor_data(data, key, value)
    return data


def get(data: TensorDict, key: str, default: Any = None) -> Any:
    """A tensor as it is, the objects of rows as a list, meta as its value."""
    return _plain(dict(data.items()).get(key, default))


def get_non_tensor_data(data: TensorDict, key: str, default: Any = None) -> Any:
    """The value of a meta entry; any other entry as it is."""
    return unwrap_non_tensor_data(dict(data.items()).get(key, default))


def unwrap_non_tensor_data(value: Any) -> Any:
    """What a `NonTensorData` holds; any other value as it is."""
    return value.data if isinstance(value, NonTensorData) else value


def pop(data: TensorDict, key: str, default: Any = None) -> Any:
    """As `get`, and takes the entry out."""
    found = get(data, key, default)
    if key in data.keys():  # noqa: SIM118 - a TensorDict is not a dict
        del data[key]
    return found


def get_keys(data: TensorDict, keys: Iterable[str]) -> TensorDict:
    """The named entries, and the rows they have. DataError names an unknown one."""
    proto = DataProto.from_tensordict(data)
    entries = pick("entry", {key: None for table in proto._tables() for key in table}, keys)
    batch, objects, meta = ({key: value for key, value in table.items() if key in entries} for table in proto._tables())
    return DataProto(batch, objects, meta).to_tensordict()


def pop_keys(data: TensorDict, keys: Iterable[str]) -> TensorDict:
    """As `get_keys`, and takes the entries out."""
    taken = get_keys(data, names := list(keys))
    for key in dict.fromkeys(names):
        del data[key]
    return taken


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)


# -- rows ---------------------------------------------------------------------------------------------------------------


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """The rows of several jagged columns in order."""
    return row_moves.concat_tensors([{"column": tensor} for tensor in tensors])["column"]


def concat_tensordict(parts: Sequence[TensorDict]) -> TensorDict:
    """The rows of all parts in order; meta merges as `DataProto.concat` says, so differing values are an error."""
    return concat_rows(parts)


def chunk_tensordict(data: TensorDict, chunks: int) -> list[TensorDict]:
    """Parts of equal size, as views. ChunkError when the rows do not divide."""
    return [part.to_tensordict() for part in DataProto.from_tensordict(data).chunk(chunks)]


@overload
def index_select_tensor_dict(data: TensorDict, indices: RowIndex) -> TensorDict: ...
@overload
def index_select_tensor_dict(data: None, indices: RowIndex) -> None: ...
def index_select_tensor_dict(data: TensorDict | None, indices: RowIndex) -> TensorDict | None:
    """The rows that a mask marks or that are given by number; None of None."""
    return None if data is None else DataProto.from_tensordict(data).select_idxs(indices).to_tensordict()


def union_tensor_dict(data: TensorDict, other: TensorDict) -> TensorDict:
    """Add the other's entries in place; returns `data`. What both have must be equal, or DataError and nothing is changed."""
    joined = DataProto.from_tensordict(data).union(DataProto.from_tensordict(other)).to_tensordict()
    data.batch_size = joined.batch_size
    for key, value in joined.items():
        set_entry(data, key, value)
    return data


def make_iterator(
    data: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
    *,
    last: LastBatch = "error",
) -> Iterator[TensorDict]:
    """Mini-batches, as `DataProto.make_iterator`."""
    batches = DataProto.from_tensordict(data).make_iterator(mini_batch_size, epochs, seed, dataloader_kwargs, last=last)
    return (batch.to_tensordict() for batch in batches)


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """As `pad_dataproto_to_divisor`, jagged columns too."""
    return pad_dataproto_to_divisor(data, size_divisor)


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """As `unpad_dataproto`."""
    return unpad_dataproto(data, pad_size)


def contiguous(data: TensorDict) -> TensorDict:
    """A copy that shares no storage, every tensor contiguous."""
    return DataProto.from_tensordict(data).clone().to_tensordict()


def assert_tensordict_eq(mine: TensorDict, theirs: TensorDict) -> None:
    """AssertionError names the first entry that is not the same in both."""
    tables = (dict(zip(data.keys(), map(_plain, data.values()), strict=True)) for data in (mine, theirs))
    left, right = tables
    if left.keys() != right.keys():
        raise AssertionError(f"entries differ: {sorted(left)} and {sorted(right)}")
    for key, value in left.items():
        try:
            is_equal = equality.equal(value, right[key])
        except DataError as exc:
            raise AssertionError(f"entry {key!r}: {exc}") from exc
        if not is_equal:
            raise AssertionError(f"entry {key!r} differs: {formatting.short(value)} and {formatting.short(right[key])}")

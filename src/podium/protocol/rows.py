"""Batches of every kind, `DataProto`, tensordict's `TensorDict` and `RemoteRows`: what a dispatch function needs to cut and join.

A TensorDict goes through DataProto's arithmetic and comes back as one, so both kinds behave alike in every version of
tensordict. Tensordict is not imported here: a caller who has a TensorDict has done that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, TypeVar, cast

import torch

from podium.errors import DataError
from podium.protocol.blocks import Header, to_header_and_block
from podium.protocol.columns import whole_number
from podium.protocol.data_proto import DataProto
from podium.protocol.meta import is_marked
from podium.protocol.remote_concat import concat_remote_rows
from podium.protocol.remote_rows import RemoteRows

if TYPE_CHECKING:
    from tensordict import TensorDict

Rows: TypeAlias = "DataProto | RemoteRows | TensorDict"
_OURS = (DataProto, RemoteRows)  # a tuple, as `A | B` is built at every use
RowsT = TypeVar("RowsT", bound="DataProto | RemoteRows | TensorDict")


def is_rows(value: object) -> TypeGuard[Rows]:
    """Whether the value is a batch: a DataProto, `RemoteRows`, or a TensorDict (of one batch dim, which using it will check)."""
    return isinstance(value, _OURS) or _is_tensordict(value)


def num_rows(rows: Rows) -> int:
    """B. DataError for a TensorDict of more than one batch dim."""
    if isinstance(rows, _OURS):
        return len(rows)
    from podium.protocol import tensordicts

    return tensordicts.num_rows(rows)


def column_names(rows: Rows) -> set[str]:
    """The names of the columns, of tensors and of objects; values of the whole batch are not columns."""
    if isinstance(rows, DataProto):
        return {*rows.batch, *rows.non_tensor_batch}
    if isinstance(rows, RemoteRows):
        return rows.column_names()
    from podium.protocol import tensordicts

    return tensordicts.column_names(rows)


def is_padding_enabled(rows: Rows) -> bool:
    """Whether dispatch may pad the rows (`DataProto.is_padding_enabled`; in a TensorDict, `AUTO_PADDING_KEY` set to true)."""
    return _proto(rows).is_padding_enabled()


def partition_rows(rows: RowsT, parts: int) -> list[RowsT]:
    """Exactly `parts` consecutive shards whose sizes differ by at most one; views. Empty shards keep their columns."""
    return [_like(rows, part) for part in _proto(rows).partition(parts)]


def partition_padded(rows: RowsT, parts: int) -> tuple[list[RowsT], tuple[int, ...]]:
    """Exactly `parts` consecutive shards of ceil(B / parts) rows, and how many of the last rows of each are padding.

    Padding rows are copies of the batch's last row. A shard that has any is a copy and lists them in its meta, for
    `DataProto.padding_mask` (in a TensorDict, under `PADDING_ROWS_KEY`); all other shards are views. What a worker makes of
    such a shard may carry the list, until `drop_last` takes the rows and the list away. No rows give empty, unpadded shards.
    """
    if parts < 1:
        raise DataError(f"partition_padded needs at least one part, got {parts}")
    data = _proto(rows)
    size = -(-len(data) // parts)
    bounds = [min(part * size, len(data)) for part in range(parts + 1)]
    padding = tuple(size - (stop - start) for start, stop in pairwise(bounds))
    whole = len(data) // size if size else parts
    views = (data if whole == parts else data[: whole * size]).partition(whole) if whole else []
    padded = [data.filled(torch.arange(*bounds[part : part + 2]), size) for part in range(whole, parts)]
    return [_like(rows, part) for part in (*views, *padded)], padding


def num_padding(rows: Rows) -> int:
    """How many of the rows are marked as padding. DataError for stale marks."""
    return int(_proto(rows).padding_mask.sum())


def drop_padding(rows: RowsT, count: int, *, of: int) -> RowsT:
    """Of rows that were computed from a batch with `of` padding rows, without those of its last `count`: as many of each.

    >>> marked = DataProto({"x": torch.arange(2)}).filled(torch.arange(2), 5).repeat(2)
    >>> drop_padding(marked, 2, of=3).padding_mask.tolist()
    [False, False, False, False, True, True]
    """
    data = _proto(rows)
    padding = data.padding_mask.nonzero().flatten()
    is_kept_B = torch.ones(len(data), dtype=torch.bool)
    is_kept_B[padding[len(padding) - len(padding) * count // of :]] = False
    return _like(rows, data.select_idxs(is_kept_B))


def drop_last(rows: RowsT, count: int) -> RowsT:
    """The rows without the last `count`, as a view, and without the mark of padding: what is left is taken for real.

    DataError when there are fewer than `count` rows.
    """
    data = _proto(rows)
    if not 0 <= count <= len(data):
        raise DataError(f"{count} rows cannot be dropped from {len(data)}")
    return _like(rows, data[: len(data) - count].unmarked())


def pad_dataproto_to_divisor(data: RowsT, size_divisor: int) -> tuple[RowsT, int]:
    """The rows as a new batch whose length `size_divisor` divides, and how many rows were added at the end.

    As everywhere, padding rows are copies of the last row, and `padding_mask` says which they are. No rows stay none.
    """
    size_divisor = whole_number("size_divisor", size_divisor)
    if size_divisor < 1:
        raise DataError(f"the divisor must be at least 1, got {size_divisor}")
    rows = _proto(data)
    missing = -len(rows) % size_divisor
    padded = rows.filled(torch.arange(len(rows)), len(rows) + missing) if missing else rows.select()
    return _like(data, padded), missing


def unpad_dataproto(data: RowsT, pad_size: int) -> RowsT:
    """The rows without the last `pad_size`, as a view; the inverse of `pad_dataproto_to_divisor`.

    Where the marks came from a batch of another length, the caller's word holds: the rows that are left are real.
    """
    rows, pad_size = _proto(data), whole_number("pad_size", pad_size)
    if not 0 <= pad_size <= len(rows):
        raise DataError(f"{pad_size} rows of padding cannot be taken off {len(rows)} rows")
    left = rows[: len(rows) - pad_size]
    return _like(data, left if is_marked(rows.meta_info, len(rows)) else left.unmarked())


def concat_rows(parts: Sequence[RowsT]) -> RowsT:
    """The rows of all parts in order, of the parts' kind, as `DataProto.concat`. DataError when they are of two kinds."""
    if all(type(part) is DataProto for part in parts):
        return cast(RowsT, DataProto.concat(cast("Sequence[DataProto]", parts)))
    kinds = {_kind_of(part) for part in parts}
    if len(kinds) > 1:
        names = ", ".join(f"part {number}: {type(part).__name__}" for number, part in enumerate(parts))
        raise DataError(f"concat: parts are of two kinds ({names}); let every rank return the same kind")
    remote = [part for part in parts if isinstance(part, RemoteRows)]
    here = [as_proto(part) for part in parts if not isinstance(part, RemoteRows)]
    joined = concat_remote_rows(remote) if remote else DataProto.concat(here)
    return _like(parts[0], joined)


def split_result(result: object) -> tuple[Header, DataProto] | None:
    """What a worker returned as a header and the block that stays; None for a result without rows, which travels as it is."""
    if isinstance(result, DataProto):
        return to_header_and_block(result)
    if not _is_tensordict(result):
        return None
    try:
        rows = DataProto.from_tensordict(cast("TensorDict", result))
    except DataError:  # nested ones, and other than one batch dimension
        return None
    return to_header_and_block(rows, is_tensordict=True)


def as_proto(rows: DataProto | TensorDict) -> DataProto:
    """The rows as a DataProto; storage is shared."""
    return rows if isinstance(rows, DataProto) else DataProto.from_tensordict(rows)


def _proto(rows: Rows) -> DataProto | RemoteRows:
    return rows if isinstance(rows, _OURS) else as_proto(rows)


def _like(rows: RowsT, data: DataProto | RemoteRows) -> RowsT:
    is_tensordict = isinstance(data, DataProto) and not isinstance(rows, DataProto)
    return cast(RowsT, cast(DataProto, data).to_tensordict() if is_tensordict else data)


def _kind_of(rows: Rows) -> tuple[type, bool]:
    return type(rows), isinstance(rows, RemoteRows) and rows.is_tensordict


def _is_tensordict(value: object) -> bool:
    loaded = sys.modules.get("tensordict")
    return loaded is not None and isinstance(value, loaded.TensorDict)

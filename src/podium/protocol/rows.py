"""Batches of either kind, `DataProto` and tensordict's `TensorDict`: what a dispatch function needs to cut and join them.

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
from podium.protocol.data_proto import DataProto
from podium.protocol.meta import PADDING_ROWS_KEY

if TYPE_CHECKING:
    from tensordict import TensorDict

Rows: TypeAlias = "DataProto | TensorDict"
RowsT = TypeVar("RowsT", bound="DataProto | TensorDict")


def is_rows(value: object) -> TypeGuard[Rows]:
    """Whether the value is a batch of rows: a DataProto or a TensorDict (of one batch dim, which using it will check)."""
    return isinstance(value, DataProto) or _is_tensordict(value)


def num_rows(rows: Rows) -> int:
    """B. DataError for a TensorDict of more than one batch dim."""
    if isinstance(rows, DataProto):
        return len(rows)
    from podium.protocol import tensordicts

    return tensordicts.num_rows(rows)


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
    padded = [data._filled(torch.arange(*bounds[part : part + 2]), size) for part in range(whole, parts)]
    return [_like(rows, part) for part in (*views, *padded)], padding


def drop_last(rows: RowsT, count: int) -> RowsT:
    """The rows without the last `count`, as a view, and without the mark of padding: what is left is taken for real.

    DataError when there are fewer than `count` rows.
    """
    data = _proto(rows)
    if not 0 <= count <= len(data):
        raise DataError(f"{count} rows cannot be dropped from {len(data)}")
    kept = data[: len(data) - count]
    kept.meta_info.pop(PADDING_ROWS_KEY, None)
    return _like(rows, kept)


def pad_dataproto_to_divisor(rows: RowsT, size_divisor: int) -> tuple[RowsT, int]:
    """The rows as a new batch whose length `size_divisor` divides, and how many rows were added at the end.

    As everywhere, padding rows are copies of the last row, and `padding_mask` says which they are. No rows stay none.
    """
    if size_divisor < 1:
        raise DataError(f"rows are padded to a divisor of at least 1, got {size_divisor}")
    data = _proto(rows)
    missing = -len(data) % size_divisor
    padded = data._filled(torch.arange(len(data)), len(data) + missing) if missing else data.select()
    return _like(rows, padded), missing


def unpad_dataproto(rows: RowsT, pad_size: int) -> RowsT:
    """The rows without the last `pad_size`, as a view; the inverse of `pad_dataproto_to_divisor`."""
    data = _proto(rows)
    if not 0 <= pad_size <= len(data):
        raise DataError(f"{pad_size} rows of padding cannot be taken off {len(data)} rows")
    return _like(rows, data[: len(data) - pad_size])


def concat_rows(parts: Sequence[RowsT]) -> RowsT:
    """The rows of all parts in order, of the parts' kind, as `DataProto.concat`. DataError when they are of two kinds."""
    kinds = [isinstance(part, DataProto) for part in parts]
    if len(set(kinds)) > 1:
        names = ", ".join(f"part {number}: {type(part).__name__}" for number, part in enumerate(parts))
        raise DataError(f"concat: parts are of two kinds ({names}); let every rank return the same kind")
    joined = DataProto.concat([_proto(part) for part in parts])
    return _like(parts[0], joined)


def _proto(rows: Rows) -> DataProto:
    return rows if isinstance(rows, DataProto) else DataProto.from_tensordict(rows)


def _like(rows: RowsT, data: DataProto) -> RowsT:
    return cast(RowsT, data if isinstance(rows, DataProto) else data.to_tensordict())


def _is_tensordict(value: object) -> bool:
    loaded = sys.modules.get("tensordict")
    return loaded is not None and isinstance(value, loaded.TensorDict)

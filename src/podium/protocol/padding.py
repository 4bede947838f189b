"""What a padding row is worth: nothing. Whoever computes takes the real rows, and puts the padding back where rows are counted.

Padding rows fill up a shard or a mini-batch (`DataProto.padding_mask`). Making and marking them is in `rows` and `data_proto`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.columns import ObjectColumn, array_columns
from podium.protocol.data_proto import DataProto
from podium.protocol.meta import mark_padding


class MarkedRows(Protocol):
    """Rows that know which of them are padding: a `DataProto`, `RemoteRows`, or a future of them."""

    @property
    def padding_mask(self) -> Tensor: ...

    def select_idxs(self, index: Tensor, /) -> Self: ...


MarkedRowsT = TypeVar("MarkedRowsT", bound=MarkedRows)


def without_padding(rows: MarkedRowsT) -> MarkedRowsT:
    """The real rows in their order, without marks; the rows themselves where none is padding. DataError for stale marks.

    >>> rows = DataProto({"x": torch.arange(2)}).filled(torch.arange(2), 4)
    >>> rows.batch["x"].tolist(), without_padding(rows).batch["x"].tolist()
    ([0, 1, 1, 1], [0, 1])
    """
    is_padding_B = rows.padding_mask
    return rows.select_idxs(~is_padding_B) if bool(is_padding_B.any()) else rows


def with_padding(rows: DataProto, is_padding_B: Tensor) -> DataProto:
    """What was computed of the real rows, and an empty row, marked as padding, at each place that `is_padding_B` [B] marks.

    Empty: zeros in a dense column and in an array of numbers, length 0 in a jagged one, None among objects. DataError unless
    `rows` are as many as the places that are left.

    >>> padded = with_padding(DataProto({"x": torch.tensor([5, 6])}), torch.tensor([False, True, False]))
    >>> padded.batch["x"].tolist(), padded.padding_mask.tolist()
    ([5, 0, 6], [False, True, False])
    """
    if not isinstance(is_padding_B, Tensor) or is_padding_B.dtype != torch.bool or is_padding_B.dim() != 1:
        raise DataError(f"is_padding_B must be a tensor [B] of bools, got {is_padding_B!r}; make it by padding_mask")
    count = int(is_padding_B.sum())
    if len(rows) != len(is_padding_B) - count:
        raise DataError(
            f"{len(is_padding_B)} rows, {count} of them padding, need {len(is_padding_B) - count} rows, got {len(rows)}"
        )
    if not count:
        return rows
    empty = DataProto(
        {key: _empty_rows(column, count) for key, column in rows.batch.items()},
        {key: _empty_array(column, count) for key, column in array_columns(rows.non_tensor_batch).items()},
        marks_of_padding(torch.ones(count, dtype=torch.bool)),
    )
    places_B = torch.cat([(~is_padding_B).nonzero(), is_padding_B.nonzero()]).flatten()
    return DataProto.concat([rows, empty])[places_B.argsort()]


def marks_of_padding(is_padding_B: Tensor) -> Mapping[str, object]:
    """The meta that marks these rows [B] as padding; empty where none is."""
    meta: dict[str, object] = {}
    mark_padding(meta, is_padding_B.nonzero().flatten().tolist(), len(is_padding_B))
    return meta


def _empty_array(column: ObjectColumn, count: int) -> ObjectColumn:
    empty: ObjectColumn = np.zeros((count, *column.shape[1:]), column.dtype)
    if column.dtype == object:
        empty[...] = None
    return empty


def _empty_rows(column: Tensor, count: int) -> Tensor:
    if not jg.is_jagged(column):
        return column.new_zeros((count, *column.shape[1:]))
    values, offsets = jg.parts(column)
    return jg.like(column, values[:0], offsets.new_zeros(count + 1))

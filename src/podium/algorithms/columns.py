"""Columns of a batch as the mathematics takes them: one value for each response token, end to end."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto
from podium.protocol.jagged import is_jagged, parts, row_ids

BY_ROW = frozenset({"advantages"})
"""Columns that may be one number a row, [B]: any other one would be a mistake, as a row's log-prob for that of each token."""


def check_response_columns(batch: DataProto, keys: Iterable[str], *, like: str = "responses") -> None:
    """DataError for a column that is missing, not jagged [B, *] (nor [B], if it is `BY_ROW`), or whose rows are not as long as
    `like`'s.

    It names the first such row: of the whole batch, before the engine cuts it into micro-batches.
    """
    expected = parts(batch.batch[like])[1]
    for key in keys:
        if key not in batch.batch:
            raise DataError(f"the loss needs the column {key!r}; there are: {', '.join(batch.batch)}")
        column = batch.batch[key]
        if not is_jagged(column):
            if column.dim() != 1 or key not in BY_ROW:
                shape = "[B] or jagged [B, *]" if key in BY_ROW else "jagged [B, *]"
                raise DataError(f"column {key!r} must be {shape}, got a dense one of shape {list(column.shape)}")
            continue
        offsets = parts(column)[1]
        if offsets is not expected and not torch.equal(offsets, expected):
            lengths, own = expected.diff(), offsets.diff()
            row = int((lengths != own).nonzero()[0])
            raise DataError(
                f"row {row} of column {key!r} must have {int(lengths[row])} tokens as in {like!r}, got {int(own[row])}"
            )


def response_column(batch: DataProto, key: str, *, like: str = "responses") -> Tensor:
    """[N] values of a column, one for each response token, as the column `like` has them.

    A jagged column [B, *] has them already; the value of a dense one [B] is that of each token of its row. DataError as from
    `check_response_columns`.
    """
    check_response_columns(batch, [key], like=like)
    column = batch.batch[key]
    return parts(column)[0] if is_jagged(column) else column[row_ids(parts(batch.batch[like])[1])]

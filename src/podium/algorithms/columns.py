"""Columns of a batch as the mathematics takes them: one value for each response token, end to end."""

from __future__ import annotations

import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto
from podium.protocol.jagged import parts


def response_column(batch: DataProto, key: str, *, like: str = "responses") -> Tensor:
    """[N] values of a jagged column, one for each response token, as the column `like` has them.

    DataError when it is missing or its rows do not fit.
    """
    if key not in batch.batch:
        raise DataError(f"the loss needs the column {key!r}; there are: {', '.join(batch.batch)}")
    values, offsets = parts(batch.batch[key])
    responses = parts(batch.batch[like])[1]
    if offsets is not responses and not torch.equal(offsets, responses):
        lengths, expected = offsets.diff().tolist(), responses.diff().tolist()
        raise DataError(f"column {key!r} has rows of {lengths} tokens, their responses have {expected}")
    return values

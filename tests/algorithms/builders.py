"""Jagged columns of response tokens from lists."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from podium.protocol import DataProto
from podium.protocol.jagged import jagged, offsets_of


def policy_batch(
    mask: Sequence[Sequence[int]],
    old_log_probs: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    dtype: torch.dtype = torch.float64,
) -> DataProto:
    """The columns that a policy loss reads, and responses of the mask's lengths."""
    offsets = offsets_of(torch.tensor([len(row) for row in mask], dtype=torch.int64))
    responses = [[0] * len(row) for row in mask]
    columns = {
        "responses": (responses, torch.int64),
        "response_mask": (mask, torch.int64),
        "old_log_probs": (old_log_probs, dtype),
        "advantages": (advantages, dtype),
    }
    return DataProto(
        {
            name: jagged(torch.tensor([item for row in rows for item in row], dtype=kind), offsets)
            for name, (rows, kind) in columns.items()
        }
    )

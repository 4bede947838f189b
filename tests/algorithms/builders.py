"""Jagged columns of response tokens from lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from podium.algorithms import Aggregation, Outputs, PolicyLoss, PPOClip, RewardedRows
from podium.config import PPOClipConfig
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


def clipped(
    clip_low: float, clip_high: float, aggregation: Aggregation | None = None, *, clip_c: float | None = None, **terms: Any
) -> PolicyLoss:
    """The policy loss with PPO's clipped surrogate."""
    surrogate = PPOClip(PPOClipConfig(clip_low=clip_low, clip_high=clip_high, clip_c=clip_c))
    return PolicyLoss(surrogate, aggregation or Aggregation(), **terms)


def outputs(log_probs: Tensor, entropies: Tensor | None = None) -> Outputs:
    return {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropies": entropies}


def rewarded(rewards: Tensor, groups: Tensor, is_counted: Tensor | None = None, num_tokens: Tensor | None = None) -> RewardedRows:
    """Rows as an estimator of rows is given them."""
    is_counted = torch.ones(len(rewards), dtype=torch.bool) if is_counted is None else is_counted
    num_tokens = torch.ones(len(rewards), dtype=torch.int64) if num_tokens is None else num_tokens
    return RewardedRows(rewards.double(), groups, is_counted, num_tokens)

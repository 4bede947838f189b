"""Losses over response tokens: each returns a sum and a count, and says which rows it need not see.

Legend: N response tokens of B rows, end to end, as in the jagged columns of the batch. A loss object is frozen and
picklable. It never divides: the engine divides by the count of the whole mini-batch over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from podium.algorithms.aggregation import Aggregation
from podium.errors import DataError
from podium.observability import Max, Mean, Metrics
from podium.protocol import DataProto
from podium.protocol.jagged import parts, row_ids

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, as verl does: beyond it float32 overflows and the gradient would be NaN."""


@dataclass(frozen=True)
class LossSum:
    """What one micro-batch adds to the loss of its mini-batch.

    `total` is a scalar with a graph and `count` its share of the denominator. `terms` are the detached parts of `total` by
    name, to be divided by the same count; `metrics` carry weights of their own.
    """

    total: Tensor
    count: float
    terms: dict[str, float]
    metrics: Metrics = field(default_factory=Metrics)


class Loss(Protocol):
    """What an engine needs of a loss."""

    def count(self, batch: DataProto) -> float:
        """The denominator that these rows contribute, known before any forward pass."""
        ...

    def is_needed(self, batch: DataProto) -> Tensor:
        """[B] bool: rows that must be computed. The others have zero gradient; they still count."""
        ...

    def __call__(self, logprobs_N: Tensor, batch: DataProto) -> LossSum:
        """Loss of the rows of a micro-batch, given the float32 log-probs of their response tokens."""
        ...


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the response tokens that the jagged column `response_mask` keeps, token mean."""

    def count(self, batch: DataProto) -> float:
        return Aggregation().count(*parts(batch.batch["response_mask"]))

    def is_needed(self, batch: DataProto) -> Tensor:
        return torch.ones(len(batch), dtype=torch.bool)

    def __call__(self, logprobs_N: Tensor, batch: DataProto) -> LossSum:
        mask_N, offsets = _response_column(batch, "response_mask"), parts(batch.batch["responses"])[1]
        total, count = Aggregation().sum(-logprobs_N, mask_N, offsets), self.count(batch)
        return LossSum(total, count, {"loss": float(total.detach())})


@dataclass(frozen=True)
class PolicyLoss:
    """PPO's clipped surrogate with separate lower and upper clip, as GRPO and DAPO use it.

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - old_logprob), per response token.
    Source: Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; the asymmetric clip: Yu et al. 2025,
    "DAPO", section 3.1. Reads the jagged columns `response_mask`, `old_log_probs` and `advantages`; DataError for one that is
    missing or whose rows are not as long as the responses. What stands under a zero mask is never read: old log-probs and
    advantages may be infinite or NaN there.
    """

    clip_low: float
    clip_high: float
    aggregation: Aggregation = field(default_factory=Aggregation)
    drop_zero_advantage: bool = False

    def count(self, batch: DataProto) -> float:
        return self.aggregation.count(*parts(batch.batch["response_mask"]))

    def is_needed(self, batch: DataProto) -> Tensor:
        if not self.drop_zero_advantage:
            return torch.ones(len(batch), dtype=torch.bool)
        advantages_N, offsets = _response_column(batch, "advantages"), parts(batch.batch["responses"])[1]
        return torch.zeros(len(batch), dtype=torch.bool).index_put_((row_ids(offsets)[advantages_N != 0],), torch.tensor(True))

    def __call__(self, logprobs_N: Tensor, batch: DataProto) -> LossSum:
        mask_N, offsets = _response_column(batch, "response_mask"), parts(batch.batch["responses"])[1]
        is_kept_N = mask_N.bool()
        # Masked before exp and products, whose backward would turn the zero gradient of a masked inf or NaN into NaN.
        log_ratio_N = torch.where(is_kept_N, logprobs_N - _response_column(batch, "old_log_probs"), 0.0)
        log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages_N = torch.where(is_kept_N, _response_column(batch, "advantages"), 0.0)
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        total, count = self.aggregation.sum(losses_N, mask_N, offsets), self.count(batch)
        is_clipped_N = clipped_N.detach() * advantages_N < ratio_N.detach() * advantages_N
        metrics = _policy_metrics(log_ratio_N.detach(), is_clipped_N, is_kept_N)
        return LossSum(total, count, {"pg_loss": float(total.detach())}, metrics)


def _response_column(batch: DataProto, key: str) -> Tensor:
    """[N] values of a jagged column, one for each response token."""
    if key not in batch.batch:
        raise DataError(f"the loss needs the column {key!r}; there are: {', '.join(batch.batch)}")
    values, offsets = parts(batch.batch[key])
    responses = parts(batch.batch["responses"])[1]
    if offsets is not responses and not torch.equal(offsets, responses):
        lengths, expected = offsets.diff().tolist(), responses.diff().tolist()
        raise DataError(f"column {key!r} has rows of {lengths} tokens, their responses have {expected}")
    return values


def _policy_metrics(log_ratio_N: Tensor, is_clipped_N: Tensor, mask_N: Tensor) -> Metrics:
    log_ratio_N, tokens = log_ratio_N[mask_N], float(mask_N.sum())
    largest = float(log_ratio_N.abs().max()) if len(log_ratio_N) else 0.0
    return Metrics(
        {
            "pg_clipfrac": Mean(float(is_clipped_N[mask_N].sum()), tokens),
            "ppo_kl": Mean(float(-log_ratio_N.sum()), tokens),
            "log_ratio_abs_max": Max(largest),
        }
    )

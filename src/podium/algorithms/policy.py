"""The policy's loss: PPO's clipped surrogate as GRPO and its kin use it, with a KL term and an entropy bonus.

Legend: N response tokens of B rows, end to end. docs/algorithms.md has every formula with its source and its defaults.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from podium.algorithms.aggregation import Aggregation
from podium.algorithms.columns import check_response_columns, response_column
from podium.algorithms.kl import KL_ESTIMATORS, is_linearised, kl_estimates
from podium.algorithms.losses import LossSum, TokenOutputs
from podium.errors import ConfigError, DataError, unknown_name
from podium.observability import Max, Mean, Metrics
from podium.protocol import DataProto
from podium.protocol.jagged import parts, row_ids

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, as verl does: beyond it float32 overflows and the gradient would be NaN."""


@dataclass(frozen=True)
class KLTerm:
    """coef times the KL divergence from the reference policy, by an estimator of `KL_ESTIMATORS`."""

    coef: float
    kind: str = "low_var_kl"

    def __post_init__(self) -> None:
        if self.kind not in KL_ESTIMATORS:
            raise ConfigError(unknown_name("KL estimator", self.kind, KL_ESTIMATORS))


@dataclass(frozen=True)
class PolicyLoss:
    """pg_loss + kl.coef * kl_loss - entropy_coeff * entropy_loss, all three aggregated alike.

    pg_loss is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per response token, with r = exp(logprob - old_logprob);
    with the dual clip `clip_c`, at most -clip_c A where A < 0. Sources: Schulman et al. 2017, "Proximal Policy Optimization
    Algorithms", equation 7; the asymmetric clip: Yu et al. 2025, "DAPO", section 3.1; the dual clip: Ye et al. 2020,
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning"; the KL term of the loss: Shao
    et al. 2024, "DeepSeekMath", equation 3.

    Reads the jagged columns `response_mask` and `old_log_probs`, `ref_log_prob` with a KL term, and `advantages`: [B, *], or
    [B] where one holds for all tokens of a row. DataError for a column that is missing or whose rows are not as long as the
    responses. What stands under a zero mask is never read: it may be infinite or NaN there. Metrics, unlike terms, are over
    the tokens of the rows that must be computed, and so are the same whether or not the others are computed too.
    """

    clip_low: float
    clip_high: float
    aggregation: Aggregation = field(default_factory=Aggregation)
    drop_zero_advantage: bool = False
    clip_c: float | None = None
    entropy_coeff: float = 0.0
    calculate_entropy: bool = False
    kl: KLTerm | None = None

    def __post_init__(self) -> None:
        if self.clip_c is not None and not self.clip_c > 1:
            raise ConfigError(f"the dual clip is an upper bound of the ratio: clip_c must be more than 1, got {self.clip_c}")

    @property
    def needs_entropy(self) -> bool:
        return self.calculate_entropy or self.entropy_coeff != 0.0

    def count(self, batch: DataProto) -> float:
        read = ["response_mask", "old_log_probs", "advantages", *(["ref_log_prob"] if self.kl is not None else [])]
        check_response_columns(batch, read)
        return self.aggregation.count(response_column(batch, "response_mask"), parts(batch.batch["responses"])[1])

    def is_needed(self, batch: DataProto) -> Tensor:
        """All rows, but for those of zero advantage where these may be dropped and no other term concerns them."""
        if not self.drop_zero_advantage or self.entropy_coeff != 0.0 or self.kl is not None:
            return torch.ones(len(batch), dtype=torch.bool)
        advantages_N, offsets = response_column(batch, "advantages"), parts(batch.batch["responses"])[1]
        is_needed_B = torch.zeros(len(batch), dtype=torch.bool, device=advantages_N.device)
        is_needed_B[row_ids(offsets)[advantages_N != 0]] = True
        return is_needed_B

    def __call__(self, outputs: TokenOutputs, batch: DataProto) -> LossSum:
        mask_N, offsets = response_column(batch, "response_mask"), parts(batch.batch["responses"])[1]
        is_kept_N = mask_N.bool()
        is_told_N = is_kept_N & self.is_needed(batch).to(mask_N.device)[row_ids(offsets)]
        pg_N, metrics = self._surrogates(outputs.logprobs, batch, is_kept_N, is_told_N)
        pieces = [("pg_loss", 1.0, pg_N)]
        if self.needs_entropy:
            entropies_N = _entropies(outputs)
            metrics["entropy"] = _mean(entropies_N.detach(), is_told_N)
            pieces += [("entropy_loss", -self.entropy_coeff, entropies_N)] if self.entropy_coeff else []
        if self.kl is not None:
            kl_N, metrics["kl_clipfrac"] = _kl(self.kl, outputs.logprobs, batch, is_kept_N)
            pieces.append(("kl_loss", self.kl.coef, kl_N))
        sums = [(name, coef, self.aggregation.sum(values_N, mask_N, offsets)) for name, coef, values_N in pieces]
        total = torch.stack([coef * value for _, coef, value in sums if coef]).sum()  # 0 times an infinite KL would be NaN
        return LossSum(total, self.count(batch), {name: float(value.detach()) for name, _, value in sums}, metrics)

    def _surrogates(self, logprobs_N: Tensor, batch: DataProto, is_kept_N: Tensor, is_told_N: Tensor) -> tuple[Tensor, Metrics]:
        """[N] surrogate losses, and metrics of the tokens that are told of."""
        # Masked before exp and products, whose backward would turn the zero gradient of a masked inf or NaN into NaN.
        log_ratio_N = torch.where(is_kept_N, logprobs_N - response_column(batch, "old_log_probs"), 0.0)
        log_ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages_N = torch.where(is_kept_N, response_column(batch, "advantages"), 0.0)
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high)
        losses_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        is_clipped_N = clipped_N.detach() * advantages_N < ratio_N.detach() * advantages_N
        metrics = _policy_metrics(log_ratio_N.detach(), is_clipped_N, is_told_N)
        if self.clip_c is not None:
            is_bounded_N = (advantages_N < 0) & (ratio_N.detach() > self.clip_c)
            losses_N = torch.where(is_bounded_N, -self.clip_c * advantages_N, losses_N)
            metrics["pg_clipfrac_lower"] = _mean(is_bounded_N, is_told_N)
        return losses_N, metrics


def _entropies(outputs: TokenOutputs) -> Tensor:
    if outputs.entropies is None:
        raise DataError("the loss needs entropies: an engine must give them when needs_entropy is set")
    return outputs.entropies


def _kl(term: KLTerm, logprobs_N: Tensor, batch: DataProto, is_kept_N: Tensor) -> tuple[Tensor, Mean]:
    """The estimates, and the fraction of them that are not the formula's but its tangent's."""
    logprobs_N = torch.where(is_kept_N, logprobs_N, 0.0)
    ref_logprobs_N = torch.where(is_kept_N, response_column(batch, "ref_log_prob"), 0.0)
    is_far_N = is_linearised(term.kind, logprobs_N.detach(), ref_logprobs_N)
    return kl_estimates(term.kind, logprobs_N, ref_logprobs_N), _mean(is_far_N, is_kept_N)


def _mean(values_N: Tensor, is_told_N: Tensor) -> Mean:
    return Mean(float(values_N[is_told_N].sum()), float(is_told_N.sum()))


def _policy_metrics(log_ratio_N: Tensor, is_clipped_N: Tensor, is_told_N: Tensor) -> Metrics:
    told_N = log_ratio_N[is_told_N]
    return Metrics(
        {
            "pg_clipfrac": _mean(is_clipped_N, is_told_N),
            "ppo_kl": _mean(-log_ratio_N, is_told_N),
            "log_ratio_abs_max": Max(float(told_N.abs().max()) if len(told_N) else 0.0),
        }
    )

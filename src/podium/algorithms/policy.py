"""The policy's loss: a surrogate of the policy gradient for each token, and the terms that all surrogates share.

Legend: N response tokens of B rows, end to end. docs/algorithms.md has every formula with its source and its defaults. To add
a surrogate: a module beside this one with a subclass of `Surrogate`, and a row in `podium.parts.tables`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from podium.algorithms.aggregation import Aggregation
from podium.algorithms.columns import check_response_columns, response_column
from podium.algorithms.kl import KL_ESTIMATORS, is_linearised, kl_estimates
from podium.algorithms.losses import ENTROPIES, LOG_PROBS, LossSum, Outputs, output_of
from podium.config import PolicyLossConfig
from podium.errors import ConfigError, DataError, unknown_name
from podium.observability import Max, Mean, Metric, Metrics
from podium.protocol import DataProto
from podium.protocol.jagged import parts, row_ids

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this before exp, as verl does: beyond it float32 overflows and the gradient would be NaN."""


@dataclass(frozen=True)
class PolicyTokens:
    """What a surrogate is given of the tokens of a micro-batch. Values under a zero mask are 0, but for `logprobs_N`.

    `logprobs_N` and what is made of it have a graph. `is_kept_N` bool is the response mask. `is_reported_N` bool: the tokens that
    metrics are of, so that these do not depend on which rows of zero advantage are computed.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    is_kept_N: Tensor
    is_reported_N: Tensor
    offsets: Tensor
    column: Callable[[str], Tensor]
    """[N] values of a further column that the surrogate `reads`, one for each token; under a zero mask they may be anything."""
    output: Callable[[str], Tensor]
    """A further output of the model that the surrogate asks for in `outputs`."""

    def log_ratio(self) -> Tensor:
        """logprob - old_logprob, clamped to +-MAX_LOG_RATIO; 0 under a zero mask.

        Masked before exp and products, whose backward would turn the zero gradient of a masked inf or NaN into NaN.
        """
        log_ratio_N = torch.where(self.is_kept_N, self.logprobs_N - self.old_logprobs_N, 0.0)
        return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    def mean(self, values_N: Tensor) -> Mean:
        """A metric: the mean over the reported tokens."""
        return _mean(values_N, self.is_reported_N)

    def ratio_metrics(self, log_ratio_N: Tensor) -> Metrics:
        """How far the policy is from the one that the step began with."""
        reported_N = log_ratio_N[self.is_reported_N].detach()
        largest = float(reported_N.abs().max()) if len(reported_N) else 0.0
        return Metrics({"ppo_kl": self.mean(-log_ratio_N.detach()), "log_ratio_abs_max": Max(largest)})


@dataclass(frozen=True)
class Surrogate(ABC):
    """The policy loss of each token, whose gradient is that of the policy: a pure function, frozen and picklable.

    It is built from the section `actor.loss`. An attribute `Settings`, a subclass of `podium.config.PolicyLossConfig`, declares
    the keys of its own beside `name`.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    """Columns that it reads beside `response_mask`, `old_log_probs` and `advantages`."""
    outputs: ClassVar[tuple[str, ...]] = ()
    """Outputs of the model that it reads beside `log_probs`."""
    together: ClassVar[str | None] = None
    """As in `Loss.together`."""

    settings: PolicyLossConfig = field(default_factory=PolicyLossConfig)

    @abstractmethod
    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, Metrics]:
        """[N] losses, finite where the mask is 1, and metrics. A token of zero advantage must have zero gradient."""


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
    """pg_loss + kl.coef * kl_loss - entropy_coeff * entropy_loss, all three aggregated alike; pg_loss is the surrogate's.

    Source of the KL term of the loss: Shao et al. 2024, "DeepSeekMath", equation 3.

    Reads the jagged columns `response_mask` and `old_log_probs`, `ref_log_prob` with a KL term, and `advantages`: [B, *], or
    [B] where one holds for all tokens of a row. DataError for a column that is missing or whose rows are not as long as the
    responses. What stands under a zero mask is never read: it may be infinite or NaN there. Metrics, unlike terms, are over
    the tokens of the rows that must be computed, and so are the same whether or not the others are computed too.
    """

    surrogate: Surrogate
    aggregation: Aggregation = field(default_factory=Aggregation)
    drop_zero_advantage: bool = False
    entropy_coeff: float = 0.0
    calculate_entropy: bool = False
    kl: KLTerm | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        of_kl = ("ref_log_prob",) if self.kl is not None else ()
        return ("response_mask", "old_log_probs", "advantages", *of_kl, *self.surrogate.reads)

    @property
    def outputs(self) -> tuple[str, ...]:
        entropies = (ENTROPIES,) if self.calculate_entropy or self.entropy_coeff != 0.0 else ()
        return tuple(dict.fromkeys((LOG_PROBS, *entropies, *self.surrogate.outputs)))

    @property
    def together(self) -> str | None:
        return self.surrogate.together

    def count(self, batch: DataProto) -> float:
        check_response_columns(batch, [name for name in self.reads if name not in self.surrogate.reads])
        return self.aggregation.count(response_column(batch, "response_mask"), parts(batch.batch["responses"])[1])

    def is_needed(self, batch: DataProto) -> Tensor:
        """All rows, but for those of zero advantage where these may be dropped and no other term concerns them."""
        if not self.drop_zero_advantage or self.entropy_coeff != 0.0 or self.kl is not None:
            return torch.ones(len(batch), dtype=torch.bool)
        advantages_N, offsets = response_column(batch, "advantages"), parts(batch.batch["responses"])[1]
        is_needed_B = torch.zeros(len(batch), dtype=torch.bool, device=advantages_N.device)
        is_needed_B[row_ids(offsets)[advantages_N != 0]] = True
        return is_needed_B

    def __call__(self, outputs: Outputs, batch: DataProto) -> LossSum:
        mask_N, offsets = response_column(batch, "response_mask"), parts(batch.batch["responses"])[1]
        logprobs_N, is_kept_N = output_of(outputs, LOG_PROBS), mask_N.bool()
        is_reported_N = is_kept_N & self.is_needed(batch).to(mask_N.device)[row_ids(offsets)]
        found = self.surrogate(
            PolicyTokens(
                logprobs_N,
                old_logprobs_N=torch.where(is_kept_N, response_column(batch, "old_log_probs"), 0.0),
                advantages_N=torch.where(is_kept_N, response_column(batch, "advantages"), 0.0),
                is_kept_N=is_kept_N,
                is_reported_N=is_reported_N,
                offsets=offsets,
                column=lambda name: response_column(batch, name),
                output=lambda name: output_of(outputs, name),
            )
        )
        pg_N, metrics = _checked(type(self.surrogate).__name__, found, logprobs_N)
        pieces = [("pg_loss", 1.0, pg_N)]
        if ENTROPIES in self.outputs:
            entropies_N = output_of(outputs, ENTROPIES)
            metrics["entropy"] = _mean(entropies_N.detach(), is_reported_N)
            pieces += [("entropy_loss", -self.entropy_coeff, entropies_N)] if self.entropy_coeff else []
        if self.kl is not None:
            kl_N, metrics["kl_clipfrac"] = _kl(self.kl, logprobs_N, batch, is_kept_N)
            pieces.append(("kl_loss", self.kl.coef, kl_N))
        sums = [(name, coef, self.aggregation.sum(values_N, mask_N, offsets)) for name, coef, values_N in pieces]
        total = torch.stack([coef * value for _, coef, value in sums if coef]).sum()  # 0 times an infinite KL would be NaN
        return LossSum(total, self.count(batch), {name: float(value.detach()) for name, _, value in sums}, metrics)


def _checked(name: str, found: object, logprobs_N: Tensor) -> tuple[Tensor, Metrics]:
    """What a surrogate returned. DataError unless it is a loss for each token, with a gradient, and typed metrics."""
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and isinstance(found[1], Mapping)):
        raise DataError(f"{name} must return (losses, Metrics), got a {type(found).__name__}: return losses_N, Metrics({{...}})")
    losses_N, metrics = found
    if losses_N.shape != logprobs_N.shape:
        raise DataError(
            f"{name} must return losses of shape {list(logprobs_N.shape)}, one for each response token, got "
            f"{list(losses_N.shape)}; do not reduce them, actor.loss_agg_mode does"
        )
    if logprobs_N.requires_grad and not losses_N.requires_grad:
        raise DataError(f"{name} must return losses that depend on tokens.logprobs_N, got a tensor without a gradient")
    for key, metric in metrics.items():
        if not isinstance(metric, Metric):
            raise DataError(
                f"{name} must return typed metrics, got {key!r}: {metric!r}; write tokens.mean(values_N) or Max(number)"
            )
    return losses_N, Metrics(metrics)


def _kl(term: KLTerm, logprobs_N: Tensor, batch: DataProto, is_kept_N: Tensor) -> tuple[Tensor, Mean]:
    """The estimates, and the fraction of them that are not the formula's but its tangent's."""
    logprobs_N = torch.where(is_kept_N, logprobs_N, 0.0)
    ref_logprobs_N = torch.where(is_kept_N, response_column(batch, "ref_log_prob"), 0.0)
    is_far_N = is_linearised(term.kind, logprobs_N.detach(), ref_logprobs_N)
    return kl_estimates(term.kind, logprobs_N, ref_logprobs_N), _mean(is_far_N, is_kept_N)


def _mean(values_N: Tensor, is_reported_N: Tensor) -> Mean:
    return Mean(float(values_N[is_reported_N].sum()), float(is_reported_N.sum()))

"""Estimators of the KL divergence from a reference policy, token by token.

Each is a function of the difference d = logprob - ref_logprob of the token that was drawn, and estimates KL(policy || ref).
Source: Schulman 2020, "Approximating KL Divergence" (k1, k2, k3). docs/algorithms.md says which to take where.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from podium.algorithms.columns import response_column
from podium.errors import ConfigError, unknown_name
from podium.protocol import DataProto
from podium.protocol.jagged import parts, row_ids

KLEstimator = Callable[[Tensor], Tensor]

LINEAR_BEYOND = 20.0
"""Where k3's exponential goes on as its tangent: exp of a larger log-ratio would soon be infinite in float32."""


def _k1(d: Tensor) -> Tensor:
    return d


def _abs(d: Tensor) -> Tensor:
    return d.abs()


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d**2


def _k3(d: Tensor) -> Tensor:
    """exp(-d) - (-d) - 1, at least 0. Its gradient never dies: beyond LINEAR_BEYOND exp goes on along its tangent."""
    x = -d
    tangent = math.exp(LINEAR_BEYOND) * (1 + x - LINEAR_BEYOND) - 1
    return torch.where(x > LINEAR_BEYOND, tangent, x.clamp(max=LINEAR_BEYOND).expm1()) - x


def _straight_through(estimator: KLEstimator) -> KLEstimator:
    """The estimator's value with the gradient of k2, d: the one that moves the policy along the gradient of the KL itself."""

    def estimate(d: Tensor) -> Tensor:
        surrogate = _k2(d)
        return surrogate - surrogate.detach() + estimator(d).detach()

    return estimate


_PLAIN: dict[str, KLEstimator] = {"kl": _k1, "k1": _k1, "abs": _abs, "mse": _k2, "k2": _k2, "low_var_kl": _k3, "k3": _k3}

KL_ESTIMATORS: dict[str, KLEstimator] = _PLAIN | {f"{name}+": _straight_through(kl) for name, kl in _PLAIN.items()}
"""By verl's names; with a '+', straight-through: the value of the name, the gradient of k2."""


def kl_estimates(kind: str, logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """The KL divergence from the reference at each token, by the estimator of that name, with a graph to `logprobs_N`.

    ConfigError for an unknown name, with the nearest one.

    >>> kl_estimates("k3", torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1065])
    """
    if kind not in KL_ESTIMATORS:
        raise ConfigError(unknown_name("KL estimator", kind, KL_ESTIMATORS))
    return KL_ESTIMATORS[kind](logprobs_N - ref_logprobs_N)


def kl_of_tokens(kind: str, batch: DataProto) -> Tensor:
    """[N] float64: the KL divergence from the reference at each response token, 0 where the mask is 0.

    Of the policy that the step began with: reads the jagged columns `old_log_probs`, `ref_log_prob` and `response_mask`.
    """
    mask_N, _ = parts(batch.batch["response_mask"])
    columns = (response_column(batch, name, like="response_mask") for name in ("old_log_probs", "ref_log_prob"))
    old_N, ref_N = (torch.where(mask_N.bool(), column, 0.0) for column in columns)
    return kl_estimates(kind, old_N, ref_N).double()


def kl_of_rows(kind: str, batch: DataProto) -> Tensor:
    """[B] float64: `kl_of_tokens`, summed over each response."""
    offsets = parts(batch.batch["response_mask"])[1]
    return torch.zeros(len(batch), dtype=torch.float64).index_add_(0, row_ids(offsets), kl_of_tokens(kind, batch))


def is_linearised(kind: str, logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """[N] bool: where the estimate is not the formula's but its tangent's; only k3 has such a place."""
    is_k3 = KL_ESTIMATORS[kind.removesuffix("+")] is _k3
    return (ref_logprobs_N - logprobs_N > LINEAR_BEYOND) & is_k3

"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from podium.algorithms.policy import PolicyTokens, Surrogate
from podium.observability import Metrics


class Reinforce(Surrogate):
    """-A logprob per response token: no ratio and no clip, so it is for one optimizer step on fresh responses.

    Source: Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning",
    equation 4.
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, Metrics]:
        losses_N = -tokens.advantages_N * torch.where(tokens.is_kept_N, tokens.logprobs_N, 0.0)
        return losses_N, tokens.ratio_metrics(tokens.log_ratio())

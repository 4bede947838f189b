"""PPO's clipped surrogate, as GRPO and its kin use it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from podium.algorithms.policy import PolicyTokens, Surrogate
from podium.config import PPOClipConfig
from podium.observability import Metrics


@dataclass(frozen=True)
class PPOClip(Surrogate):
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per response token, with r = exp(logprob - old_logprob).

    With the dual clip `clip_c`, at most -clip_c A where A < 0. Sources: Schulman et al. 2017, "Proximal Policy Optimization
    Algorithms", equation 7; the asymmetric clip: Yu et al. 2025, "DAPO", section 3.1; the dual clip: Ye et al. 2020,
    "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning".
    """

    settings: PPOClipConfig = field(default_factory=PPOClipConfig)

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, Metrics]:
        clip, advantages_N, log_ratio_N = self.settings, tokens.advantages_N, tokens.log_ratio()
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1 - clip.clip_low, 1 + clip.clip_high)
        losses_N = -torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N)
        is_clipped_N = clipped_N.detach() * advantages_N < ratio_N.detach() * advantages_N
        metrics = Metrics({"pg_clipfrac": tokens.mean(is_clipped_N), **tokens.ratio_metrics(log_ratio_N)})
        if clip.clip_c is not None:
            is_bounded_N = (advantages_N < 0) & (ratio_N.detach() > clip.clip_c)
            losses_N = torch.where(is_bounded_N, -clip.clip_c * advantages_N, losses_N)
            metrics["pg_clipfrac_lower"] = tokens.mean(is_bounded_N)
        return losses_N, metrics

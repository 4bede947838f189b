"""GRPO: each response against the other responses to its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from podium.algorithms.advantages import AdvantageEstimator, Advantages, GroupStatistics, RewardedRows, within_counted
from podium.config import GRPOConfig


@dataclass(frozen=True)
class GRPO(AdvantageEstimator):
    """(reward - mean of its group) / (standard deviation of its group + 1e-6).

    The deviation is the unbiased one (n - 1). Without `norm_by_std`, the centred reward alone. A group whose rewards are all
    equal, and so a group of one, gets exactly 0: no row of it is better than its baseline.
    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2 (outcome supervision); Liu et al. 2025, "Understanding
    R1-Zero-Like Training", for the variant.
    """

    min_samples: ClassVar[int] = 2

    settings: GRPOConfig = field(default_factory=GRPOConfig)

    def __call__(self, rows: RewardedRows) -> Advantages:
        rewards, groups = rows.rewards[rows.is_counted_B], rows.groups_B[rows.is_counted_B]
        statistics = GroupStatistics.of(rewards, groups)
        centred = rewards - statistics.mean_B
        if self.settings.norm_by_std:
            centred = centred / (statistics.std(centred) + 1e-6)
        return Advantages(within_counted(rows, torch.where(statistics.is_varied_B, centred, 0.0)))

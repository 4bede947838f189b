"""RLOO: each response against the mean of the other responses to its prompt."""

from __future__ import annotations

from typing import ClassVar

import torch

from podium.algorithms.advantages import AdvantageEstimator, Advantages, GroupStatistics, RewardedRows, within_counted


class RLOO(AdvantageEstimator):
    """reward - mean of the other rewards of its group = (reward - mean of the group) n / (n - 1), for n rows that count.

    A group whose rewards are all equal, and so a group of one, gets exactly 0.
    Source: Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in
    LLMs", section 3.
    """

    min_samples: ClassVar[int] = 2

    def __call__(self, rows: RewardedRows) -> Advantages:
        rewards, groups = rows.rewards[rows.is_counted_B], rows.groups_B[rows.is_counted_B]
        statistics = GroupStatistics.of(rewards, groups)
        left_out = (rewards - statistics.mean_B) * statistics.count_B / (statistics.count_B - 1).clamp(min=1)
        return Advantages(within_counted(rows, torch.where(statistics.is_varied_B, left_out, 0.0)))

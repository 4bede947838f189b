"""Parts as a user writes them, in one file of their own: estimators and policy losses that tests choose by its path."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from podium.algorithms import AdvantageEstimator, Advantages, PolicyTokens, RewardedRows, Surrogate
from podium.config import AdvantageConfig, PolicyLossConfig
from podium.observability import Metrics


class Centred(AdvantageEstimator):
    """The reward minus a constant, for each row."""

    class Settings(AdvantageConfig):
        baseline: float = 0.5
        """Taken from each reward."""

    settings: Settings

    def __call__(self, rows: RewardedRows) -> Advantages:
        return Advantages(torch.where(rows.is_counted_B, rows.rewards - self.settings.baseline, 0.0))


class RewardToGo(AdvantageEstimator):
    """The sum of the rewards of a token and those behind it in its row."""

    level = "token"
    gives_returns = True

    def __call__(self, rows: RewardedRows) -> Advantages:
        assert rows.offsets is not None
        ends = rows.offsets.tolist()
        to_go = [rows.rewards[start:stop].flip(0).cumsum(0).flip(0) for start, stop in pairwise(ends)]
        return Advantages(torch.cat(to_go), returns=torch.cat(to_go))


class NeedsCritic(RewardToGo):
    """Reads the values of a critic."""

    reads = ("values",)


class Unclipped(Surrogate):
    """The ratio times the advantage, with a factor."""

    class Settings(PolicyLossConfig):
        factor: float = 1.0
        """Times the loss."""

    settings: Settings

    def __call__(self, tokens: PolicyTokens) -> tuple[Tensor, Metrics]:
        log_ratio_N = tokens.log_ratio()
        return -self.settings.factor * log_ratio_N.exp() * tokens.advantages_N, tokens.ratio_metrics(log_ratio_N)

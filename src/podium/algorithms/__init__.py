"""The mathematics of post-training: pure functions of tensors."""

from podium.algorithms.advantages import (
    AdvantageEstimator,
    Advantages,
    GroupStatistics,
    RewardedRows,
    group_ids,
    within_counted,
)
from podium.algorithms.aggregation import Aggregation
from podium.algorithms.entropy import logprobs_and_entropies
from podium.algorithms.grpo import GRPO
from podium.algorithms.kl import KL_ESTIMATORS, kl_estimates, kl_of_rows, kl_of_tokens
from podium.algorithms.losses import ENTROPIES, LOG_PROBS, Loss, LossSum, Outputs, SFTLoss, output_of
from podium.algorithms.policy import KLTerm, PolicyLoss, PolicyTokens, Surrogate
from podium.algorithms.ppo_clip import PPOClip
from podium.algorithms.reinforce import Reinforce
from podium.algorithms.rloo import RLOO

__all__ = [
    "ENTROPIES",
    "GRPO",
    "KL_ESTIMATORS",
    "LOG_PROBS",
    "RLOO",
    "AdvantageEstimator",
    "Advantages",
    "Aggregation",
    "GroupStatistics",
    "KLTerm",
    "Loss",
    "LossSum",
    "Outputs",
    "PPOClip",
    "PolicyLoss",
    "PolicyTokens",
    "Reinforce",
    "RewardedRows",
    "SFTLoss",
    "Surrogate",
    "group_ids",
    "kl_estimates",
    "kl_of_rows",
    "kl_of_tokens",
    "logprobs_and_entropies",
    "output_of",
    "within_counted",
]

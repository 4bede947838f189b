"""The mathematics of post-training: pure functions of tensors."""

from podium.algorithms.advantages import group_ids, grpo_advantages
from podium.algorithms.aggregation import Aggregation
from podium.algorithms.entropy import logprobs_and_entropies
from podium.algorithms.kl import KL_ESTIMATORS, kl_estimates, kl_of_rows
from podium.algorithms.losses import Loss, LossSum, SFTLoss, TokenOutputs
from podium.algorithms.policy import KLTerm, PolicyLoss

__all__ = [
    "KL_ESTIMATORS",
    "Aggregation",
    "KLTerm",
    "Loss",
    "LossSum",
    "PolicyLoss",
    "SFTLoss",
    "TokenOutputs",
    "group_ids",
    "grpo_advantages",
    "kl_estimates",
    "kl_of_rows",
    "logprobs_and_entropies",
]

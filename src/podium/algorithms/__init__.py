"""The mathematics of post-training: pure functions of tensors."""

from podium.algorithms.advantages import group_ids, grpo_advantages
from podium.algorithms.aggregation import Aggregation
from podium.algorithms.losses import Loss, LossSum, PolicyLoss, SFTLoss

__all__ = ["Aggregation", "Loss", "LossSum", "PolicyLoss", "SFTLoss", "group_ids", "grpo_advantages"]

"""Generate with the policy of the moment."""

from podium.rollout.base import BaseRollout
from podium.rollout.context import RolloutContext

__all__ = ["BaseRollout", "RolloutContext"]

"""Generate with the policy of the moment."""

from podium.rollout.base import BaseRollout
from podium.rollout.registry import build_rollout

__all__ = ["BaseRollout", "build_rollout"]

"""What a rank offers the driver: thin glue between `@register` and the engines."""

from podium.workers.actor_rollout_ref import ActorRolloutRefWorker, PolicySpec, Role
from podium.workers.training import TrainingSpec, TrainingWorker

__all__ = ["ActorRolloutRefWorker", "PolicySpec", "Role", "TrainingSpec", "TrainingWorker"]

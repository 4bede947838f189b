"""What a rank offers the driver: thin glue between `@register` and the engines."""

from podium.workers.actor_rollout_ref import ActorRolloutRefWorker, PolicySpec, Role, policy_loss
from podium.workers.fields import FIELDS
from podium.workers.profiling import DistProfiler, DistProfilerExtension
from podium.workers.training import TrainingSpec, TrainingWorker

__all__ = [
    "FIELDS",
    "ActorRolloutRefWorker",
    "DistProfiler",
    "DistProfilerExtension",
    "PolicySpec",
    "Role",
    "TrainingSpec",
    "TrainingWorker",
    "policy_loss",
]

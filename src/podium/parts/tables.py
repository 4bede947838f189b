"""All tables of parts. To add a part of ours, add one row: its name, and `package.module:Name` of its class or function.

The rows are text, so that this module imports nothing; a part's module is imported when the part is used.
"""

from __future__ import annotations

from typing import Final

from podium.parts.table import PartTable, Row

ADVANTAGE_ESTIMATORS: Final = PartTable(
    "advantage estimator",
    {
        "grpo": Row("podium.algorithms.grpo:GRPO", settings="podium.config:GRPOConfig"),
        "rloo": "podium.algorithms.rloo:RLOO",
    },
    base="podium.algorithms:AdvantageEstimator",
)
"""`algorithm.adv_estimator`."""

ENGINES: Final = PartTable(
    "training engine",
    {"fsdp2": Row("podium.engines.fsdp2:FSDP2Engine", settings="podium.config:FSDP2Config")},
    base="podium.engines:BaseEngine",
)
"""`actor.engine`."""

POLICY_LOSSES: Final = PartTable(
    "policy loss",
    {
        "ppo_clip": Row("podium.algorithms.ppo_clip:PPOClip", settings="podium.config:PPOClipConfig"),
        "reinforce": "podium.algorithms.reinforce:Reinforce",
    },
    base="podium.algorithms:Surrogate",
)
"""`actor.loss`."""

ROLLOUTS: Final = PartTable(
    "rollout engine",
    {"hf": Row("podium.rollout.hf:HFRollout", settings="podium.config:HFRolloutConfig")},
    base="podium.rollout:BaseRollout",
)
"""`rollout`."""

TRACKERS: Final = PartTable(
    "tracker",
    {
        "tensorboard": Row(
            "podium.observability.trackers.tensorboard:TensorBoardTracker",
            settings="podium.config:TrackerConfig",
            package="tensorboard",
            extra="tensorboard",
        ),
        **{
            name: Row(
                f"podium.observability.trackers.{name}:{cls}Tracker",
                settings=f"podium.observability.trackers.{name}:{cls}Settings",
                package=name,
                extra=name,
            )
            for name, cls in {"wandb": "Wandb", "mlflow": "MLflow", "swanlab": "SwanLab", "trackio": "Trackio"}.items()
        },
    },
    base="podium.observability:Tracker",
)
"""`trainer.trackers`, a list."""

REWARDS: Final = PartTable("reward function", {})
"""`reward.function`: a function of a user, with verl's signature. Tasks bring their own verifiers."""

TASKS: Final = PartTable(
    "task",
    {"files": Row("podium.tasks.files:FileTask", settings="podium.config:TaskConfig")},
    others=Row(
        "podium.tasks.reasoning_gym:ReasoningGymTask",
        settings="podium.config:TaskConfig",
        package="reasoning_gym",
        extra="tasks",
    ),
)
"""`task`: rows of files, the datasets of reasoning-gym by their own names, or a class or function of a user."""

TRAINERS: Final = PartTable(
    "trainer",
    {"ppo": Row("podium.trainers.ppo:PPOTrainer", settings="podium.config:TrainerConfig")},
    base="podium.trainers:Trainer",
)
"""`trainer`."""

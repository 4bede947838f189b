"""All tables of parts. To add a part of ours, add one row: its name, and `package.module:Name` of its class or function.

The rows are text, so that this module imports nothing; a part's module is imported when the part is used.
"""

from __future__ import annotations

from typing import Final

from podium.parts.table import PartTable, Row

ENGINES: Final = PartTable(
    "training engine",
    {"fsdp2": Row("podium.engines.fsdp2:FSDP2Engine", settings="podium.config:FSDP2Config")},
    base="podium.engines:BaseEngine",
)
"""`actor.engine`."""

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

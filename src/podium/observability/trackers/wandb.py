"""Weights & Biases. Account and server are W&B's own settings (`wandb login`, WANDB_API_KEY, WANDB_BASE_URL)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from podium.config import Json, TrackerConfig
from podium.observability.sample import Sample
from podium.observability.tracker import RunInfo, Status, Tracker


class WandbSettings(TrackerConfig):
    """The settings of the tracker `wandb`."""

    project: str = "podium"
    """Project of the runs."""
    entity: str | None = None
    """User or team; null: the account's default."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes `wandb/` in the run directory for `wandb sync`; null: as WANDB_MODE says, or else online."""
    init: dict[str, Json] = {}
    """Further arguments of `wandb.init`, e.g. `{tags: [a, b]}`."""


class WandbTracker(Tracker):
    """A run of W&B for each phase, in a group for the run. Steps that W&B has already are left out by W&B."""

    Settings = WandbSettings

    def __init__(self, settings: WandbSettings) -> None:
        super().__init__(settings)
        self._own = settings
        self._wandb = importlib.import_module("wandb")

    def start(self, run: RunInfo) -> None:
        arguments: dict[str, Any] = {
            "project": self._own.project,
            "entity": self._own.entity,
            "mode": self._own.mode,
            "id": run.run_id,
            "resume": "allow",
            "name": run.name,
            "group": run.group,
            "job_type": run.phase,
            "dir": str(run.folder),
            "config": dict(run.config),
            "reinit": "create_new",
            "settings": self._wandb.Settings(silent=True, console="off"),  # the terminal shows the run's own progress
        }
        self._run: Any = self._wandb.init(**arguments | self._own.init)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        table = self._wandb.Table(columns=list(samples[0].named), data=[list(sample.named.values()) for sample in samples])
        self._run.log({"samples": table}, step=step, commit=False)

    def finish(self, status: Status) -> None:
        self._run.finish(exit_code=0 if status == "finished" else 1)

"""Trackio: a database of this machine (`trackio show`), or a Space of the Hugging Face hub."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from podium.config import Json, TrackerConfig
from podium.observability.sample import Sample
from podium.observability.tracker import RunInfo, Status, Tracker


class TrackioSettings(TrackerConfig):
    """The settings of the tracker `trackio`."""

    project: str = "podium"
    """Project of the runs."""
    space_id: str | None = None
    """Space that shows the runs, `user/name`; null: this machine, in TRACKIO_DIR or the cache of the hub."""
    init: dict[str, Json] = {}
    """Further arguments of `trackio.init`."""


class TrackioTracker(Tracker):
    """A run of Trackio for each phase, in a group for the run. Trackio finds runs by name, so the run's id is part of it."""

    Settings = TrackioSettings

    def __init__(self, settings: TrackioSettings) -> None:
        super().__init__(settings)
        self._own = settings
        self._trackio = importlib.import_module("trackio")

    def start(self, run: RunInfo) -> None:
        arguments: dict[str, Any] = {
            "project": self._own.project,
            "space_id": self._own.space_id,
            "name": f"{run.name}-{run.run_id}",
            "resume": "allow",
            "group": run.group,
            "config": dict(run.config),
            "embed": False,
        }
        self._run: Any = self._trackio.init(**arguments | self._own.init)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        table = self._trackio.Table(columns=list(samples[0].named), data=[list(sample.named.values()) for sample in samples])
        self._run.log({"samples": table}, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish()

"""SwanLab. The account is SwanLab's own setting (`swanlab login`, SWANLAB_API_KEY). It has one open run a process."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from podium.config import Json, TrackerConfig
from podium.observability.sample import Sample
from podium.observability.tracker import RunInfo, Status, Tracker

FOLDER: Final = "swanlog"
STATES: Final[Mapping[Status, str]] = {"finished": "success", "failed": "crashed", "interrupted": "aborted"}


class SwanLabSettings(TrackerConfig):
    """The settings of the tracker `swanlab`."""

    project: str = "podium"
    """Project of the runs."""
    workspace: str | None = None
    """User or organisation; null: the account's own."""
    mode: Literal["online", "offline", "local"] | None = None
    """`offline` writes `swanlog/` in the run directory for `swanlab sync`, `local` for `swanlab watch`; null: SwanLab's own
    setting, or else online."""
    init: dict[str, Json] = {}
    """Further arguments of `swanlab.init`, e.g. `{tags: [a, b]}`."""


class SwanLabTracker(Tracker):
    """A run of SwanLab for each phase, in a group for the run; samples are texts."""

    Settings = SwanLabSettings

    def __init__(self, settings: SwanLabSettings) -> None:
        super().__init__(settings)
        self._own = settings
        self._swanlab = importlib.import_module("swanlab")

    def start(self, run: RunInfo) -> None:
        arguments: dict[str, Any] = {
            "project": self._own.project,
            "workspace": self._own.workspace,
            "mode": self._own.mode,
            "id": run.run_id,
            "resume": "allow",
            "name": run.name,
            "group": run.group,
            "job_type": run.phase,
            "log_dir": str(run.folder / FOLDER),
            "config": dict(run.config),
            "reinit": True,
        }
        self._run: Any = self._swanlab.init(**arguments | self._own.init)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        texts = [self._swanlab.Text(f"{each.prompt}\n{each.response}", caption=f"{each.uid}, {each.reward}") for each in samples]
        self._run.log({"samples": texts}, step=step)

    def finish(self, status: Status) -> None:
        self._run.finish(STATES[status])

"""TensorBoard: event files in `tb/` of the run directory, which `tensorboard --logdir runs` shows."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from podium.config import TrackerConfig
from podium.observability.sample import Sample
from podium.observability.tracker import RunInfo, Status, Tracker

FOLDER: Final = "tb"


class TensorBoardTracker(Tracker):
    """Scalars, and samples as text."""

    def __init__(self, settings: TrackerConfig) -> None:
        super().__init__(settings)
        self._module = importlib.import_module("torch.utils.tensorboard")

    def start(self, run: RunInfo) -> None:
        """Events of later steps, which a run that was killed had logged, are hidden."""
        purge_step = None if run.resumed_step is None else run.resumed_step + 1
        self._writer: Any = self._module.SummaryWriter(str(run.folder / FOLDER), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for place, sample in enumerate(samples):
            text = f"{sample.uid}, reward {sample.reward}\n\n{_as_code(sample.prompt)}\n\n{_as_code(sample.response)}"
            self._writer.add_text(f"samples/{place}", text, step)

    def finish(self, status: Status) -> None:
        self._writer.close()


def _as_code(text: str) -> str:
    """A block of Markdown that shows the text as it is."""
    return "\n".join(f"    {line}" for line in text.split("\n"))

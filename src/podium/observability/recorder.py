"""What a run leaves on disk as it goes: `metrics.jsonl`, `samples.jsonl`, and copies for trackers such as TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from podium.errors import DataError
from podium.observability.jsonl import JsonLines, last_step
from podium.observability.trackers import Isolated, TensorBoardTracker, Tracker

METRICS_FILE: Final = "metrics.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"
TENSORBOARD_FOLDER: Final = "tb"

CLOSE_TIMEOUT_S: Final = 10.0
"""How long the end of a run waits for a tracker."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response worth keeping: enough to trace it to its prompt, its weights and its step."""

    uid: str
    """The prompt's id; all samples of a prompt share it."""
    sample_index: int
    """Which of the prompt's samples."""
    weight_version: int
    """Version of the weights that wrote the response."""
    prompt: str
    response: str
    answer: str | None = None
    """What would have been right, where that is known."""
    reward: float | None = None
    """None when scoring failed."""
    split: str = "train"
    """`train`, `validation` or `held_out`."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the row; numpy and torch scalars become plain numbers. The names above win."""


class Recorder:
    """Writes a run's metrics and samples. The local files come first; a tracker's trouble is one warning in the log.

    Use it as a context manager, or `close()` it: that gives trackers time to finish.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool = False, trackers: Sequence[Tracker] = ()) -> None:
        """Open (or go on with) the files of `run_dir`. MissingExtraError when tensorboard is asked for and not installed."""
        own = [TensorBoardTracker(run_dir / TENSORBOARD_FOLDER)] if tensorboard else []
        self._metrics = JsonLines(run_dir / METRICS_FILE)
        self._samples = JsonLines(run_dir / SAMPLES_FILE)
        self._last_step = last_step(self._metrics.path)
        self._trackers = [Isolated(tracker) for tracker in (*own, *trackers)]

    @property
    def last_step(self) -> int | None:
        """The step of the last row, also of one written before this recorder was opened; None without rows."""
        return self._last_step

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the row of a step: `step`, then the metrics as given; non-finite values as null.

        Steps only go up. DataError for a step that has its row already, or comes before the last one.
        """
        if self._last_step is not None and step <= self._last_step:
            raise DataError(
                f"step {step} cannot follow step {self._last_step} in {self._metrics.path}; "
                f"to go back, truncate_after({step - 1}) first"
            )
        if "step" in metrics:
            raise DataError("a metric cannot be called 'step': that is the row's own step")
        floats = {name: float(value) for name, value in metrics.items()}
        self._metrics.append({"step": step, **floats})
        self._last_step = step
        for tracker in self._trackers:
            tracker.log(step, floats)

    def log_samples(self, step: int, samples: Iterable[Sample]) -> None:
        """Append one row per sample."""
        for sample in samples:
            named = {"step": step} | {name: value for name, value in vars(sample).items() if name != "extra"}
            self._samples.append({**named, **sample.extra, **named})

    def truncate_after(self, step: int) -> None:
        """Forget every row after `step`, for a run that resumes from the checkpoint of that step."""
        for file in (self._samples, self._metrics):
            file.truncate_after(step)
        self._last_step = last_step(self._metrics.path)

    def close(self) -> None:
        """Close the files, then wait for the trackers, each for a limited time."""
        self._metrics.close()
        self._samples.close()
        for tracker in self._trackers:
            tracker.close(CLOSE_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

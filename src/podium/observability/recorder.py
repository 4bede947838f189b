"""What a run leaves on disk as it goes, `metrics.jsonl` and `samples.jsonl`, with copies for trackers such as TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from podium.errors import DataError
from podium.observability.isolation import Trackers
from podium.observability.jsonl import JsonLines, last_step
from podium.observability.sample import Sample
from podium.observability.tracker import Status

METRICS_FILE: Final = "metrics.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"


class Recorder:
    """Writes a run's metrics and samples. The local files come first; a tracker's trouble is one warning in the log.

    Use it as a context manager, or `close()` it: that gives trackers time to finish.
    """

    def __init__(self, run_dir: Path, *, trackers: Trackers | None = None) -> None:
        """Open (or go on with) the files of `run_dir`; `begin` starts the trackers."""
        self._metrics = JsonLines(run_dir / METRICS_FILE)
        self._samples = JsonLines(run_dir / SAMPLES_FILE)
        self._last_step = last_step(self._metrics.path)
        self._trackers = trackers

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
                f"step {step} cannot follow step {self._last_step} in {self._metrics.path}; to go back, begin({step - 1}) first"
            )
        if "step" in metrics:
            raise DataError("a metric cannot be called 'step': that is the row's own step")
        floats = {name: float(value) for name, value in metrics.items()}
        self._metrics.append({"step": step, **floats})
        self._last_step = step
        if self._trackers is not None:
            self._trackers.log(step, floats)

    def log_samples(self, step: int, samples: Iterable[Sample]) -> None:
        """Append one row per sample."""
        kept = list(samples)
        for sample in kept:
            named = {"step": step, **sample.named}
            self._samples.append({**named, **sample.extra, **named})
        if self._trackers is not None:
            self._trackers.log_samples(step, kept)

    def begin(self, done_step: int | None) -> None:
        """Begin a phase, or go on with one from the checkpoint of `done_step`: forget every later row, and start the trackers."""
        for file in (self._samples, self._metrics):
            file.truncate_after(-1 if done_step is None else done_step)
        self._last_step = last_step(self._metrics.path)
        if self._trackers is not None:
            self._trackers.start(done_step)

    def close(self, status: Status = "finished") -> None:
        """Close the files, then let the trackers finish, for a limited time."""
        self._metrics.close()
        self._samples.close()
        if self._trackers is not None:
            self._trackers.finish(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close("finished" if kind is None else "interrupted" if issubclass(kind, KeyboardInterrupt) else "failed")

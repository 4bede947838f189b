"""What stands around a trainer's steps: the files of the run directory, the display, timing and checkpoints."""

from __future__ import annotations

import logging
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from podium.checkpoint import CheckpointStore, Manifest, Saver, sync, write_manifest
from podium.errors import CheckpointError
from podium.observability import (
    CPU_S,
    DRIVER_MB,
    METRICS_FILE,
    STEP_S,
    THROUGHPUT,
    TOKENS_PER_S,
    Last,
    Metrics,
    Progress,
    Recorder,
    Sample,
    Spans,
    Trackers,
)
from podium.single_controller import Traffic, recorded_traffic
from podium.trainers.health import HealthCheck
from podium.trainers.profiling import StepProfiler
from podium.trainers.roles import Groups
from podium.trainers.run_directory import RunDirectory
from podium.trainers.traffic import StepTraffic, write_traffic

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

IDLE_LIMIT_S = 20.0
"""How long an interrupted run waits for ranks that are still at a call, before it gives up saving: schedulers often kill after
30 s."""


@dataclass(frozen=True)
class Measured:
    """What a step took of this process: of all its threads, not of its workers' processes."""

    wall_s: float
    cpu_s: float


class Session:
    """One phase of a run (the warm-up, or RL), from its first step or from a checkpoint.

    A step's row is written once, after the step and before its checkpoint; so a run that is killed at any moment and resumed
    leaves the same rows as one that was not.
    """

    def __init__(
        self,
        run: RunDirectory,
        progress: Progress,
        *,
        num_ranks: int,
        save_freq: int,
        keep: int,
        total_steps: int,
        trackers: Trackers | None = None,
        health_checks: Sequence[HealthCheck] = (),
    ) -> None:
        self.run, self.total_steps, self._num_ranks = run, total_steps, num_ranks
        self._progress, self._save_freq, self._health_checks = progress, save_freq, health_checks
        self._store = CheckpointStore(run.checkpoints, keep=keep)
        self._recorder = Recorder(run.path, trackers=trackers)
        self.spans = Spans(progress.activity)
        self._groups = Groups({})
        self._measured: Measured | None = None
        self._finished_step = self._saved_step = -1
        self._is_updating = False
        self.profiler: StepProfiler | None = None
        """Records single steps: from what is logged of the step before to what is logged of their own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._recorder.__exit__(kind, error, trace)

    def begin(self, phase: str, groups: Groups, *, saves_step_zero: bool = False) -> int | None:
        """Begin a phase with its groups: load the newest complete checkpoint, if any, and cut what was logged after it.

        Returns the checkpoint's step.

        CheckpointError when a phase that `saves_step_zero` has logged later steps and no checkpoint is left: going on would
        begin again in silence. Rows of metrics that are gone cost a warning.
        """
        self._groups = groups
        checkpoint = self._store.latest()
        done = checkpoint.step if checkpoint else None
        for reason in self._store.skipped:
            logger.warning("a checkpoint is not used: %s", reason)
        if checkpoint:
            groups.load(checkpoint.path.absolute())
            self._store.discard_after(checkpoint.step)
        elif saves_step_zero and self._recorder.last_step:
            raise CheckpointError(
                f"{self.run.checkpoints} holds no checkpoint, but step {self._recorder.last_step} was logged: "
                "put the checkpoints back, or start a new run"
            )
        last = self._recorder.last_step
        if done and (last is None or last < done):
            logger.warning(
                "step %d of %s is saved, but %s %s; the rows in between are lost, the run goes on without them",
                done,
                self.run.path,
                METRICS_FILE,
                "is gone or empty" if last is None else f"ends at step {last}",
            )
        self._recorder.begin(done)
        self._progress.start_phase(phase, self.total_steps, done_steps=done or 0)
        if done is not None:
            self._begin_step(done + 1)
        self._finished_step = self._saved_step = -1 if done is None else done
        return done

    @contextmanager
    def saved_when_interrupted(self) -> Iterator[None]:
        """Around the steps: Ctrl-C and SIGTERM save the last finished step, unless the ranks have begun to change its state."""
        try:
            yield
        except KeyboardInterrupt:
            self._save_finished()
            raise

    def updating(self) -> None:
        """From here to the step's end the ranks hold the state of no step."""
        self._is_updating = True

    @contextmanager
    def step(self) -> Iterator[Traffic]:
        """Around a step's own phases: their seconds are the step's, and their traffic is what is yielded.

        Validation, checkpoints, the files of a run and what a resumed run does first are outside, and no part of its rates.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        with recorded_traffic() as traffic:
            yield traffic
        self._measured = Measured(time.perf_counter() - wall, time.process_time() - cpu)

    def end_step(
        self,
        step: int,
        metrics: Metrics,
        *,
        tokens: int = 0,
        samples: list[Sample] | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        """Log the row of a finished step, show it, and save a checkpoint when it is due.

        A row is written before its checkpoint, so `timing_s/save_checkpoint` in it is of the checkpoint before.
        """
        if self.profiler is not None:
            self.profiler.after(step)
        perf = {"perf/peak_rss_gb": Last(_peak_rss_gb()), **self._rates(tokens)}
        if traffic is not None:
            perf[DRIVER_MB] = Last(traffic.through_driver() / 1e6)
            write_traffic(self.run.traffic, StepTraffic.of(step, traffic))
        floats = metrics.merge([self.spans.take(), perf]).to_floats()
        self._recorder.log_samples(step, samples or [])
        self._recorder.log_step(step, floats)
        self._finished_step, self._is_updating = step, False
        self._progress.update(step, floats)
        for warning in filter(None, [check.warning_after(floats) for check in self._health_checks]):
            logger.warning("step %d: %s", step, warning)
        if step == 0 or step == self.total_steps or (self._save_freq and step % self._save_freq == 0):
            self._save(step)
        self._begin_step(step + 1)

    def announce(self, text: str) -> None:
        """Tell the terminal what begins now and may take long."""
        self._progress.announce(text)

    def _rates(self, tokens: int) -> dict[str, Last]:
        """The seconds of the last `step`, and `tokens` by them; nothing where there was none, as in the row of step 0."""
        measured, self._measured = self._measured, None
        if measured is None:
            return {}
        rates = {STEP_S: Last(measured.wall_s), CPU_S: Last(measured.cpu_s)}
        if tokens:
            per_s = tokens / measured.wall_s
            rates |= {
                "perf/total_num_tokens": Last(tokens),
                TOKENS_PER_S: Last(per_s),
                THROUGHPUT: Last(per_s / self._num_ranks),
            }
        return rates

    def _begin_step(self, step: int) -> None:
        if self.profiler is not None:
            self.profiler.before(step)

    def _save(self, step: int) -> None:
        with self.spans("save_checkpoint"):
            self._store.save(step, self._groups.save)
        self._saved_step = step

    def _save_finished(self) -> None:
        """Save the last finished step where that is possible; a warning says why it is not."""
        step = self._finished_step
        if self._is_updating or step <= self._saved_step:
            return
        self.announce(f"interrupted: saving step {step}")
        deadline_s = time.monotonic() + IDLE_LIMIT_S
        while self._groups.is_busy():
            if time.monotonic() > deadline_s:
                logger.warning("step %d is not saved: the ranks were still busy after %g s", step, IDLE_LIMIT_S)
                return
            time.sleep(0.1)
        try:
            self._save(step)
        except Exception as exc:  # the run ends either way; what counts is how it goes on
            logger.warning("step %d is not saved: %s", step, exc)


class _HasSession(Protocol):
    session: Session


S = TypeVar("S", bound="_HasSession")


def timed(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Report a trainer's step method as a phase of its own name: in the display, and as `timing_s/<name>`."""
    name = method.__name__

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.session.spans(name):
            return method(self, *args, **kwargs)

    return run


def _peak_rss_gb() -> float:
    """Most memory that this process held, in GB; Linux counts kilobytes, macOS bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e9 if sys.platform == "darwin" else 1e6)


def publish_model(folder: Path, save: Saver, *, step: int) -> None:
    """Write the model of `step` into a folder beside, with a manifest, then rename it: a folder of that name is always complete,
    also after a power cut. CheckpointError, and no such folder, when the driver does not see the files that the ranks wrote."""
    beside = folder.with_name(f".{folder.name}.tmp")
    _remove(beside)
    beside.mkdir(parents=True)
    write_manifest(beside, Manifest.draft(step, {}), save(str(beside.absolute())))
    _remove(folder)
    beside.rename(folder)
    sync(folder.parent)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)

"""Trackers apart from training: each on a thread of its own, behind a bounded queue, with a deadline at the end.

What a tracker does wrong is one warning in the log with its name; rows that it did not take are counted and reported at the end.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from podium.config import TrackerConfig
from podium.observability.sample import Sample
from podium.observability.tracker import RunInfo, Status, Tracker
from podium.parts import TRACKERS

_log = logging.getLogger(__name__)

MAX_WAITING_CALLS: Final = 1000
"""Calls that wait for a slow tracker; beyond it rows are dropped. A few MB at most."""
FINISH_TIMEOUT_S: Final = 30.0
"""How long the end of a phase waits for all trackers together."""

THREAD_PREFIX: Final = "tracker-"
"""Of the threads' names, by which the command line knows that a tracker was left behind."""

_REMEDY = "Training goes on, and metrics.jsonl has every row; see trainer.trackers for its settings, or leave it out there"


def build_tracker(settings: TrackerConfig) -> Tracker:
    """The tracker that a section of `trainer.trackers` names. ConfigError, or MissingExtraError with the pip line."""
    tracker: Tracker = TRACKERS.resolve(settings.name, settings.source)(settings)
    return tracker


class Trackers:
    """All trackers of a phase. No method raises for a tracker's fault, or waits for one, but `finish` with its deadline."""

    def __init__(self, run: RunInfo, sections: Sequence[TrackerConfig] = ()) -> None:
        """Construct the trackers; nothing starts before `start`."""
        self._run = run
        self._all = [IsolatedTracker(section.name, partial(build_tracker, section)) for section in sections]

    def start(self, resumed_step: int | None) -> None:
        run = replace(self._run, resumed_step=resumed_step)
        for tracker in self._all:
            tracker.start(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._all:
            tracker.log(step, metrics)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for tracker in self._all:
            tracker.log_samples(step, samples)

    def finish(self, status: Status) -> None:
        """Let the trackers send what is left, for FINISH_TIMEOUT_S together, and leave behind those that have not finished."""
        for tracker in self._all:
            tracker.ask_to_finish(status)
        deadline_s = time.monotonic() + FINISH_TIMEOUT_S
        for tracker in self._all:
            tracker.wait(deadline_s)


@dataclass(frozen=True)
class _Call:
    what: str
    run: Callable[[], None]
    is_row: bool = False


class IsolatedTracker:
    """One tracker on its thread."""

    def __init__(self, name: str, make: Callable[[], Tracker], *, max_waiting: int = MAX_WAITING_CALLS) -> None:
        """`make` constructs the tracker here and now; where it raises, the tracker takes nothing."""
        self._name, self._max_waiting = name, max_waiting
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._is_off = self._has_warned = self._is_finishing = False
        self._num_rows = self._num_taken = 0
        self._thread = threading.Thread(target=self._work, name=f"{THREAD_PREFIX}{name}", daemon=True)
        self._tracker: Tracker | None = None
        self._attempt(_Call("be constructed", lambda: self._construct(make)), is_fatal=True)

    def start(self, run: RunInfo) -> None:
        if self._tracker is not None:
            self._thread.start()
            self._calls.put(_Call("start", partial(self._tracker.start, run)))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step; it is dropped where the tracker is off or far behind."""
        if self._tracker is not None:
            self._put(_Call(f"log step {step}", partial(self._tracker.log, step, dict(metrics)), is_row=True))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        if self._tracker is not None and samples:
            self._put(_Call(f"log the samples of step {step}", partial(self._tracker.log_samples, step, list(samples))))

    def ask_to_finish(self, status: Status) -> None:
        if self._tracker is not None and self._thread.is_alive():
            self._is_finishing = True
            self._calls.put(_Call("finish", partial(self._tracker.finish, status)))
            self._calls.put(None)

    def wait(self, deadline_s: float) -> None:
        """Wait until the tracker has finished, or for the deadline (of `time.monotonic`); then report the rows that it lost."""
        if self._is_finishing:
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
            if self._thread.is_alive():
                self._warn(f"did not finish within {FINISH_TIMEOUT_S:g} s and is left behind")
        if self._num_taken < self._num_rows:
            lost, total = self._num_rows - self._num_taken, self._num_rows
            _log.warning("tracker %r did not take %d of %d rows; metrics.jsonl has them all", self._name, lost, total)

    def _construct(self, make: Callable[[], Tracker]) -> None:
        self._tracker = make()

    def _put(self, call: _Call) -> None:
        self._num_rows += call.is_row
        if self._is_off:
            return
        if self._calls.qsize() < self._max_waiting:  # only the driver adds calls
            self._calls.put(call)
        else:
            self._warn(f"is {self._max_waiting} calls behind: it could not {call.what}, and later ones are dropped too")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._is_off:
                self._num_taken += self._attempt(call, is_fatal=call.what == "start") and call.is_row

    def _attempt(self, call: _Call, *, is_fatal: bool) -> bool:
        try:
            call.run()
        except (Exception, SystemExit) as exc:  # the rim: a tracker's fault is reported and must not reach training
            self._is_off |= is_fatal
            self._warn(f"could not {call.what}: {type(exc).__name__}: {exc}" + ("; nothing is logged there" if is_fatal else ""))
            return False
        return True

    def _warn(self, what: str) -> None:
        """Once; the count of rows at the end says the rest."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("tracker %r %s. %s", self._name, what, _REMEDY)

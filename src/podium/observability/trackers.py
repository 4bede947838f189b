"""Where metrics go besides the run directory's own file. A tracker may fail or hang; training does not notice.

Each one runs on a thread of its own behind a bounded queue (`Isolated`): it costs the driver a copy of a dict, and its first
failure is one warning in the log.
"""

from __future__ import annotations

import importlib
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from podium.errors import MissingExtraError

_log = logging.getLogger(__name__)

MAX_WAITING_STEPS = 1000
"""Steps that wait for a slow tracker; beyond it steps are dropped. A few MB at most."""


class Tracker(Protocol):
    """A place that takes metrics. Called from one thread only; it may raise and block as it likes."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """Scalars as TensorBoard event files in a folder."""

    def __init__(self, folder: Path) -> None:
        """MissingExtraError when tensorboard is not installed."""
        try:
            self._module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as exc:
            raise MissingExtraError("tensorboard", "tensorboard", "writing tb/ (trainer.tensorboard)") from exc
        self._folder = folder
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        if self._writer is None:  # only now known: events of an earlier, resumed run from this step on are to be hidden
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class Isolated:
    """Hands metrics to a tracker without ever raising or waiting; what goes wrong first is logged, once."""

    def __init__(self, tracker: Tracker, *, max_waiting: int = MAX_WAITING_STEPS) -> None:
        self._tracker = tracker
        self._name = type(tracker).__name__
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(max_waiting)
        self._has_warned = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a step; dropped when the queue is full."""
        try:
            self._queue.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._warn(f"is {self._queue.maxsize} steps behind; step {step} is dropped")

    def close(self, timeout_s: float) -> None:
        """Let the tracker finish what is queued, for at most about `timeout_s`, then leave it behind."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self._warn(f"did not take its last steps within {timeout_s:g} s")
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._warn(f"did not finish within {timeout_s:g} s")

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            self._attempt(f"failed at step {item[0]}", partial(self._tracker.log, *item))
        self._attempt("failed to close", self._tracker.close)

    def _attempt(self, failure: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as exc:  # the rim: a tracker's fault is reported and must not reach training
            self._warn(f"{failure} ({type(exc).__name__}: {exc})")

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = "tracker %s %s; training goes on, metrics.jsonl has everything, and this is the only warning"
            _log.warning(text, self._name, what)

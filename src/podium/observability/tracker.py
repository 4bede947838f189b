"""`Tracker`: a place that takes a run's metrics besides its own files, such as TensorBoard or W&B.

A tracker is written as plain code that may raise and wait: `isolation` keeps both away from training. Ours are in `trackers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from podium.config import TrackerConfig
from podium.observability.sample import Sample

Status: TypeAlias = Literal["finished", "failed", "interrupted"]
"""How a phase of a run ended; `interrupted` is Ctrl-C or SIGTERM, after which runs are resumed."""

Phase: TypeAlias = Literal["warm-up", "rl"]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a tracker may know of a phase of a run: each phase is a run of its own for trackers, since both count from step 0."""

    run_id: str
    """16 hexadecimal digits, which the run directory keeps: a resumed phase has the same, and goes on under it."""
    name: str
    """Of the run directory, such as `spell_backward-20261201-104512`; the warm-up's ends in `-warmup`."""
    group: str
    """Of the run directory, so the same for both phases of a run."""
    phase: Phase
    folder: Path
    """The phase's directory, where a tracker may keep files."""
    config: Mapping[str, Any]
    """All settings of the run, nested, as JSON values."""
    resumed_step: int | None = None
    """The last step that is done; None when the phase starts. Later steps may have been logged before, and are logged again."""


class Tracker(ABC):
    """A place that takes metrics. Only `log` must be defined.

    The driver constructs a tracker with its settings: that is where its library is imported. All other methods are called on a
    thread of the tracker's own, in the order of the steps: they may wait, and what they raise is logged. A class attribute
    `Settings`, a subclass of `podium.config.TrackerConfig`, declares settings of its own.
    """

    def __init__(self, settings: TrackerConfig) -> None:
        self.settings = settings

    def start(self, run: RunInfo) -> None:  # noqa: B027 - optional
        """Begin, or go on with, the run of that id. If it raises, the run is not logged here."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; NaN and infinities are among them as floats."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:  # noqa: B027 - optional
        """Take some of a step's responses, before its metrics."""

    def finish(self, status: Status) -> None:  # noqa: B027 - optional
        """Send what is left and close."""

"""Which steps of a run are profiled: the driver's side of `podium.workers.profiling`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from podium.config import ProfilerConfig
from podium.errors import WorkerError, WorkerLostError
from podium.single_controller import WorkerGroup

logger = logging.getLogger(__name__)


class StepProfiler:
    """Starts and stops the profilers of groups around the steps of `config.steps`.

    Of groups that share processes it drives the first one: one profiler of a process runs at a time. A profile that fails costs
    an error in the log, and never the run.
    """

    def __init__(self, config: ProfilerConfig, groups: Sequence[WorkerGroup[Any]]) -> None:
        self._steps = frozenset(config.steps) if config.tool != "none" else frozenset()
        self._last = max(self._steps, default=0)
        self._groups = [
            group for number, group in enumerate(groups) if group.processes not in [one.processes for one in groups[:number]]
        ]

    def before(self, step: int) -> None:
        """The step begins."""
        if step in self._steps:
            self._drive(step, "start_profile", role="step", profile_step=step)

    def after(self, step: int) -> None:
        """The step is over; after the last one of the config the finish command is run."""
        if step in self._steps:
            self._drive(step, "stop_profile", run_command=step == self._last)

    def _drive(self, step: int, method: str, **arguments: Any) -> None:
        for group in self._groups:
            try:
                getattr(group, method)(**arguments)
            except WorkerLostError:
                raise
            except WorkerError as error:
                logger.error("step %d: %s of group %r failed: %s", step, method, group.name, error)

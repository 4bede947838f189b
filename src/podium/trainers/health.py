"""Health checks of a run: each sees the metrics of every step, and warns once when they show a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from podium.observability import CPU_S, LAYOUT_FRAC, LOG_PROB_GAP, STEP_S, TIMING_PREFIX

NUM_STEPS = 5
"""Consecutive steps with the same symptom before a warning."""
STARVED_FRAC = 0.8
"""Threads that work side by side use more than one core's time; those that wait for a core that others use, less than this."""

MAX_LOG_PROB_GAP = 0.1
"""Nats between rollout and trainer, per token, above which rounding in float32 is not the reason (it makes about 1e-5)."""


class HealthCheck(Protocol):
    """Sees each step once."""

    def warning_after(self, metrics: Mapping[str, float], /) -> str | None:
        """The warning after a step with these metrics, or None."""


class ConsecutiveSteps:
    """Warns once, when `has_symptom` was true for `NUM_STEPS` consecutive steps."""

    def __init__(self) -> None:
        self._count = 0

    def has_symptom(self, metrics: Mapping[str, float]) -> bool:
        """Whether the step shows the problem."""
        raise NotImplementedError

    def warning(self, metrics: Mapping[str, float]) -> str:
        """The text of the warning, after the last of the steps."""
        raise NotImplementedError

    def warning_after(self, metrics: Mapping[str, float], /) -> str | None:
        if self._count < NUM_STEPS:
            self._count = self._count + 1 if self.has_symptom(metrics) else 0
            if self._count == NUM_STEPS:
                return self.warning(metrics)
        return None


class NothingLearned(ConsecutiveSteps):
    """All advantages were zero, so that the rewards gave no gradient: every prompt's samples had the same reward."""

    def has_symptom(self, metrics: Mapping[str, float]) -> bool:
        return metrics.get("critic/advantages/zero_frac") == 1.0

    def warning(self, metrics: Mapping[str, float]) -> str:
        reward = metrics.get("critic/rewards/mean", 0.0)
        return (
            f"nothing was learned from the last {NUM_STEPS} steps: all samples of each prompt had the same reward (mean "
            f"{reward:.3g}), which leaves no gradient. Try a longer warm-up, an easier task, partial credit, or a larger "
            "rollout.sampling.n"
        )


class LogProbsDisagree:
    """Rollout and trainer gave the same tokens different log-probs: the policy that learns is not the one that was sampled."""

    def __init__(self) -> None:
        self._has_warned = False

    def warning_after(self, metrics: Mapping[str, float], /) -> str | None:
        gap = metrics.get(LOG_PROB_GAP, 0.0)
        if self._has_warned or gap <= MAX_LOG_PROB_GAP:
            return None
        self._has_warned = True
        layouts = [name.removeprefix(LAYOUT_FRAC) for name, share in metrics.items() if name.startswith(LAYOUT_FRAC) and share]
        return (
            f"rollout and trainer differ by up to {gap:.3g} nats in the log-probs of the same tokens ({LOG_PROB_GAP}); rounding "
            f"in float32 makes far less than {MAX_LOG_PROB_GAP}. The trainer used the layout {' and '.join(layouts)}. "
            "Try actor.engine.layout=bucketed; if the gap stays, transformers' cached and uncached passes of this model differ"
        )


class ThreadsWait(ConsecutiveSteps):
    """Several threads of this process used less CPU time than one would: they wait for cores that other programs use.

    Only for ranks that live in this process; the seconds of `score`, whose work other processes do, do not count.
    """

    def has_symptom(self, metrics: Mapping[str, float]) -> bool:
        threads = max((value for name, value in metrics.items() if name.endswith("/threads_per_rank")), default=1.0)
        wall_s = metrics.get(STEP_S, 0.0) - metrics.get(f"{TIMING_PREFIX}/score", 0.0)
        return threads > 1 and metrics.get(CPU_S, 0.0) < STARVED_FRAC * wall_s

    def warning(self, metrics: Mapping[str, float]) -> str:
        step_s, cpu_s = metrics[STEP_S], metrics[CPU_S]
        return (
            f"several torch threads are slow here: a step of {step_s:.1f} s used {cpu_s:.1f} s of CPU time, so they wait for "
            "cores that other programs use. Try threads_per_rank=1"
        )

"""What is worth one warning while a run goes on: each watcher sees the numbers of every step, and speaks at most once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from podium.observability import CPU_S, LAYOUT_FRAC, LOG_PROB_GAP, STEP_S, TIMING_PREFIX

NUM_STEPS = 5
"""Steps in a row that make a case."""
STARVED_FRAC = 0.8
"""Threads that work side by side use more than one core's time; those that wait for a core that others use, less than this."""

MAX_LOG_PROB_GAP = 0.1
"""Nats between rollout and trainer, per token, above which rounding in float32 is not the reason (it makes about 1e-5)."""


class Watcher(Protocol):
    """Sees each step once."""

    def see(self, metrics: Mapping[str, float], /) -> str | None:
        """A warning, or None."""


class InARow:
    """Speaks when `is_odd` held for `NUM_STEPS` steps in a row, once."""

    def __init__(self) -> None:
        self._count = 0

    def is_odd(self, metrics: Mapping[str, float]) -> bool:
        """Whether the step is one more of the case."""
        raise NotImplementedError

    def warning(self, metrics: Mapping[str, float]) -> str:
        """What is said, at the last of the steps."""
        raise NotImplementedError

    def see(self, metrics: Mapping[str, float], /) -> str | None:
        if self._count < NUM_STEPS:
            self._count = self._count + 1 if self.is_odd(metrics) else 0
            if self._count == NUM_STEPS:
                return self.warning(metrics)
        return None


class NothingLearned(InARow):
    """Every prompt's samples all had the same reward, so that no advantage, and no gradient from rewards, was left."""

    def is_odd(self, metrics: Mapping[str, float]) -> bool:
        return metrics.get("critic/advantages/zero_frac") == 1.0

    def warning(self, metrics: Mapping[str, float]) -> str:
        reward = metrics.get("critic/rewards/mean", 0.0)
        return (
            f"nothing was learned from the last {NUM_STEPS} steps: all samples of each prompt had the same reward (mean "
            f"{reward:.3g}), which leaves no gradient. Try a longer warm-up, an easier task, partial credit, or a larger "
            "rollout.sampling.n"
        )


class LogProbsDisagree:
    """Rollout and trainer gave the same tokens other log-probs: the policy that is trained is not the one that was sampled."""

    def __init__(self) -> None:
        self._is_said = False

    def see(self, metrics: Mapping[str, float], /) -> str | None:
        gap = metrics.get(LOG_PROB_GAP, 0.0)
        if self._is_said or gap <= MAX_LOG_PROB_GAP:
            return None
        self._is_said = True
        layouts = [name.removeprefix(LAYOUT_FRAC) for name, share in metrics.items() if name.startswith(LAYOUT_FRAC) and share]
        return (
            f"rollout and trainer differ by up to {gap:.3g} nats in the log-probs of the same tokens ({LOG_PROB_GAP}); rounding "
            f"in float32 makes far less than {MAX_LOG_PROB_GAP}. The trainer used the layout {' and '.join(layouts)}. "
            "Try actor.engine.layout=bucketed; if the gap stays, transformers' cached and uncached passes of this model differ"
        )


class ThreadsWait(InARow):
    """Several threads of this process used less CPU time than one would: they wait for cores that other programs use.

    Only for ranks that live in this process; the seconds of `score`, whose work other processes do, do not count.
    """

    def is_odd(self, metrics: Mapping[str, float]) -> bool:
        threads = max((value for name, value in metrics.items() if name.endswith("/threads_per_rank")), default=1.0)
        wall_s = metrics.get(STEP_S, 0.0) - metrics.get(f"{TIMING_PREFIX}/score", 0.0)
        return threads > 1 and metrics.get(CPU_S, 0.0) < STARVED_FRAC * wall_s

    def warning(self, metrics: Mapping[str, float]) -> str:
        step_s, cpu_s = metrics[STEP_S], metrics[CPU_S]
        return (
            f"several torch threads are slow here: a step of {step_s:.1f} s used {cpu_s:.1f} s of CPU time, so they wait for "
            "cores that other programs use. Try threads_per_rank=1"
        )

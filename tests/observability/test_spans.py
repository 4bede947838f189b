"""Timing of phases with a clock that the test turns."""

from __future__ import annotations

import pytest

from podium.observability import Max, Spans


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def fail_after(self, seconds: float) -> None:
        self.now_s += seconds
        raise KeyError


def test_repeats_add_nesting_counts_twice_and_errors_count() -> None:
    clock = Clock()
    spans = Spans(clock=clock)
    for seconds in (1.0, 2.0):
        with spans("step"), spans("rollout"):
            clock.now_s += seconds
    with pytest.raises(KeyError), spans("update"):
        clock.fail_after(4.0)
    assert spans.take() == {"timing_s/step": Max(3), "timing_s/rollout": Max(3), "timing_s/update": Max(4)}
    assert spans.take() == {}


def test_the_listener_hears_the_innermost_open_phase() -> None:
    heard: list[str | None] = []
    spans = Spans(heard.append)
    with spans("step"):
        with spans("rollout"):
            pass
        with pytest.raises(ValueError), spans("update"):
            raise ValueError
    assert heard == ["step", "rollout", "step", "update", "step", None]

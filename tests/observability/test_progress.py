"""Both displays, drawn into a string."""

from __future__ import annotations

import io
import time

from rich.console import Console

from podium.observability import REWARD, TOKENS_PER_S, VALIDATION_SCORE, Progress


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def lines_of(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


def test_line_mode_writes_at_phase_changes_and_every_few_seconds() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(Console(file=out), clock=clock) as progress:
        progress.start_phase("warm-up", 2)
        progress.update(1, {"warmup/loss": 2.5})
        progress.update(2, {"warmup/loss": 1.25})
        progress.start_phase("RL", 100)
        for step in range(1, 13):
            clock.now_s += 1
            progress.activity("rollout")
            progress.update(step, {REWARD: step / 10, "timing_s/rollout": 0.75})
    assert lines_of(out) == [
        "[00:00] warm-up 0/2",
        "[00:00] warm-up 2/2 | loss 1.2500",
        "[00:00] RL 0/100",
        "[00:05] RL 4/100 | now rollout",
        "[00:05] RL 5/100 | reward 0.500 | rollout 0.8s",
        "[00:10] RL 9/100 | now rollout",
        "[00:10] RL 10/100 | reward 1.000 | rollout 0.8s",
        "[00:12] RL 12/100 | reward 1.200 | rollout 0.8s",
    ]


def test_a_slow_step_is_written_when_it_ends_and_what_begins_is_announced() -> None:
    """The line of a step came with the first part of the next one, and nothing came while a run ended."""
    out, clock = io.StringIO(), Clock()
    with Progress(Console(file=out), clock=clock) as progress:
        progress.announce("starting 2 Ray worker(s)")
        progress.start_phase("RL", 2)
        for step in (1, 2):
            progress.activity("rollout")
            clock.now_s += 7
            progress.update(step, {REWARD: step / 10})
        progress.announce("saving the model")
        assert lines_of(out) == [
            "[00:00] starting 2 Ray worker(s)",
            "[00:00] RL 0/2",
            "[00:07] RL 1/2 | reward 0.100",
            "[00:14] RL 2/2 | reward 0.200",
            "[00:14] saving the model",
        ]


def test_before_the_first_phase_no_steps_are_counted() -> None:
    out = io.StringIO()
    with Progress(Console(file=out), clock=Clock()):
        pass
    assert lines_of(out) == ["[00:00] starting"]
    terminal = io.StringIO()
    with Progress(Console(file=terminal, force_terminal=True, width=100), clock=Clock()) as progress:
        progress.announce("starting 2 Ray worker(s)")
    assert "0/0" not in terminal.getvalue()


def test_metrics_stay_until_reported_again() -> None:
    out, clock = io.StringIO(), Clock()
    with Progress(Console(file=out), clock=clock) as progress:
        progress.start_phase("RL", 2)
        progress.update(1, {VALIDATION_SCORE: 0.5})
        progress.update(2, {TOKENS_PER_S: 12345.6})
        clock.now_s += 3725
    assert "validation 0.500 | tokens/s 12,346" in lines_of(out)[1]


def test_live_mode_draws_a_panel() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=90, color_system=None)
    clock = Clock()
    with Progress(console, title="grpo-reverse", clock=clock) as progress:
        progress.start_phase("RL", 120, done_steps=20)
        clock.now_s += 30
        progress.activity("update")
        progress.update(30, {REWARD: 0.4125, VALIDATION_SCORE: 0.375, TOKENS_PER_S: 12345.6, "timing_s/rollout": 1.25})
    text = out.getvalue()
    for part in ("grpo-reverse", "RL", "30/120", "reward 0.412", "validation 0.375", "tokens/s 12,346", "rollout 1.2s", "━"):
        assert part in text
    assert "00:30 elapsed, 04:30 left" in text


def test_an_update_costs_less_than_a_millisecond() -> None:
    for terminal in (True, False):
        with Progress(Console(file=io.StringIO(), force_terminal=terminal)) as progress:
            progress.start_phase("RL", 1000)
            start = time.process_time()
            for step in range(1, 501):
                progress.activity("rollout")
                progress.update(step, {REWARD: 0.5, "timing_s/rollout": 1.0})
            assert (time.process_time() - start) / 500 < 1e-3

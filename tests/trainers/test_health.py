"""Health checks: which metrics give one warning, and which do not."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from podium.observability import Last, Metrics, Progress
from podium.trainers import RunDirectory, Session
from podium.trainers.health import NUM_STEPS, LogProbsDisagree, NothingLearned, ThreadsWait


def warned_at(check: NothingLearned | ThreadsWait, rows: list[dict[str, float]]) -> list[int]:
    """The steps, counted from 1, at which the check warns."""
    return [step for step, row in enumerate(rows, start=1) if check.warning_after(row)]


def test_steps_without_any_advantage_give_one_warning():
    flat, some = {"critic/advantages/zero_frac": 1.0}, {"critic/advantages/zero_frac": 0.99}
    assert warned_at(NothingLearned(), [flat] * 20) == [NUM_STEPS]
    assert warned_at(NothingLearned(), [*[flat] * (NUM_STEPS - 1), some] * 3) == []
    assert warned_at(NothingLearned(), [some, *[flat] * NUM_STEPS]) == [NUM_STEPS + 1]
    assert warned_at(NothingLearned(), [{"val/score/mean": 0.0}] * 9) == [], "a row without training"


def step(threads: float, cpu_s: float, *, score_s: float = 0.0) -> dict[str, float]:
    return {"actor/threads_per_rank": threads, "timing_s/step": 10.0, "timing_s/score": score_s, "perf/cpu_s": cpu_s}


@pytest.mark.parametrize(
    ("row", "is_warned"),
    [
        ({"actor/threads_per_rank": 2.0}, False),  # step 0 only validates
        (step(2, 7.0), True),
        (step(2, 9.0), False),  # much of a step is one thread's work
        (step(2, 19.0), False),
        (step(1, 5.0), False),
        (step(2, 7.0, score_s=2.0), False),  # the rewards' processes did something meanwhile
    ],
)
def test_threads_that_wait_for_cores_give_one_warning(row, is_warned):
    assert warned_at(ThreadsWait(), [row] * 9) == ([NUM_STEPS] if is_warned else [])


def test_a_gap_between_rollout_and_trainer_is_warned_once_with_the_layout():
    check = LogProbsDisagree()
    shares = {"perf/layout/packed": 0.0, "perf/layout/shared": 0.75}
    assert check.warning_after({"rollout/log_prob_gap_max": 0.09, **shares}) is None
    assert check.warning_after({"val/score/mean": 0.5}) is None
    warning = check.warning_after({"rollout/log_prob_gap_max": 1.31, **shares})
    assert "differ by up to 1.31 nats" in warning
    assert "the layout shared." in warning
    assert check.warning_after({"rollout/log_prob_gap_max": 1.31, **shares}) is None


def test_a_session_logs_the_warnings_of_its_health_checks(tmp_path, caplog):
    progress, checks = Progress(Console(file=io.StringIO())), [NothingLearned()]
    sizes = {"num_ranks": 1, "save_freq": 0, "keep": 1, "total_steps": 99}
    with (
        caplog.at_level(logging.WARNING),
        Session(RunDirectory(tmp_path), progress, health_checks=checks, **sizes) as session,
    ):
        for number in range(1, 9):
            session.end_step(number, Metrics({"critic/advantages/zero_frac": Last(1.0)}))
    assert [record.message for record in caplog.records if "nothing was learned" in record.message] == [
        f"step {NUM_STEPS}: nothing was learned from the last {NUM_STEPS} steps: all samples of each prompt had the same reward "
        "(mean 0), which leaves no gradient. Try a longer warm-up, an easier task, partial credit, or a larger rollout.sampling.n"
    ]

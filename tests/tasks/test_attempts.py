"""The order in which rows are tried, and when a batch ends early."""

from __future__ import annotations

from podium.tasks.attempts import Attempts
from podium.tasks.outcomes import Failed, Outcome, Score


def played(attempts: Attempts, bad: set[int]) -> list[int]:
    """The rows in the order of their tries, where those in `bad` always fail."""
    order = []
    while attempts.is_waiting:
        row = attempts.take()
        order.append(row)
        attempts.settle(row, Failed("raised") if row in bad else Score(1.0))
    return order


def test_a_failed_row_is_tried_again_after_those_that_wait():
    attempts = Attempts(3, max_retries=2)
    assert played(attempts, {1}) == [0, 1, 2, 1, 1]
    assert attempts.outcomes == [Score(1.0), Failed("raised"), Score(1.0)]
    assert attempts.failed == {1: Failed("raised")}
    assert (attempts.num_retries, attempts.is_stopped) == (2, False)


def test_stopping_at_a_failure_tries_the_row_again_at_once_and_leaves_the_rest():
    attempts = Attempts(4, max_retries=1, stops_at_failure=True)
    assert played(attempts, {1, 2}) == [0, 1, 1]
    assert attempts.outcomes == [Score(1.0), Failed("raised"), None, None]
    assert attempts.is_stopped


def test_a_row_that_fails_after_the_stop_does_not_wait_again():
    attempts = Attempts(3, max_retries=1, stops_at_failure=True)
    first, second = attempts.take(), attempts.take()
    failed: Outcome = Failed("raised")
    attempts.settle(first, failed)
    attempts.settle(attempts.take(), failed)
    attempts.settle(second, failed)
    assert (attempts.is_waiting, attempts.failed) == (False, {0: failed, 1: failed})


def test_a_row_that_is_given_back_is_the_next():
    attempts = Attempts(2)
    attempts.give_back(attempts.take())
    assert attempts.take() == 0

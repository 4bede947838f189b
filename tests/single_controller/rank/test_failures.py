"""How a rank describes what it raised."""

from __future__ import annotations

import pytest

from podium.errors import WorkerError
from podium.single_controller.rank.context import RankContext
from podium.single_controller.rank.failures import MESSAGE_CHARS, TRACEBACK_CHARS, shortened, worker_error

HUGE = "first words " + "x" * 10_000_000 + " last words"


def report_of_error(message: str) -> WorkerError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return worker_error(RankContext(), "f", error)


def test_a_report_of_a_huge_message_has_its_head_and_tail_and_says_what_is_missing():
    report = report_of_error(HUGE)
    for text, most in ((report.cause_message, MESSAGE_CHARS), (report.remote_traceback, TRACEBACK_CHARS)):
        assert most < len(text) < most + 100
        assert "first words" in text
        assert text.rstrip().endswith("last words")
    assert f"[{len(HUGE) - MESSAGE_CHARS:,} characters left out]" in report.cause_message
    assert "in report_of_error" in report.remote_traceback  # where the user's code was is not lost to it
    assert len(str(report)) < MESSAGE_CHARS + TRACEBACK_CHARS + 500


@pytest.mark.parametrize("length", [0, 1, MESSAGE_CHARS])
def test_a_report_of_a_message_that_fits_is_whole(length: int):
    assert report_of_error("m" * length).cause_message == "m" * length


@pytest.mark.parametrize(("most", "shown"), [(10, "0123456789"), (9, "0123\n... [2 characters left out] ...\n6789")])
def test_what_is_left_out_is_counted(most: int, shown: str):
    assert shortened("0123456789", most) == shown

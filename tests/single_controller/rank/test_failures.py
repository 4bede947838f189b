"""What a rank says of a failure of its own."""

from __future__ import annotations

import pytest

from podium.errors import WorkerError
from podium.single_controller.rank.context import RankContext
from podium.single_controller.rank.failures import MESSAGE_CHARS, TRACEBACK_CHARS, shortened, worker_error

HUGE = "first words " + "x" * 10_000_000 + " last words"


def account_of(message: str) -> WorkerError:
    try:
        raise ValueError(message)
    except ValueError as error:
        return worker_error(RankContext(), "f", error)


def test_an_account_of_a_huge_message_has_its_head_and_tail_and_says_what_is_missing():
    account = account_of(HUGE)
    for text, most in ((account.cause_message, MESSAGE_CHARS), (account.remote_traceback, TRACEBACK_CHARS)):
        assert most < len(text) < most + 100
        assert "first words" in text
        assert text.rstrip().endswith("last words")
    assert f"[{len(HUGE) - MESSAGE_CHARS:,} characters left out]" in account.cause_message
    assert "in account_of" in account.remote_traceback  # where the user's code was is not lost to it
    assert len(str(account)) < MESSAGE_CHARS + TRACEBACK_CHARS + 500


@pytest.mark.parametrize("length", [0, 1, MESSAGE_CHARS])
def test_an_account_of_a_message_that_fits_is_whole(length: int):
    assert account_of("m" * length).cause_message == "m" * length


@pytest.mark.parametrize(("most", "shown"), [(10, "0123456789"), (9, "0123\n... [2 characters left out] ...\n6789")])
def test_what_is_left_out_is_counted(most: int, shown: str):
    assert shortened("0123456789", most) == shown

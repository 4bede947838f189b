"""The states of a crew's ranks: which event leads where, and what is said of calls in each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from podium.errors import GroupClosedError
from podium.single_controller.processes.lifecycle import Life, State

drain, recover, close = Life.drain, Life.recover, Life.close


def break_down(life: Life) -> None:
    life.break_down("rank 1 died")


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], State.READY),
        ([drain], State.DRAINING),
        ([recover], State.READY),
        ([drain, recover], State.READY),
        ([break_down], State.BROKEN),
        ([drain, break_down], State.BROKEN),
        ([drain, break_down, recover], State.BROKEN),  # a second call that fails well does not mend it
        ([break_down, drain], State.BROKEN),
        ([close], State.CLOSED),
        ([break_down, close], State.CLOSED),
        ([close, drain], State.CLOSED),
        ([close, recover], State.CLOSED),
        ([close, break_down], State.CLOSED),
    ],
)
def test_events_lead_to_states(events: list[Callable[[Life], None]], state: State):
    life = Life()
    for event in events:
        event(life)
    assert life.state is state


def test_the_first_reason_stays():
    life = Life()
    life.break_down("rank 1 died")
    life.break_down("rank 0 was missed")
    assert life.reason == "rank 1 died"
    life.close("restarted")
    life.close()
    assert life.reason == "restarted"


@pytest.mark.parametrize("event", [Life.drain, Life.recover])
def test_calls_are_welcome_while_the_ranks_live(event: Callable[[Life], None]):
    life = Life()
    event(life)
    life.check_ready("g", "f")
    life.check_open("restart group 'g'")
    assert life.reason == ""


def test_a_broken_life_tells_why_and_what_to_do():
    life = Life()
    life.break_down("rank 1 died")
    with pytest.raises(GroupClosedError, match=r"^group 'g' cannot run 'f': it is broken since rank 1 died; restart\(\) starts"):
        life.check_ready("g", "f")
    life.check_open("restart group 'g'")


def test_a_closed_life_takes_nothing():
    life = Life()
    life.close()
    with pytest.raises(GroupClosedError, match=r"^group 'g' cannot run 'f': it was closed$"):
        life.check_ready("g", "f")
    with pytest.raises(GroupClosedError, match=r"^cannot restart group 'g': it was closed$"):
        life.check_open("restart group 'g'")


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (Life.drain, "draining"),
        (Life.recover, "ready"),
        (Life.close, "closed"),
        (lambda life: life.close("restarted"), "restarted"),
        (lambda life: life.break_down("rank 1 died"), "broken since rank 1 died"),
    ],
)
def test_a_life_is_told_in_words(event: Callable[[Life], None], told: str):
    life = Life()
    event(life)
    assert str(life) == told

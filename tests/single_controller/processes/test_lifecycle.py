"""The states of worker processes: the transitions, and the errors of calls in each state."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from podium.errors import GroupClosedError
from podium.single_controller.processes.lifecycle import Lifecycle, State

drain, recover, close = Lifecycle.drain, Lifecycle.recover, Lifecycle.close


def break_down(lifecycle: Lifecycle) -> None:
    lifecycle.break_down("rank 1 died")


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
def test_events_lead_to_states(events: list[Callable[[Lifecycle], None]], state: State):
    lifecycle = Lifecycle()
    for event in events:
        event(lifecycle)
    assert lifecycle.state is state


def test_the_first_reason_stays():
    lifecycle = Lifecycle()
    lifecycle.break_down("rank 1 died")
    lifecycle.break_down("rank 0 was missed")
    assert lifecycle.reason == "rank 1 died"
    lifecycle.close("restarted")
    lifecycle.close()
    assert lifecycle.reason == "restarted"


@pytest.mark.parametrize("event", [Lifecycle.drain, Lifecycle.recover])
def test_calls_are_welcome_while_the_ranks_live(event: Callable[[Lifecycle], None]):
    lifecycle = Lifecycle()
    event(lifecycle)
    lifecycle.check_ready("g", "f")
    lifecycle.check_open("restart group 'g'")
    assert lifecycle.reason == ""


def test_a_broken_life_tells_why_and_what_to_do():
    lifecycle = Lifecycle()
    lifecycle.break_down("rank 1 died")
    with pytest.raises(GroupClosedError, match=r"^group 'g' cannot run 'f': it is broken since rank 1 died; restart\(\) starts"):
        lifecycle.check_ready("g", "f")
    lifecycle.check_open("restart group 'g'")


def test_a_closed_life_takes_nothing():
    lifecycle = Lifecycle()
    lifecycle.close()
    with pytest.raises(GroupClosedError, match=r"^group 'g' cannot run 'f': it was closed$"):
        lifecycle.check_ready("g", "f")
    with pytest.raises(GroupClosedError, match=r"^cannot restart group 'g': it was closed$"):
        lifecycle.check_open("restart group 'g'")


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Lifecycle.drain, "draining"),
        (Lifecycle.recover, "ready"),
        (Lifecycle.close, "closed"),
        (lambda lifecycle: lifecycle.close("restarted"), "restarted"),
        (lambda lifecycle: lifecycle.break_down("rank 1 died"), "broken since rank 1 died"),
    ],
)
def test_the_lifecycle_as_text(event: Callable[[Lifecycle], None], text: str):
    lifecycle = Lifecycle()
    event(lifecycle)
    assert str(lifecycle) == text

"""The verdict on a call, from outcomes that arrive when the test says: no processes, and short waits."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import pytest

from podium.errors import CallTimeoutError, GroupClosedError, WorkerError, WorkerLostError
from podium.single_controller.processes import pending_call
from podium.single_controller.processes.in_flight import InFlightCalls
from podium.single_controller.processes.lifecycle import Lifecycle, State
from podium.single_controller.processes.pending_call import PendingCall
from podium.single_controller.runtime.base import Answer, Outcome
from tests.single_controller.processes.scripted import NEVER, Scripted, after, died, raised, seen


@dataclass
class Case:
    pending: PendingCall
    runtime: Scripted
    lifecycle: Lifecycle


def case(*script: tuple[float, Outcome], timeout_s: float = 30.0, slow_after_s: float = 30.0) -> Case:
    runtime, lifecycle = Scripted(), Lifecycle()
    tickets = {rank: after(*entry) for rank, entry in enumerate(script)}
    return Case(PendingCall(runtime, "g", "f", tickets, timeout_s, lifecycle, slow_after_s), runtime, lifecycle)


# -- one verdict -----------------------------------------------------------------------------------------------------------


def test_answers_come_back_in_rank_order_however_they_arrive():
    it = case((0.03, Answer("a")), (0.0, Answer("b")), (0.01, Answer(None)))
    assert list(it.pending.finish().items()) == [(0, "a"), (1, "b"), (2, None)]
    assert it.lifecycle.state is State.READY


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ([(0.0, raised(0, "RuntimeError", "Connection closed by peer")), (0.02, raised(1)), (0.0, Answer(0))], 1),
        ([(0.0, raised(0, "DistNetworkError")), (0.0, raised(1)), (0.05, died(2))], 2),
        ([(0.0, raised(0)), (0.02, raised(1)), (0.01, raised(2))], 0),
        ([(0.02, raised(0)), (0.01, raised(1)), (0.0, Answer(0))], 1),
        ([(0.0, raised(0)), (0.0, Answer(0)), (0.02, raised(2, "RuntimeError", "Timed out waiting for rank 0"))], 0),
    ],
)
def test_the_cause_is_raised_with_its_consequences(script: list[tuple[float, Outcome]], cause: int):
    with pytest.raises(WorkerError) as caught:
        case(*script).pending.finish()
    others = [rank for rank, (_, outcome) in enumerate(script) if isinstance(outcome, WorkerError) and rank != cause]
    assert caught.value.origin.rank == cause
    assert sorted(line.split(":")[0] for line in caught.value.consequences) == [f"rank {rank}" for rank in others]
    assert all(line in str(caught.value) for line in caught.value.consequences)


def test_a_failure_after_the_settling_time_is_a_consequence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pending_call, "SETTLE_S", 0.05)
    with pytest.raises(WorkerError) as caught:
        case((0.0, raised(0)), (0.2, died(1))).pending.finish()
    assert caught.value.origin.rank == 0
    assert caught.value.consequences == ("rank 1: ProcessDied: died",)


def test_failures_that_arrived_before_the_first_check_are_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pending_call, "SETTLE_S", 0.05)
    monkeypatch.setattr(pending_call, "PEER_GRACE_S", 0.1)
    it = case((0.0, raised(0, "RuntimeError", "connection closed by peer")), (0.02, raised(1)), (0.02, Answer(2)))
    assert it.pending.is_over()  # sees the first failure
    time.sleep(0.2)
    with pytest.raises(WorkerError) as caught:
        it.pending.finish()
    assert caught.value.origin.rank == 1
    assert (it.lifecycle.state, it.runtime.killed) == (State.READY, [])


def test_when_all_have_answered_the_group_stays_whole():
    it = case((0.0, raised(0)), (0.05, Answer(1)))
    with pytest.raises(WorkerError):
        it.pending.finish()
    assert (it.lifecycle.state, it.runtime.killed) == (State.READY, [])


def test_a_peer_that_stays_silent_is_killed_and_the_group_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pending_call, "PEER_GRACE_S", 0.1)
    it = case((0.0, raised(0)), (NEVER, Answer(1)), (0.05, Answer(2)))
    with pytest.raises(WorkerError) as caught:
        it.pending.finish()
    assert caught.value.consequences == ("rank 1: no answer within 0.1 s, killed",)
    assert it.runtime.killed == [1]
    assert (it.lifecycle.state, it.lifecycle.reason) == (State.BROKEN, "method 'f' failed: rank 0: ValueError: bad")


def test_a_dead_rank_breaks_the_group_even_when_all_have_answered():
    it = case((0.0, died(0)), (0.0, Answer(1)))
    with pytest.raises(WorkerLostError):
        it.pending.finish()
    assert it.lifecycle.state is State.BROKEN


def test_the_error_ends_with_the_last_lines_of_the_cause_only():
    it = case((0.0, raised(0, "RuntimeError", "connection closed by peer")), (0.0, died(1)))
    it.runtime.known = {
        0: seen(last_lines="last lines of stderr:\n  all well"),
        1: seen(stacks="Fatal Python error: Segmentation fault", last_lines="last lines of stderr:\n  loading shard 3"),
    }
    with pytest.raises(WorkerLostError) as caught:
        it.pending.finish()
    assert caught.value.last_words == "Fatal Python error: Segmentation fault\nlast lines of stderr:\n  loading shard 3"
    assert str(caught.value).endswith("loading shard 3")
    assert "all well" not in str(caught.value)


def test_a_failure_keeps_its_cause():
    original, failure = ValueError("bad"), raised(0)
    failure.__cause__ = original
    with pytest.raises(WorkerError) as caught:
        case((0.0, failure), (0.0, raised(1))).pending.finish()
    assert caught.value.consequences
    assert caught.value.__cause__ is original


def test_ctrl_c_while_peers_may_still_answer_ends_them(monkeypatch: pytest.MonkeyPatch):
    it = case((0.0, raised(0)), (NEVER, Answer(1)))
    assert it.pending.is_over()

    def interrupted(tickets: object, timeout_s: float) -> dict[int, Outcome]:
        raise KeyboardInterrupt

    monkeypatch.setattr(it.runtime, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        it.pending.finish()
    assert (it.lifecycle.state, it.runtime.killed) == (State.BROKEN, [1])


def test_ranks_that_were_ended_on_purpose_raise_group_closed():
    it = case((0.0, died(0)), (0.0, died(1)))
    it.lifecycle.close("restarted")
    with pytest.raises(GroupClosedError, match="method 'f' of group 'g' was running when that was restarted"):
        it.pending.finish()


def test_a_process_that_died_of_an_earlier_call_names_it():
    runtime, lifecycle, in_flight = Scripted(), Lifecycle(), InFlightCalls()

    def call(method: str, outcome: Outcome) -> PendingCall:
        return PendingCall(runtime, "g", method, {0: after(0.0, outcome)}, 30.0, lifecycle, in_flight=in_flight)

    call("well", Answer(0)), call("crash", died(0))
    with pytest.raises(WorkerLostError) as caught:
        call("read_loss", died(0)).finish()
    assert caught.value.consequences == ("rank 0 had not answered 'crash' either, which was sent before",)


def test_a_death_that_is_read_after_the_group_was_broken_says_what_broke_it():
    it = case((0.0, died(0)))
    it.lifecycle.break_down("method 'slow' timed out after 5 s on rank 0")
    with pytest.raises(WorkerLostError) as caught:
        it.pending.finish()
    (line,) = caught.value.consequences
    assert line == "the group was broken before this was read: method 'slow' timed out after 5 s on rank 0"


# -- time ------------------------------------------------------------------------------------------------------------------


def test_a_call_that_takes_too_long_names_its_silent_ranks_and_where_they_are():
    it = case((0.0, Answer(0)), (NEVER, Answer(1)), (NEVER, Answer(2)), timeout_s=0.05)
    it.runtime.known = {1: seen(stacks="/w.py:3 load"), 2: seen(stacks="/w.py:7 all_reduce")}
    message = (
        "method 'f' of group 'g': no answer from ranks 1-2 within 0.05 s, 0 had answered; killed\n"
        "rank 1:\n  /w.py:3 load\nrank 2:\n  /w.py:7 all_reduce"
    )
    with pytest.raises(CallTimeoutError) as caught:
        it.pending.finish()
    assert str(caught.value) == message
    assert caught.value.silent_ranks == (1, 2)
    assert it.runtime.killed == it.runtime.asked_for_stacks == [1, 2]
    assert (it.lifecycle.state, it.lifecycle.reason) == (State.BROKEN, "method 'f' timed out after 0.05 s on ranks 1-2")


def test_stragglers_are_named_with_their_stacks_ever_more_seldom(caplog: pytest.LogCaptureFixture):
    it = case((0.0, Answer(0)), (0.6, Answer(1)), slow_after_s=0.1)
    it.runtime.known = {1: seen(stacks="/w.py:3 load")}
    with caplog.at_level(logging.WARNING, logger="podium.single_controller"):
        it.pending.finish()
    assert 1 <= len(caplog.messages) <= 3  # after 0.1, 0.2 and 0.4 s
    assert caplog.messages[0].startswith("group 'g': method 'f': no answer from rank 1 after 0.")
    assert "; the other 1 took at most 0.0" in caplog.messages[0]
    assert caplog.messages[0].endswith("rank 1:\n  /w.py:3 load")


def test_a_quick_call_logs_nothing(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        case((0.05, Answer(0)), slow_after_s=5.0).pending.finish()
    assert caplog.messages == []


def test_a_long_call_is_compared_with_the_last_call_of_its_method(caplog: pytest.LogCaptureFixture):
    took_s: dict[str, float] = {}

    def call(seconds: float) -> None:
        tickets = {rank: after(seconds, Answer(rank)) for rank in (0, 1)}
        PendingCall(Scripted(), "g", "f", tickets, 30.0, Lifecycle(), 0.02, took_s=took_s).finish()

    with caplog.at_level(logging.WARNING, logger="podium.single_controller"):
        call(0.1)  # much longer than `slow_after_s`, but on all ranks alike
        call(0.15)
    assert caplog.messages == []
    assert 0.1 < took_s["f"] < 1.0
    took_s["f"] = 0.01
    with caplog.at_level(logging.WARNING, logger="podium.single_controller"):
        call(0.3)
    assert "no answer from ranks 0-1 after" in caplog.messages[0]
    assert "; the last call took 0.01 s" in caplog.messages[0]


def test_a_silenced_log_asks_no_rank_for_stacks():
    it = case((0.2, Answer(0)), (0.0, Answer(1)), slow_after_s=0.02)
    level = pending_call.log.level
    pending_call.log.setLevel(logging.ERROR)
    try:
        it.pending.finish()
    finally:
        pending_call.log.setLevel(level)
    assert it.runtime.asked_for_stacks == []


def test_looking_does_not_wait_and_waiting_has_its_limit():
    it = case((0.1, Answer(0)), (0.0, Answer(1)))
    assert not it.pending.is_over()
    assert not it.pending.is_over(wait_s=0.01)
    assert it.pending.silent_ranks == (0,)
    assert it.pending.is_over(wait_s=20.0)
    assert it.pending.finish() == {0: 0, 1: 1}


# -- threads ---------------------------------------------------------------------------------------------------------------


def test_one_thread_may_look_while_another_waits():
    it = case((0.4, Answer("late")))
    answers: list[dict[int, object]] = []
    waiting = threading.Thread(target=lambda: answers.append(it.pending.finish()))
    waiting.start()
    time.sleep(0.05)
    began = time.monotonic()
    assert not it.pending.is_over()
    assert time.monotonic() - began < 0.2  # the look did not queue behind the wait
    assert not it.pending.is_over(wait_s=0.05)
    waiting.join()
    assert answers == [{0: "late"}]
    assert it.pending.is_over()


def test_a_finished_call_holds_no_data():
    in_flight = InFlightCalls()
    pending = PendingCall(Scripted(), "g", "f", {0: after(0.0, Answer("data"))}, 30.0, Lifecycle(), in_flight=in_flight)
    assert len(in_flight) == 1
    assert pending.finish() == {0: "data"}
    assert (len(in_flight), pending.tickets, pending._answers) == (0, {}, {})

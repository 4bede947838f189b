"""The verdict on a call, from outcomes that arrive when the test says: no processes, and short waits."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from podium.errors import CallTimeoutError, Origin, WorkerError, WorkerLostError
from podium.single_controller import pending_call
from podium.single_controller.pending_call import PendingCall
from podium.single_controller.runtime.base import Answer, GroupSpec, Outcome, RankCall, Runtime


@dataclass
class Scripted(Runtime):
    """A ticket is (seconds from now until its outcome arrives, the outcome)."""

    killed: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def start(self, spec: GroupSpec) -> dict[int, object]:
        return {}

    def submit(self, rank: int, call: RankCall) -> object:
        return None

    def wait(self, tickets: Mapping[int, tuple[float, Outcome]], timeout_s: float) -> dict[int, Outcome]:
        give_up = time.monotonic() + timeout_s
        while True:
            passed = time.monotonic() - self.began
            ready = {rank: outcome for rank, (after, outcome) in tickets.items() if after <= passed}
            failed = any(not isinstance(outcome, Answer) for outcome in ready.values())
            if failed or len(ready) == len(tickets) or time.monotonic() >= give_up:
                return ready
            time.sleep(0.002)

    def kill(self, ranks: Iterable[int]) -> None:
        self.killed += ranks

    def close(self) -> None: ...


@dataclass
class Case:
    pending: PendingCall
    runtime: Scripted
    broken: list[str]


def case(*script: tuple[float, Outcome], timeout_s: float = 30.0) -> Case:
    runtime, broken = Scripted(), list[str]()
    return Case(PendingCall(runtime, "g", "f", dict(enumerate(script)), timeout_s, broken.append), runtime, broken)


def raised(rank: int, kind: str = "ValueError", message: str = "bad") -> WorkerError:
    return WorkerError(Origin("g", "f", rank, "node", 1), cause_type=kind, cause_message=message, remote_traceback="")


def died(rank: int) -> WorkerLostError:
    return WorkerLostError(Origin("g", "f", rank, "node", 1), cause_type="ProcessDied", cause_message="died", remote_traceback="")


NEVER = 1e9


def test_answers_come_back_in_rank_order_however_they_arrive():
    it = case((0.03, Answer("a")), (0.0, Answer("b")), (0.01, Answer(None)))
    assert list(it.pending.finish().items()) == [(0, "a"), (1, "b"), (2, None)]
    assert it.broken == []


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
def test_the_cause_is_told_before_its_consequences(script: list[tuple[float, Outcome]], cause: int):
    with pytest.raises(WorkerError) as caught:
        case(*script).pending.finish()
    others = [rank for rank, (_, outcome) in enumerate(script) if isinstance(outcome, WorkerError) and rank != cause]
    assert caught.value.origin.rank == cause
    assert sorted(line.split(":")[0] for line in caught.value.consequences) == [f"rank {rank}" for rank in others]
    assert all(line in str(caught.value) for line in caught.value.consequences)


def test_a_failure_after_the_settling_time_is_no_cause(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pending_call, "SETTLE_S", 0.05)
    with pytest.raises(WorkerError) as caught:
        case((0.0, raised(0)), (0.2, died(1))).pending.finish()
    assert caught.value.origin.rank == 0
    assert caught.value.consequences == ("rank 1: ProcessDied: died",)


def test_when_all_have_answered_the_group_stays_whole():
    it = case((0.0, raised(0)), (0.05, Answer(1)))
    with pytest.raises(WorkerError):
        it.pending.finish()
    assert (it.broken, it.runtime.killed) == ([], [])


def test_a_peer_that_stays_silent_is_killed_and_the_group_is_broken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pending_call, "PEER_GRACE_S", 0.1)
    it = case((0.0, raised(0)), (NEVER, Answer(1)), (0.05, Answer(2)))
    with pytest.raises(WorkerError) as caught:
        it.pending.finish()
    assert caught.value.consequences == ("rank 1: no answer within 0.1 s, killed",)
    assert it.runtime.killed == [1]
    assert it.broken == ["method 'f' failed: rank 0: ValueError: bad"]


def test_a_dead_rank_breaks_the_group_even_when_all_have_answered():
    it = case((0.0, died(0)), (0.0, Answer(1)))
    with pytest.raises(WorkerLostError):
        it.pending.finish()
    assert len(it.broken) == 1


def test_a_call_that_takes_too_long_names_its_silent_ranks():
    it = case((0.0, Answer(0)), (NEVER, Answer(1)), (NEVER, Answer(2)), timeout_s=0.05)
    with pytest.raises(CallTimeoutError, match=r"'f' of group 'g': no answer from rank\(s\) 1, 2 within 0.05 s") as caught:
        it.pending.finish()
    assert caught.value.silent_ranks == (1, 2)
    assert it.runtime.killed == [1, 2]
    assert "timed out" in it.broken[0]


def test_looking_does_not_wait_and_waiting_has_its_limit():
    it = case((0.1, Answer(0)), (0.0, Answer(1)))
    assert not it.pending.is_over()
    assert not it.pending.is_over(wait_s=0.01)
    assert it.pending.is_over(wait_s=20.0)
    assert it.pending.finish() == {0: 0, 1: 1}


def test_a_failure_keeps_the_exception_it_came_from(monkeypatch: pytest.MonkeyPatch):
    original, failure = ValueError("bad"), raised(0)
    failure.__cause__ = original
    with pytest.raises(WorkerError) as caught:
        case((0.0, failure), (0.0, raised(1))).pending.finish()
    assert caught.value.consequences
    assert caught.value.__cause__ is original

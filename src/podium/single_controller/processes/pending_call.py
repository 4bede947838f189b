"""A call that was sent: from the ranks' outcomes to one verdict. The rules are the same for every runtime.

When a rank fails, its peers often fail milliseconds later, and sometimes first, because it left a collective. So failures are
gathered for a short time; the one most likely to be the cause is raised, with the others as its consequences. Peers that do not
answer within a grace period are stuck: they are killed and the group is broken. A long call logs its stragglers, and what their
threads are doing, long before its deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from podium.errors import CallTimeoutError, GroupClosedError, PodiumError, WorkerError, WorkerLostError
from podium.single_controller.processes.in_flight import InFlightCalls
from podium.single_controller.processes.lifecycle import Lifecycle, State
from podium.single_controller.processes.stragglers import SLOW_AFTER_S, fold_stacks, straggler_line
from podium.single_controller.rank.naming import rank_list, ranks_named
from podium.single_controller.runtime.base import Answer, Runtime, Ticket

SETTLE_S = 1.0
"""A failure that arrives later than this after the first one is a consequence, whatever its type."""
PEER_GRACE_S = 2.0
"""How long peers may take to answer after a rank has failed."""
LOOKS_BEFORE_SLOW = 4
"""How often a call is checked before it may be slow: the precision of the times at which ranks answered."""

_LOST_PEER_TYPES = {
    *("ConnectionError", "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError", "BrokenPipeError"),
    *("EOFError", "TimeoutError", "DistNetworkError", "DistStoreError", "DistBackendError"),
}
_LOST_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "timed out")

log = logging.getLogger("podium.single_controller")


@dataclass(frozen=True)
class Failure:
    """The failure of a rank, and when it arrived."""

    error: WorkerError
    arrived: float


@dataclass(eq=False)
class PendingCall:
    """One method call on some ranks. It tells `lifecycle` if a rank dies or is killed. Threads may share it."""

    runtime: Runtime
    group: str
    method: str
    tickets: Mapping[int, Ticket]
    timeout_s: float
    lifecycle: Lifecycle
    slow_after_s: float = SLOW_AFTER_S
    in_flight: InFlightCalls[PendingCall] = field(default_factory=InFlightCalls)
    """The calls in flight on the same ranks; this one is among them until it is over."""
    took_s: dict[str, float] = field(default_factory=dict)
    """By method, how long its last call on these ranks took."""
    _silent: dict[int, Ticket] = field(init=False)
    _answers: dict[int, Any] = field(init=False, default_factory=dict)
    _answered_s: dict[int, float] = field(init=False, default_factory=dict)
    _failures: dict[int, Failure] = field(init=False, default_factory=dict)
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock)
    began: float = field(init=False)
    """When it was sent, on the clock of `time.monotonic`."""

    def __post_init__(self) -> None:
        self._silent = dict(self.tickets)
        self.began = time.monotonic()
        self.in_flight.add(self)

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """The ranks that are not known to have answered."""
        return tuple(self._silent)

    @property
    def has_failed(self) -> bool:
        """Whether a rank is known to have failed, or the deadline has passed."""
        return bool(self._failures) or (bool(self._silent) and self.age_s >= self.timeout_s)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.began

    def has_lost(self, rank: int) -> bool:
        """Whether the rank's process died before it answered; checks without waiting."""
        self.is_over()
        failure = self._failures.get(rank)
        return failure is not None and isinstance(failure.error, WorkerLostError)

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Whether every rank has answered, one has failed or the deadline has passed; waits for that up to `wait_s`."""
        give_up = time.monotonic() + wait_s
        if not self._lock.acquire(timeout=min(max(0.0, wait_s), threading.TIMEOUT_MAX)):
            return False  # another thread is waiting for this call, so it is not over
        try:
            return self._is_over(give_up)
        finally:
            self._lock.release()

    def _is_over(self, give_up: float) -> bool:
        """`is_over` with the lock held; waits until that moment of `time.monotonic`."""
        give_up = min(self.began + self.timeout_s, give_up)
        while self._silent and not self._failures:
            self._take(max(0.0, give_up - time.monotonic()))
            if time.monotonic() >= give_up:
                break
        return not self._silent or self.has_failed

    def finish(self) -> dict[int, Any]:
        """Every rank's answer, in rank order; call it once.

        WorkerError for the failure that caused the others; CallTimeoutError, which breaks the group, after the deadline;
        GroupClosedError if the ranks were ended on purpose.
        """
        with self._lock:
            look_again_s = self.slow_after_s / LOOKS_BEFORE_SLOW
            while not self._is_over(time.monotonic() + look_again_s):
                if self._name_stragglers():
                    look_again_s = self.age_s  # at ever longer intervals
            if self._failures:
                raise self._verdict()
            if self._silent:
                raise self._timed_out()
            answers = {rank: self._answers[rank] for rank in self.tickets}
            self._answers, self.tickets = {}, {}  # the caller owns them: a call that is tracked must not keep data alive
            return answers

    def untrack(self) -> None:
        """The caller reads the answers without the group: neither its status nor its memory has the call any more."""
        self.in_flight.remove(self)

    def _take(self, timeout_s: float, arrived: float | None = None) -> None:
        """Record the outcomes that have arrived; `arrived` is the time of failures among them, None for now."""
        outcomes = self.runtime.wait(self._silent, timeout_s)
        now = time.monotonic()
        for rank in sorted(outcomes):
            outcome = outcomes[rank]
            self._answered_s[rank] = now - self.began
            if isinstance(outcome, Answer):
                self._answers[rank] = outcome.value
            else:
                self._failures[rank] = Failure(outcome, now if arrived is None else arrived)
            del self._silent[rank]  # last: after Ctrl-C in this loop, the outcome is taken again
        if not self._silent:
            self.in_flight.remove(self)
            if not self._failures:
                self.took_s[self.method] = now - self.began

    def _name_stragglers(self) -> bool:
        line = straggler_line(
            self.method,
            self._answered_s,
            self.silent_ranks,
            self.age_s,
            limit_s=self.timeout_s,
            usual_s=self.took_s.get(self.method),
            slow_after_s=self.slow_after_s,
        )
        if line is not None and log.isEnabledFor(logging.WARNING):
            log.warning("group %r: %s\n%s", self.group, line, self._stacks_of_silent())
        return line is not None

    def _verdict(self) -> PodiumError:
        broken_before = self.lifecycle.reason if self.lifecycle.state is State.BROKEN else None
        self.lifecycle.drain()
        try:
            self._let_peers_answer()
        finally:  # also when Ctrl-C ends the wait
            silent, failed = self.silent_ranks, self._first_to_fail()
            cause = self._failures[failed].error
            self._end_peers(silent, failed, cause)
        if self.lifecycle.state is State.CLOSED and isinstance(cause, WorkerLostError):
            return GroupClosedError(
                f"method {self.method!r} of group {self.group!r} was running when that was {self.lifecycle.reason}"
            )
        lines = [] if broken_before is None else [f"the group was broken before this was read: {broken_before}"]
        lines += self._lost_before(failed, cause)
        lines += [_one_line(rank, failure.error) for rank, failure in self._failures.items() if rank != failed]
        lines += [f"rank {rank}: no answer within {PEER_GRACE_S:g} s, killed" for rank in silent]
        return cause.explained(tuple(lines), self._last_words(failed))

    def _let_peers_answer(self) -> None:
        first = min(failure.arrived for failure in self._failures.values())
        self._take(0.0, arrived=first)  # it arrived before this check, so it may have been the first
        while self._silent and (left := first + PEER_GRACE_S - time.monotonic()) > 0:
            self._take(left)

    def _first_to_fail(self) -> int:
        """The rank whose failure most likely caused the others."""
        first = min(failure.arrived for failure in self._failures.values())
        in_time = {rank: failure for rank, failure in self._failures.items() if failure.arrived <= first + SETTLE_S}
        return min(in_time, key=lambda rank: (_how_far_from_cause(in_time[rank].error), in_time[rank].arrived))

    def _end_peers(self, silent: tuple[int, ...], failed: int, cause: WorkerError) -> None:
        if silent or any(isinstance(failure.error, WorkerLostError) for failure in self._failures.values()):
            self.lifecycle.break_down(f"method {self.method!r} failed: {_one_line(failed, cause)}")
        self.lifecycle.recover()
        self.runtime.kill(silent)
        self.in_flight.remove(self)

    def _lost_before(self, rank: int, cause: WorkerError) -> list[str]:
        """Earlier calls that a dead rank did not answer either: it may have died in one of them."""
        if not isinstance(cause, WorkerLostError):
            return []
        before = [call.method for call in self.in_flight.in_order() if call.began < self.began and call.has_lost(rank)]
        return [f"rank {rank} had not answered {method!r} either, which was sent before" for method in before]

    def _last_words(self, rank: int) -> str:
        """The last lines that the rank wrote, and where its process crashed."""
        diagnostics = self.runtime.diagnostics([rank]).get(rank)
        if diagnostics is None:
            return ""
        return "\n".join(filter(None, [diagnostics.stacks, diagnostics.last_lines]))

    def _timed_out(self) -> CallTimeoutError:
        silent = self.silent_ranks
        whom = ranks_named(silent)
        stacks = self._stacks_of_silent()
        self.lifecycle.break_down(f"method {self.method!r} timed out after {self.timeout_s:g} s on {whom}")
        self.runtime.kill(silent)
        self.in_flight.remove(self)
        others = f", {rank_list(self._answered_s)} had answered" if self._answered_s else ""
        return CallTimeoutError(
            f"method {self.method!r} of group {self.group!r}: no answer from {whom} within {self.timeout_s:g} s{others}; "
            f"killed\n{stacks}".rstrip(),
            silent_ranks=silent,
        )

    def _stacks_of_silent(self) -> str:
        found = self.runtime.diagnostics(self.silent_ranks, stacks=True)
        return fold_stacks({rank: diagnostics.stacks for rank, diagnostics in found.items() if diagnostics.stacks})


def _how_far_from_cause(error: WorkerError) -> int:
    """0: the process died, 1: user code raised, 2: a connection to a peer failed. `min` takes the first of equals."""
    if isinstance(error, WorkerLostError):
        return 0
    message = error.cause_message.lower()
    return 2 if error.cause_type in _LOST_PEER_TYPES or any(words in message for words in _LOST_PEER_WORDS) else 1


def _one_line(rank: int, error: WorkerError) -> str:
    return f"rank {rank}: {error.cause_type}: {error.cause_message.partition(chr(10))[0]}"

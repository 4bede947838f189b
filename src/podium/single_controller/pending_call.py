"""A call on its way: outcomes come in, one verdict comes out. The same rules for every runtime.

When a rank fails, its peers often fail milliseconds later and sometimes first, because it left a collective. So failures
are gathered for a moment, and the one most likely to be the cause is raised with the others folded in. Peers that do not
answer within a grace period are stuck: they are killed and the group is broken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from podium.errors import CallTimeoutError, WorkerError, WorkerLostError
from podium.single_controller.runtime.base import Answer, Runtime, Ticket

SETTLE_S = 1.0
"""Failures that arrive later than this after the first one are consequences, whatever they say."""
PEER_GRACE_S = 2.0
"""How long peers may take to answer after a rank has failed."""

_LOST_PEER_TYPES = {
    *("ConnectionError", "ConnectionResetError", "ConnectionAbortedError", "ConnectionRefusedError", "BrokenPipeError"),
    *("EOFError", "TimeoutError", "DistNetworkError", "DistStoreError", "DistBackendError"),
}
_LOST_PEER_WORDS = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe", "timed out")


@dataclass
class PendingCall:
    """One method call on some ranks. `on_broken` hears why the group cannot be used any more."""

    runtime: Runtime
    group: str
    method: str
    tickets: Mapping[int, Ticket]
    timeout_s: float
    on_broken: Callable[[str], None]
    _silent: dict[int, Ticket] = field(init=False)
    _answers: dict[int, Any] = field(init=False, default_factory=dict)
    _failures: list[tuple[float, WorkerError]] = field(init=False, default_factory=list)
    _deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self._silent = dict(self.tickets)
        self._deadline = time.monotonic() + self.timeout_s

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Whether every rank has answered, or one has failed, or the call's time is over; waits for it up to `wait_s`."""
        give_up = min(self._deadline, time.monotonic() + wait_s)
        while self._silent and not self._failures:
            self._take(max(0.0, give_up - time.monotonic()))
            if time.monotonic() >= give_up:
                break
        return not self._silent or bool(self._failures) or time.monotonic() >= self._deadline

    def finish(self) -> dict[int, Any]:
        """Every rank's answer, in rank order.

        WorkerError for the failure that caused the others; CallTimeoutError, which breaks the group, when time is over.
        """
        self.is_over(wait_s=self.timeout_s)
        if self._failures:
            raise self._verdict()
        if self._silent:
            raise self._timed_out()
        return {rank: self._answers[rank] for rank in self.tickets}

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """The ranks that have not answered yet."""
        return tuple(self._silent)

    def _take(self, timeout_s: float) -> None:
        for rank, outcome in sorted(self.runtime.wait(self._silent, timeout_s).items()):
            del self._silent[rank]
            if isinstance(outcome, Answer):
                self._answers[rank] = outcome.value
            else:
                self._failures.append((time.monotonic(), outcome))

    def _verdict(self) -> WorkerError:
        first = self._failures[0][0]
        while self._silent and (left := first + PEER_GRACE_S - time.monotonic()) > 0:
            self._take(left)
        in_time = [error for arrived, error in self._failures if arrived <= first + SETTLE_S]
        cause = min(in_time, key=_how_far_from_cause)
        silent = self.silent_ranks
        error = _with_consequences(cause, [error for _, error in self._failures if error is not cause], silent)
        self.runtime.kill(silent)
        if silent or any(isinstance(error, WorkerLostError) for _, error in self._failures):
            self.on_broken(f"method {self.method!r} failed: {_one_line(cause)}")
        return error

    def _timed_out(self) -> CallTimeoutError:
        silent = self.silent_ranks
        whom = f"rank(s) {', '.join(map(str, silent))}"
        self.runtime.kill(silent)
        self.on_broken(f"method {self.method!r} timed out after {self.timeout_s:g} s on {whom}")
        return CallTimeoutError(
            f"method {self.method!r} of group {self.group!r}: no answer from {whom} within {self.timeout_s:g} s; killed",
            silent_ranks=silent,
        )


def _how_far_from_cause(error: WorkerError) -> int:
    """0 a process died, 1 user code raised, 2 a peer was missed. `min` takes the first of equals, which arrived first."""
    if isinstance(error, WorkerLostError):
        return 0
    message = error.cause_message.lower()
    return 2 if error.cause_type in _LOST_PEER_TYPES or any(words in message for words in _LOST_PEER_WORDS) else 1


def _with_consequences(cause: WorkerError, others: list[WorkerError], killed: tuple[int, ...]) -> WorkerError:
    lines = [_one_line(error) for error in others]
    lines += [f"rank {rank}: no answer within {PEER_GRACE_S:g} s, killed" for rank in killed]
    if not lines:
        return cause
    error = type(cause)(
        cause.origin,
        cause_type=cause.cause_type,
        cause_message=cause.cause_message,
        remote_traceback=cause.remote_traceback,
        consequences=tuple(lines),
    )
    error.__cause__ = cause.__cause__
    return error


def _one_line(error: WorkerError) -> str:
    return f"rank {error.origin.rank}: {error.cause_type}: {error.cause_message.partition(chr(10))[0]}"

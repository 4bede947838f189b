"""Start the calls on an asynchronous rank in the order in which they were sent, whenever their arguments arrive.

The driver numbers the calls that it sends to a rank (`CallSequencer`). The rank lets a call wait until its predecessors have
started (`SequenceGate`). A call that is sent while no other is in flight needs no number, and so costs nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

OWNER = ""
"""The caller who started the ranks."""


@dataclass(frozen=True)
class SequenceNumber:
    """How many of the caller's calls the rank must start before this one."""

    caller: str
    before: int
    counts: bool
    """Whether later calls wait for this one. They do not where its arguments may never arrive."""


class CallSequencer:
    """On the driver: how many calls each rank was sent, and how many of them it has not answered."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._sent: dict[int, int] = {}
        self._in_flight: dict[int, int] = {}
        self._lock = threading.Lock()

    def number(self, rank: int, *, counts: bool) -> SequenceNumber | None:
        """The number of a call that is sent now; None where no other call of this caller is in flight."""
        with self._lock:
            sent, in_flight = self._sent.get(rank, 0), self._in_flight.get(rank, 0)
            self._sent[rank], self._in_flight[rank] = sent + counts, in_flight + 1
        is_alone = self._caller == OWNER and counts and not in_flight
        return None if is_alone else SequenceNumber(self._caller, sent, counts)

    def answered(self, ranks: Sequence[int]) -> None:
        """A call of each of these ranks has returned or failed."""
        with self._lock:
            for rank in ranks:
                self._in_flight[rank] -= 1


class SequenceGate:
    """In the rank, on its event loop: lets calls start when it is their turn."""

    def __init__(self) -> None:
        self._started: Counter[str] = Counter()
        self._waiting: dict[tuple[str, int], list[asyncio.Future[None]]] = {}

    async def wait_turn(self, number: SequenceNumber | None) -> None:
        """Return when it is this call's turn; the caller starts it before it awaits anything else."""
        caller = OWNER if number is None else number.caller
        while number is not None and self._started[caller] < number.before:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault((caller, number.before), []).append(turn)
            await turn
        if number is None or number.counts:
            self._started[caller] += 1
            for turn in self._waiting.pop((caller, self._started[caller]), ()):
                turn.set_result(None)

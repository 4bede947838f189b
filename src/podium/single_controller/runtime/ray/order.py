"""The order of calls on an asynchronous actor. Ray starts them as their arguments arrive; here they start as they were sent.

The driver counts the calls that it sends to a rank (`Lines`) and tells with a call how many have to start before it; the
rank lets it wait for that (`Turns`). A call that is sent while no other is under way needs no number, and so costs nothing.
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
class Order:
    """How many of the caller's calls this rank has to start before this one."""

    caller: str
    before: int
    counts: bool
    """Whether this one counts for those behind it: one whose arguments may never arrive does not."""


class Lines:
    """On the driver: how many calls each rank has been sent, and how many of them it has not answered."""

    def __init__(self, caller: str) -> None:
        self._caller = caller
        self._sent: dict[int, int] = {}
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def place(self, rank: int, *, counts: bool) -> Order | None:
        """The order of a call that is sent now; None where no other of its caller is under way."""
        with self._lock:
            sent, under_way = self._sent.get(rank, 0), self._open.get(rank, 0)
            self._sent[rank], self._open[rank] = sent + counts, under_way + 1
        is_alone = self._caller == OWNER and counts and not under_way
        return None if is_alone else Order(self._caller, sent, counts)

    def answered(self, ranks: Sequence[int]) -> None:
        """A call of each of these ranks has come back, one way or another."""
        with self._lock:
            for rank in ranks:
                self._open[rank] -= 1


class Turns:
    """In the rank, on its loop: lets calls start when it is their turn."""

    def __init__(self) -> None:
        self._started: Counter[str] = Counter()
        self._waiting: dict[tuple[str, int], list[asyncio.Future[None]]] = {}

    async def take(self, order: Order | None) -> None:
        """Return when it is this call's turn; the caller starts it before it awaits anything else."""
        caller = OWNER if order is None else order.caller
        while order is not None and self._started[caller] < order.before:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault((caller, order.before), []).append(turn)
            await turn
        if order is None or order.counts:
            self._started[caller] += 1
            for turn in self._waiting.pop((caller, self._started[caller]), ()):
                turn.set_result(None)

"""A runtime whose outcomes arrive when the test says: no processes, and short waits."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.errors import Origin, WorkerError, WorkerLostError
from podium.single_controller.runtime.base import Answer, GroupSpec, Outcome, RankCall, Reply, Runtime, by_rank
from podium.single_controller.runtime.diagnostics import Diagnostics

NEVER = 1e9


@dataclass(frozen=True)
class Event:
    """An outcome and the moment it arrives, on the clock of `time.monotonic`."""

    at: float
    outcome: Outcome


def after(seconds: float, outcome: Outcome) -> Event:
    return Event(time.monotonic() + seconds, outcome)


@dataclass
class Scripted(Runtime):
    """A ticket is an Event. `submit` gives the next of `script` to every rank, or None's answer at once."""

    known: dict[int, Diagnostics] = field(default_factory=dict)
    script: list[Event] = field(default_factory=list)
    killed: list[int] = field(default_factory=list)
    asked_for_stacks: list[int] = field(default_factory=list)

    def start(self, spec: GroupSpec) -> dict[int, Event]:
        return {rank: after(0.0, Answer(None)) for rank in range(spec.pool.world_size)}

    def submit(self, calls: Sequence[RankCall], reply: Reply, quiet: Collection[int] = ()) -> dict[int, Event]:
        event = self.script.pop(0) if self.script else after(0.0, Answer(None))
        return dict.fromkeys(by_rank(calls), event)

    def wait(self, tickets: Mapping[int, Event], timeout_s: float) -> dict[int, Outcome]:
        give_up = time.monotonic() + timeout_s
        while True:
            now = time.monotonic()
            ready = {rank: event.outcome for rank, event in tickets.items() if event.at <= now}
            failed = any(not isinstance(outcome, Answer) for outcome in ready.values())
            if failed or len(ready) == len(tickets) or now >= give_up:
                return ready
            time.sleep(0.002)

    def reference(self, ticket: Event) -> Any:
        return ticket

    def diagnostics(self, ranks: Iterable[int], *, stacks: bool = False) -> dict[int, Diagnostics]:
        asked = list(ranks)
        self.asked_for_stacks += asked if stacks else []
        return {rank: self.known[rank] for rank in asked if rank in self.known}

    def kill(self, ranks: Iterable[int]) -> None:
        self.killed += ranks

    def close(self) -> None: ...


def raised(rank: int, kind: str = "ValueError", message: str = "bad") -> WorkerError:
    return WorkerError(Origin("g", "f", rank, "node", 1), cause_type=kind, cause_message=message, remote_traceback="")


def died(rank: int) -> WorkerLostError:
    return WorkerLostError(Origin("g", "f", rank, "node", 1), cause_type="ProcessDied", cause_message="died", remote_traceback="")


def seen(*, stacks: str = "", last_lines: str = "", is_alive: bool = True) -> Diagnostics:
    return Diagnostics("node", 1, is_alive, last_lines, stacks)

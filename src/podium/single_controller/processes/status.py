"""The status of a group: its calls and ranks, for programs and, by `str()`, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from podium.single_controller.processes.lifecycle import State
from podium.single_controller.processes.stragglers import fold_stacks
from podium.single_controller.rank.naming import ranks_named
from podium.single_controller.runtime.diagnostics import Diagnostics


@dataclass(frozen=True)
class CallStatus:
    """A call that some rank has not answered."""

    method: str
    age_s: float
    silent_ranks: tuple[int, ...]


@dataclass(frozen=True)
class GroupStatus:
    """The status of a group at one moment."""

    group: str
    state: State
    reason: str
    """Why it is broken or closed."""
    calls: tuple[CallStatus, ...]
    """The calls that are not over, oldest first."""
    unsent: tuple[str, ...]
    """The methods of the deferred calls."""
    ranks: Mapping[int, Diagnostics]

    def __str__(self) -> str:
        """The calls, the ranks' processes, and their stacks if those were requested, first of the ranks that calls wait for."""
        why = f" since {self.reason}" if self.state is State.BROKEN else ""
        lines = [f"group {self.group!r}: {self.state.value}{why}"]
        lines += [f"  {call.method}: {call.age_s:.1f} s, waits for {ranks_named(call.silent_ranks)}" for call in self.calls]
        lines += [f"  {method}: not sent, waits for its arguments" for method in self.unsent]
        for rank, known in sorted(self.ranks.items()):
            lines.append(f"  rank {rank}: {'alive' if known.is_alive else 'dead'}, node {known.node}, pid {known.pid}")
        return "\n".join(lines + self._stacks())

    def _stacks(self) -> list[str]:
        awaited = {rank for call in self.calls for rank in call.silent_ranks}
        stacks = {rank: known.stacks for rank, known in self.ranks.items() if known.stacks}
        parts = ({rank: text for rank, text in stacks.items() if (rank in awaited) is first} for first in (True, False))
        return [fold_stacks(part) for part in parts if part]

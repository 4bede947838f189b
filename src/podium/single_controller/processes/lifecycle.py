"""The life of a group's ranks: ready, draining while a failure is sorted out, broken, closed. A small state machine, no I/O.

It goes one way but for draining, which may end well: a restart begins a new lifecycle.
"""

from __future__ import annotations

from enum import Enum

from podium.errors import GroupClosedError


class State(Enum):
    READY = "ready"
    DRAINING = "draining"
    """A rank has failed; its peers have a short time to answer."""
    BROKEN = "broken"
    """A rank has died or was killed: `restart()` makes the group ready again."""
    CLOSED = "closed"
    """The ranks were ended on purpose."""


class Lifecycle:
    """The state of the worker processes, and its reason."""

    def __init__(self) -> None:
        self.state = State.READY
        self.reason = ""
        """What broke the group, or how it was closed."""

    def __str__(self) -> str:
        """The state, with its reason."""
        if self.state is State.BROKEN:
            return f"broken since {self.reason}"
        return self.reason if self.state is State.CLOSED else self.state.value

    def drain(self) -> None:
        """A call has failed; it is not known yet whether all ranks survive."""
        if self.state is State.READY:
            self.state = State.DRAINING

    def recover(self) -> None:
        """All ranks have answered the failed call."""
        if self.state is State.DRAINING:
            self.state = State.READY

    def break_down(self, reason: str) -> None:
        """A rank has died or was killed; the first reason stays."""
        if self.state in (State.READY, State.DRAINING):
            self.state, self.reason = State.BROKEN, reason

    def close(self, reason: str = "closed") -> None:
        """The ranks were ended; later events from them are not failures. The first reason stays."""
        if self.state is not State.CLOSED:
            self.state, self.reason = State.CLOSED, reason

    def check_open(self, wish: str) -> None:
        """GroupClosedError, with the wish in its message, if closed."""
        if self.state is State.CLOSED:
            raise GroupClosedError(f"cannot {wish}: it was {self.reason}")

    def check_ready(self, group: str, method: str) -> None:
        """GroupClosedError unless calls can be sent."""
        if self.state is State.READY:
            return
        if self.state is State.BROKEN:
            raise GroupClosedError(
                f"group {group!r} cannot run {method!r}: it is broken since {self.reason}; restart() starts its ranks anew"
            )
        if self.state is State.CLOSED:
            raise GroupClosedError(f"group {group!r} cannot run {method!r}: it was {self.reason}")

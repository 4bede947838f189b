"""Which rank this code runs as.

A contextvar rather than environment variables, so that several ranks can live in one process (the inline runtime) and a
worker built inside another worker belongs to the same rank. A runtime that hosts several enters it around every line of user
code; a process that is one rank becomes it.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RankContext:
    """A rank's place in its group. The defaults describe a worker outside any group."""

    group: str = "standalone"
    runtime: str = "standalone"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    threads: int = 0
    """torch threads while user code runs; 0 leaves torch's own setting. Where a process is one rank, set once, at its start."""
    device_type: Literal["cpu", "cuda"] | None = None
    """What is reserved for the rank: a CPU rank uses no GPU, though torch may see some. None: whatever torch sees."""
    device_index: int | None = None
    """Which of the GPUs that this process sees is reserved for the rank; None where that is not known."""
    master_addr: str | None = None
    master_port: int | None = None
    """Where the ranks meet; None where the runtime has no collectives."""
    call_timeout_s: float | None = None
    """The limit of a call of the group, unless a call has its own; None where calls have no limit."""


_current: ContextVar[RankContext | None] = ContextVar("podium_rank_context", default=None)
_of_process = RankContext()


def current_context() -> RankContext:
    """The rank that this code runs as; a single standalone rank outside any group."""
    return _current.get() or _of_process


def become(context: RankContext) -> None:
    """From here on all of this process runs as that rank, on every thread, but for what is inside `running_as`."""
    global _of_process
    _of_process = context


class running_as:  # noqa: N801 - a context manager, as a class since every call on `inline` enters it
    """Run the block as that rank."""

    __slots__ = ("_context", "_token")

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token: Token[RankContext | None] = _current.set(self._context)

    def __exit__(self, *exc: object) -> None:
        _current.reset(self._token)

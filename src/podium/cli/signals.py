"""SIGTERM, which schedulers send before they take a machine away: it ends a command as Ctrl-C does, with its own exit code."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import ClassVar, Final

from podium.cli.exit_codes import INTERRUPTED, TERMINATED

REPEAT_S: Final = 10.0
"""Within these seconds another SIGTERM changes nothing: some schedulers send one to the process and one to its group."""


class Terminated(KeyboardInterrupt):
    """Raised for SIGTERM. Code that handles Ctrl-C handles it too."""

    is_received: ClassVar[bool] = False
    """Whether this process got a SIGTERM. Ray turns the exception, in some of its calls, into a plain KeyboardInterrupt."""


def raise_on_sigterm() -> None:
    """From now on SIGTERM raises `Terminated` in the main thread."""
    last_s = float("-inf")

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last_s
        if time.monotonic() - last_s < REPEAT_S:
            return
        last_s = time.monotonic()
        Terminated.is_received = True
        raise Terminated

    signal.signal(signal.SIGTERM, handle)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a command that Ctrl-C or SIGTERM ended."""
    return TERMINATED if _is_termination(interrupt) else INTERRUPTED


def in_words(interrupt: KeyboardInterrupt) -> str:
    """The beginning of a message about the interrupt."""
    return "terminated by SIGTERM" if _is_termination(interrupt) else "interrupted"


def _is_termination(interrupt: KeyboardInterrupt) -> bool:
    return Terminated.is_received or isinstance(interrupt, Terminated)

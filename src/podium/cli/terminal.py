"""What the command line writes to: text is printed unchanged, also where the terminal lacks a character."""

from __future__ import annotations

import io
import sys

from rich.console import Console


def text_console() -> Console:
    """Standard output, which shows prompts, answers, paths and settings as plain text, `[INST]` and `:smile:` included."""
    return Console(markup=False, emoji=False, highlight=False)


def accept_all_characters() -> None:
    """From now on a character that the terminal's encoding lacks is written by its number, such as `\\u65e5`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not where a test or a notebook put something of its own
            stream.reconfigure(errors="backslashreplace")

"""What a reward process wrote last, for people: the user's own lines, without the frame of a crash report around them.

Python's faulthandler writes "Fatal Python error: ...", every frame down to the interpreter's start, and "Extension modules: ...".
Of that only the frames of the user's code, and those that it called, say anything.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

MAX_FRAMES = 20
"""Innermost frames that are shown: an endless recursion has a hundred in the dump."""
MAX_TEXT = 2000
"""Characters of what the function printed; its end is shown."""

_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\S+) in (?P<name>.*)')
_NOISE = re.compile(
    r"Fatal Python error: |(Current t|T)hread\b|Stack \(most recent|Extension modules: |  \.\.\.$|  <|  Binary file "
)
_PODIUM = str(Path(__file__).parents[1])
_STDLIB = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class LastWords:
    """The end of what a process wrote, and where it was when it crashed or was aborted."""

    printed: str
    frames: tuple[tuple[str, str, str], ...]
    """(file, line, function), innermost call first; none where there was no dump, or nothing of the user's in it."""

    @property
    def place(self) -> str:
        """The innermost line of the user's, as in `reward.py:7 in score`; "" when it is not known."""
        for path, line, name in self.frames:
            if _is_users(path):
                return f"{Path(path).name}:{line} in {name}"
        return ""

    def __str__(self) -> str:
        if not self.frames:
            return self.printed
        shown = [f'  File "{path}", line {line} in {name}' for path, line, name in self.frames[:MAX_FRAMES]]
        more = [f"  ... {len(self.frames) - MAX_FRAMES} more"] if len(self.frames) > MAX_FRAMES else []
        return "\n".join([*filter(None, [self.printed]), "it was at (innermost call first):", *shown, *more])


def last_words(text: str) -> LastWords:
    """Read the end of a process's output.

    >>> words = last_words('scoring\\nFatal Python error: Aborted\\n\\nCurrent thread 0x1 (most recent call first):\\n'
    ...                    '  File "/mine/reward.py", line 7 in score\\n  File "<string>", line 1 in <module>\\n')
    >>> words.printed, words.place
    ('scoring', 'reward.py:7 in score')
    """
    found: list[tuple[str, str, str]] = []
    printed: list[str] = []
    is_dump = False
    for line in text.splitlines():
        is_dump = is_dump or line.startswith("Fatal Python error: ")
        match = _FRAME.fullmatch(line) if is_dump else None
        if match and match["path"].startswith("<frozen "):
            continue
        if match:
            found.append((match["path"], match["line"], match["name"]))
        elif not is_dump or (line.strip() and not _NOISE.match(line)):
            printed.append(line)
    while found and not _is_users(found[-1][0]):  # what called the user's function
        found.pop()
    return LastWords("\n".join(printed).strip()[-MAX_TEXT:], tuple(found))


def _is_users(path: str) -> bool:
    if path.startswith(("<", f"{_PODIUM}/")):
        return False
    return not path.startswith(f"{_STDLIB}/") or "/site-packages/" in path or "/dist-packages/" in path

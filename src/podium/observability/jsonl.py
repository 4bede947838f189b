"""Files of one JSON object a line, each with its `step`: appended, read, and cut back when a run resumes.

Every line is strict JSON. Floats are written so that they read back exactly; NaN and infinities, which JSON lacks, as null.
A line counts once its newline is there: what a killed writer left behind it is ignored by readers and cut by the next writer.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

from pydantic import JsonValue

from podium.errors import DataError

LARGEST_INT: Final = 10**4000
"""Python reads integers of no more than 4,300 digits back; longer ones are written in hexadecimal, as text."""

Row: TypeAlias = dict[str, JsonValue]


class JsonLines:
    """A file that grows by a row at a time; each row is handed to the operating system before `append` returns."""

    def __init__(self, path: Path) -> None:
        """Open or make the file, cutting a half-written last line."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_torn_line(path)
        self._file: BinaryIO = path.open("ab")

    def append(self, row: Mapping[str, object]) -> None:
        """Write one row. OSError when the disk does not take it."""
        self._file.write(_encode(row))
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Keep only the rows up to and including `step`. A crash leaves the old file or the new one, never a mixture."""
        self._file.close()
        _replace(self.path, [line for line, row in _lines(self.path) if _step_of(row) <= step])
        self._file = self.path.open("ab")

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, without a half-written last line; none when there is no file.

    DataError, naming file and line, for a whole line that is not a JSON object with a step.
    """
    return (row for _, row in _lines(path))


def last_step(path: Path) -> int | None:
    """The step of the last row, or None without rows."""
    return max((_step_of(row) for row in read_rows(path)), default=None)


def plain(value: object) -> JsonValue:
    """The JSON form of a value: numpy and torch scalars become numbers, arrays lists, non-finite floats None.

    What JSON has no form for becomes its `str()`; what does not even have that, a text that says so. An odd field of a sample
    never ends a run.
    """
    try:
        return _plain(value)
    except Exception as exc:  # whatever a foreign class does when it is written, a list that holds itself included
        return f"<a {type(value).__name__} that cannot be written: {type(exc).__name__}>"


def _plain(value: object) -> JsonValue:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < LARGEST_INT else hex(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    tolist = getattr(value, "tolist", None)  # numpy and torch, without importing either
    return _plain(tolist()) if callable(tolist) else str(value)


def _encode(row: Mapping[str, object]) -> bytes:
    """Each field on its own, so that one that cannot be written costs no other."""
    text = json.dumps({str(name): plain(value) for name, value in row.items()}, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "backslashreplace") + b"\n"  # a lone surrogate becomes JSON's own \udcxx


def _lines(path: Path) -> Iterator[tuple[bytes, Row]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield line, _decode(line, f"{path}:{number}")


def _decode(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as exc:
        raise DataError(f"{where} is not JSON ({exc}); remove the line to go on without it") from exc
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise DataError(f"{where} is not an object with an integer 'step'; remove the line to go on without it")
    return row


def _step_of(row: Row) -> int:
    step = row["step"]
    assert isinstance(step, int)  # _decode checked it
    return step


def _cut_torn_line(path: Path) -> None:
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    temp = path.with_name(f".{path.name}.tmp")
    with temp.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    temp.replace(path)

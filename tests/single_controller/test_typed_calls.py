"""Type checkers understand group calls: each marked line of the example is an error, and no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).with_name("typed_calls_example.py")
CHECKERS = {
    "mypy": [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"],
    "basedpyright": [sys.executable, "-m", "basedpyright", "--level", "error"],
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKERS)
@pytest.mark.slow
def test_exactly_the_marked_lines_are_errors(checker: str):
    pytest.importorskip(checker)
    marked = {number for number, line in enumerate(EXAMPLE.read_text().splitlines(), start=1) if "# E:" in line}
    output = subprocess.run([*CHECKERS[checker], str(EXAMPLE)], capture_output=True, text=True, check=False).stdout
    reported = {int(number) for number in re.findall(rf"{EXAMPLE.name}:(\d+)(?::\d+)?\S* .*error", output)}
    assert reported == marked, output

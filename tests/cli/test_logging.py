"""Where a run's own log lines go."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import logging
from podium.cli.main import log_to_stderr

log_to_stderr()
ours, theirs = logging.getLogger("podium.trainers"), logging.getLogger("a.library")
ours.warning("first"), theirs.warning("first of theirs")
logging.getLogger().setLevel(logging.ERROR)  # as inference libraries do when they are loaded
logging.getLogger().handlers.clear()
ours.warning("second"), theirs.warning("second of theirs")
"""


def test_our_lines_appear_once_also_after_a_library_has_taken_the_root_logger():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stderr.splitlines() == [
        "WARNING podium.trainers: first",
        "WARNING a.library: first of theirs",
        "WARNING podium.trainers: second",
    ]

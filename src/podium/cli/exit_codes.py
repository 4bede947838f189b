"""Exit codes of the process, besides 0."""

from __future__ import annotations

from typing import Final

FAILED: Final = 1
BAD_INPUT: Final = 2
"""Nothing was started."""
INTERRUPTED: Final = 130
"""After Ctrl-C: 128 + SIGINT, as shells report it."""
TERMINATED: Final = 143
"""After SIGTERM, with which schedulers preempt and end jobs: 128 + SIGTERM."""

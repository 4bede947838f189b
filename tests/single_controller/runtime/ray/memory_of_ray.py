"""What processes and Ray's store hold, as seen from outside: for tests of growth."""

from __future__ import annotations

import ctypes
import gc
import time
from pathlib import Path

import ray
from ray._private import internal_api


def anonymous_bytes() -> int:
    """This process's own memory, without what malloc keeps for later; what it maps of the store is not counted."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


def store_bytes() -> int:
    """What Ray's object store holds, on all nodes."""
    state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    return int(internal_api.get_memory_info_reply(state).store_stats.object_store_bytes_used)


def store_falls_to(limit: int, within_s: float = 20.0) -> bool:
    """Whether the store frees objects without references."""
    give_up = time.monotonic() + within_s
    while (held := store_bytes()) > limit and time.monotonic() < give_up:
        gc.collect()
        time.sleep(0.05)
    return held <= limit

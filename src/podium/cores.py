"""How many cores this process may use: on a shared machine or in a container, fewer than the machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def num_cores() -> int:
    """The cores that this process may use, at least 1."""
    return core_limit()[0]


def core_limit() -> tuple[int, str]:
    """The cores that this process may use, and who says so: the affinity mask, or a lower quota of its cgroup."""
    if hasattr(os, "sched_getaffinity"):
        cores, source = len(os.sched_getaffinity(0)), "the affinity mask"
    else:
        cores, source = os.cpu_count() or 1, "the machine"
    quota = min(_quotas(), default=None)
    return (quota, "the cgroup's CPU quota") if quota is not None and quota < cores else (cores, source)


def quota_cores(text: str) -> int | None:
    """Whole cores of a cgroup's quota, as "quota period" in microseconds; None where there is no limit.

    >>> quota_cores("250000 100000"), quota_cores("50000 100000"), quota_cores("max 100000"), quota_cores("-1 100000")
    (2, 1, None, None)
    """
    fields = text.split()
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or int(fields[1]) == 0:
        return None
    return max(1, int(fields[0]) // int(fields[1]))


def cgroup_parents(text: str) -> list[str]:
    """The process's cgroup of version 2 and those above it, from the text of /proc/self/cgroup.

    >>> cgroup_parents("1:cpu:/x\\n0::/a/b")
    ['a/b', 'a', '']
    """
    own = next((line[3:] for line in text.splitlines() if line.startswith("0::")), "/")
    parts = [part for part in own.split("/") if part not in ("", "..")]
    return ["/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _quotas() -> Iterator[int]:
    own = _text(Path("/proc/self/cgroup"))
    quotas = [_text(CGROUP / group / "cpu.max") for group in cgroup_parents(own)]
    quotas.append(" ".join(_text(CGROUP / "cpu" / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")))
    yield from (quota for quota in map(quota_cores, quotas) if quota is not None)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

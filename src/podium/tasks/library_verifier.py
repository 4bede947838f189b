"""reasoning-gym's own verifiers as a function for a `RewardPool`: several evaluate the policy's text as an expression of Python.

Only ever imported by a process of the pool. A guard refuses what an expression must not do to the machine: run a program, write
or remove a file, open a connection, signal a process, load a C library. It is a guard and no sandbox against a clever attacker.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import reasoning_gym
from pydantic import JsonValue

from podium.errors import RewardError
from podium.tasks.library_problems import is_solved, right_answer

REFUSED_MODULES = frozenset(
    [
        "ctypes",
        "ftplib",
        "http",
        "imaplib",
        "nntplib",
        "poplib",
        "shutil",
        "signal",
        "smtplib",
        "socket",
        "sqlite3",
        "subprocess",
        "syslog",
        "telnetlib",
        "tempfile",
        "urllib",
    ]
)
"""Modules none of whose audit events (docs.python.org/3/library/audit_events.html) a verifier needs."""
REFUSED_EVENTS = frozenset(
    [
        "os.chmod",
        "os.chown",
        "os.exec",
        "os.fork",
        "os.forkpty",
        "os.kill",
        "os.killpg",
        "os.link",
        "os.mkdir",
        "os.posix_spawn",
        "os.putenv",
        "os.remove",
        "os.removexattr",
        "os.rename",
        "os.rmdir",
        "os.setxattr",
        "os.spawn",
        "os.startfile",
        "os.symlink",
        "os.system",
        "os.truncate",
        "os.unsetenv",
        "os.utime",
        "pty.spawn",
    ]
)
"""Further audit events that no verifier needs."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC

_datasets: dict[str, Any] = {}
_refused: list[str] = []


def prepare(*, name: str, params: Mapping[str, JsonValue]) -> None:
    """Build the dataset once, and verify one right answer, so that what the library imports late is there before the guard is."""
    dataset = _datasets[name] = reasoning_gym.create_dataset(name, seed=0, size=1, **params)
    entry = dataset[0]
    dataset.score_answer(answer=right_answer(entry), entry=entry)
    sys.dont_write_bytecode = True  # the guard would take it for the response's doing
    sys.addaudithook(_guard)


def verify(
    data_source: str,
    solution_str: str,
    ground_truth: JsonValue,
    extra_info: Mapping[str, Any],
    *,
    name: str,
    params: Mapping[str, JsonValue],
) -> float:
    """1.0 when the library scores the stripped response as a full solution of `extra_info["entry"]`, else 0.0.

    RewardError when the response tried what the guard refuses; verifiers catch every exception, so it is looked up afterwards.
    """
    _refused.clear()
    verdict = is_solved(_datasets[name], solution_str, extra_info["entry"])
    if _refused:
        raise RewardError(f"verifying the response was about to do {_refused[0]}, which was refused")
    return verdict


def _guard(event: str, arguments: tuple[Any, ...]) -> None:
    is_writing = event == "open" and isinstance(arguments[2], int) and bool(arguments[2] & WRITES)
    if is_writing or event in REFUSED_EVENTS or event.partition(".")[0] in REFUSED_MODULES:
        _refused.append(f"{event}{arguments!r:.100}")
        raise PermissionError(f"{event} is refused to the text of a response")

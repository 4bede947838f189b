"""What can be learnt of ranks from outside, on their own machine, however stuck or dead they are."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from podium import process_probe
from podium.process_probe import ProcessProbe

PROBES_AT_ONCE = 32
"""Ranks of a machine that are asked for their stacks at the same time."""


@dataclass(frozen=True)
class Diagnostics:
    """What is known of a rank's process. Empty text is "nothing known"."""

    node: str
    pid: int
    is_alive: bool
    last_lines: str = ""
    """The last lines that the process wrote."""
    stacks: str = ""
    """Where its threads are, where `stacks=True` asked for that; of a crashed process, where it crashed."""


def diagnose(node: str, probes: Sequence[ProcessProbe], stacks: bool) -> list[Diagnostics]:
    """What is known of each of these processes of this machine, whose node has that name."""
    with ThreadPoolExecutor(min(len(probes), PROBES_AT_ONCE)) as threads:  # a stuck process takes a second to answer
        return list(threads.map(lambda probe: _diagnose(node, probe, stacks), probes))


def _diagnose(node: str, probe: ProcessProbe, stacks: bool) -> Diagnostics:
    is_alive = process_probe.is_alive(probe)
    where = process_probe.fatal_trace(probe) if not is_alive else process_probe.take_stacks(probe) if stacks else ""
    return Diagnostics(node, probe.pid, is_alive, process_probe.last_lines(probe), where)

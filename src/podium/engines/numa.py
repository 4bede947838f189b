"""Keep a rank's threads on the cores next to its GPU. Where that is not possible, nothing changes."""

from __future__ import annotations

import os
from pathlib import Path

from podium.engines.device import pci_address, pick_device

SYSFS = Path("/sys")


def set_numa_affinity() -> str:
    """Keep the calling thread, and those it starts from now on, on the cores of the NUMA node that holds the rank's GPU.

    Returns what was done, or the reason why not: "bound to NUMA node 1: 12 cores", "not bound: one NUMA node". Call it first in a
    worker's constructor: threads that torch has started already stay where they are.
    """
    return bind(pci_address(pick_device()), sysfs=SYSFS)


def bind(pci: str | None, *, sysfs: Path) -> str:
    """The same for the device of that PCI address, None for one without a node; `sysfs` is where Linux describes the machine."""
    nodes = sorted((sysfs / "devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        return "not bound: one NUMA node" if nodes else "not bound: this system does not list its NUMA nodes"
    if pci is None or not hasattr(os, "sched_setaffinity"):
        return "not bound: no GPU" if pci is None else "not bound: this system cannot bind threads"
    node = _text(sysfs / "bus/pci/devices" / pci / "numa_node")
    cores = cores_of(_text(sysfs / f"devices/system/node/node{node}/cpulist")) & os.sched_getaffinity(0)
    if not cores:
        return f"not bound: GPU {pci} is on NUMA node {node or 'unknown'}, of which this process may use no core"
    os.sched_setaffinity(0, cores)
    return f"bound to NUMA node {node}: {len(cores)} cores"


def cores_of(text: str) -> set[int]:
    """The cores of a list as Linux writes it.

    >>> sorted(cores_of("0-2,8,10-11"))
    [0, 1, 2, 8, 10, 11]
    """
    spans = [span.partition("-") for span in text.split(",") if span]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""

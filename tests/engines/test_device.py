"""Devices under verl's names, and threads that stay near a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from podium import engines
from podium.engines import device, numa

GPU = "0000:3b:00.0"
needs_no_gpu = pytest.mark.skipif(device.has_gpu(), reason="says what a machine without a GPU says")


@needs_no_gpu
def test_what_the_getters_say_on_a_cpu():
    assert engines.get_device_name() == "cpu"
    assert engines.get_torch_device() is torch.cpu
    assert engines.get_nccl_backend() == "gloo"
    assert engines.get_visible_devices_keyword() == "CUDA_VISIBLE_DEVICES"
    assert device.pci_address(torch.device("cpu")) is None


def test_what_the_getters_say_with_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    reason = engines.get_device_name(), engines.get_torch_device(), engines.get_nccl_backend()
    assert reason == ("cuda", torch.cuda, "nccl")


def machine(root: Path, nodes: dict[int, str], gpu_on: int = 1) -> Path:
    """A folder that describes a machine as Linux does."""
    for node, cores in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    slot = root / "bus/pci/devices" / GPU
    slot.mkdir(parents=True)
    (slot / "numa_node").write_text(f"{gpu_on}\n")
    return root


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """What threads were bound to; the process may use cores 0 to 7."""
    asked: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: asked.append(cores))
    return asked


def test_threads_are_bound_to_the_cores_of_the_gpus_node_that_the_process_may_use(tmp_path: Path, bound: list[set[int]]):
    assert numa.bind(GPU, sysfs=machine(tmp_path, {0: "0-3", 1: "4-6,12"})) == "bound to NUMA node 1: 3 cores"
    assert bound == [{4, 5, 6}]


@pytest.mark.parametrize(
    ("nodes", "gpu_on", "pci", "reason"),
    [
        ({0: "0-7"}, 0, GPU, "not bound: one NUMA node"),
        ({}, 0, GPU, "not bound: this system does not list its NUMA nodes"),
        ({0: "0-3", 1: "4-7"}, 1, None, "not bound: no GPU"),
        ({0: "0-3", 1: "8-9"}, 1, GPU, f"not bound: GPU {GPU} is on NUMA node 1, of which this process may use no core"),
        ({0: "0-3", 1: "4-7"}, -1, GPU, f"not bound: GPU {GPU} is on NUMA node -1, of which this process may use no core"),
        ({0: "0-3", 1: "4-7"}, 1, "0000:99:00.0", "not bound: GPU 0000:99:00.0 is on NUMA node unknown, of which"),
    ],
)
def test_nothing_is_bound_and_the_reason_returned(
    nodes: dict[int, str], gpu_on: int, pci: str | None, reason: str, tmp_path: Path, bound: list[set[int]]
):
    assert numa.bind(pci, sysfs=machine(tmp_path, nodes, gpu_on)).startswith(reason)
    assert bound == []


def test_this_machine_is_left_alone_or_bound_to_a_part_of_its_cores():
    before = os.sched_getaffinity(0)
    try:
        reason = engines.set_numa_affinity()
        after = os.sched_getaffinity(0)
    finally:
        os.sched_setaffinity(0, before)
    assert reason.startswith("bound to NUMA node " if after < before else ("bound to NUMA node ", "not bound: "))
    assert after <= before

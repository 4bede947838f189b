"""The one place that names devices, their communication backends and the tools that look into them.

Other modules get their `torch.device` here; `single_controller` says which device a rank has. The CUDA
branches have never been run on a GPU by this project. The getters at the end have the names that users of verl know.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from podium.single_controller.rank.context import current_context
from podium.single_controller.rank.devices import may_use_gpu, own_device, use_device


def pick_device() -> torch.device:
    """The device of the rank that this code runs as: the GPU that is reserved for it, or the CPU.

    A GPU becomes torch's current one. Outside any group it is the first GPU where torch sees any. ResourceError when a rank's
    GPU cannot be seen.
    """
    return use_device(own_device(current_context()))


def has_gpu() -> bool:
    """Whether torch sees a GPU that the rank which this code runs as may use."""
    return may_use_gpu(current_context())


def rng_devices(device: torch.device) -> list[torch.device]:
    """Devices, besides the CPU, whose random state a forward pass on `device` uses."""
    return [device] if device.type == "cuda" else []


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or on the CPU, where torch says so in a plain RuntimeError."""
    words = ("out of memory", "can't allocate memory", "alloc_failed")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(word in str(error).lower() for word in words)


def pci_address(device: torch.device) -> str | None:
    """A GPU's place on the PCI bus, as Linux names its folder (0000:3b:00.0); None for other devices."""
    if device.type != "cuda":
        return None
    found: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks these three
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


# -- tools that look into a device (all but the first need a GPU) ---------------------------------------------------------


def profiled_activities() -> list[ProfilerActivity]:
    """What torch.profiler can record here."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu() else [])]


def record_allocations(max_entries: int) -> None:
    """Remember the newest so many allocations of GPU memory, with where in the program they were made."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def write_allocations(path: Path) -> None:
    """Write what `record_allocations` remembers as a snapshot for https://pytorch.org/memory_viz, and forget it."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


def open_capture() -> None:
    """Start the capture of an external profiler that waits for it (`nsys profile --capture-range=cudaProfilerApi`)."""
    torch.cuda.profiler.start()


def close_capture() -> None:
    """End that capture."""
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def named_range(name: str) -> AbstractContextManager[None]:
    """A block with that name in the recording of an external profiler."""
    return torch.cuda.nvtx.range(name)


# -- under the names of verl ----------------------------------------------------------------------------------------------


def get_device_name() -> str:
    """ "cuda" where torch sees a GPU that this rank may use, else "cpu"."""
    return "cuda" if has_gpu() else "cpu"


def get_torch_device() -> ModuleType:
    """torch's module of that device: `torch.cuda` or `torch.cpu`."""
    return torch.cuda if has_gpu() else torch.cpu


def get_visible_devices_keyword() -> str:
    """The environment variable by which GPUs are shown to a process, on a machine without any too."""
    return "CUDA_VISIBLE_DEVICES"


def get_nccl_backend() -> str:
    """The torch.distributed backend for tensors on that device: "nccl", or "gloo" on a CPU."""
    return "nccl" if has_gpu() else "gloo"

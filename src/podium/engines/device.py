"""The one place that names devices and their communication backends.

Everything else holds a `torch.device` that came from here. The CUDA branches have never been run on a GPU by this project.
"""

from __future__ import annotations

import torch

from podium.errors import EngineError


def pick_device(local_rank: int) -> torch.device:
    """The device of a rank: its own GPU where torch sees any, else the CPU.

    A rank that sees one GPU owns it, whatever its local rank (Ray shows each actor only its own); one that sees several
    takes the one of its local rank. EngineError when there are too few.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count > 1 and local_rank >= count:
        raise EngineError(f"local rank {local_rank} has no GPU of its own: torch sees {count} on this node")
    return torch.device("cuda", local_rank if count > 1 else 0)


def collective_backend(device: torch.device) -> str:
    """The torch.distributed backend for collectives of tensors on `device`."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def rng_devices(device: torch.device) -> list[torch.device]:
    """Devices, besides the CPU, whose random state a forward pass on `device` uses."""
    return [device] if device.type == "cuda" else []

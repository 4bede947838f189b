"""Which device a rank computes on: what is reserved for it, and otherwise what torch sees.

LOCAL_RANK does not say so: where Ray shows a rank only its own GPU, that is number 0 for every rank of the node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from podium.errors import ResourceError
from podium.single_controller.rank.context import RankContext


def own_device(context: RankContext) -> torch.device:
    """The device of a rank. ResourceError where its GPU cannot be seen."""
    return choose_device(context, torch.cuda.device_count() if may_use_gpu(context) else 0)


def may_use_gpu(context: RankContext) -> bool:
    """Whether torch sees a GPU here that is not hidden from this rank."""
    return context.device_type != "cpu" and torch.cuda.is_available()


def use_device(device: torch.device) -> torch.device:
    """Make a GPU the current one of this thread, in use from here on; of the CPU nothing needs to be said. Returns it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.init()  # else init_device_mesh would set GPU number LOCAL_RANK, which a rank that sees one does not have
    return device


def collective_backend(device: torch.device) -> str:
    """The torch.distributed backend for collectives of tensors on `device`."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def choose_device(context: RankContext, num_gpus: int) -> torch.device:
    """The device of a rank whose process sees `num_gpus`. ResourceError where its own is not among them.

    A process that sees one GPU owns it, whatever its local rank; of several, a rank takes the one that is reserved for it,
    or, where nothing is known to be, the one of its local rank.

    >>> choose_device(RankContext(local_rank=3), num_gpus=1), choose_device(RankContext(local_rank=3), num_gpus=8)
    (device(type='cuda', index=0), device(type='cuda', index=3))
    >>> choose_device(RankContext(device_type="cpu"), num_gpus=8)
    device(type='cpu')
    """
    who = f"rank {context.rank} of group {context.group!r}"
    if context.device_type == "cpu" or (num_gpus == 0 and context.device_type is None):
        return torch.device("cpu")
    if num_gpus == 0:
        raise ResourceError(
            f"{who} has a GPU reserved, but torch {torch.__version__} sees none in its process: install torch for CUDA and its "
            "driver on that node, or make the pool with use_gpu=False"
        )
    index = 0 if num_gpus == 1 else context.local_rank if context.device_index is None else context.device_index
    if index >= num_gpus:
        raise ResourceError(
            f"{who} needs GPU {index} of its node, but torch sees {num_gpus} in its process: check CUDA_VISIBLE_DEVICES there, "
            "or put fewer ranks on the node"
        )
    return torch.device("cuda", index)


def device_index(reserved: Sequence[str], shown: str | None) -> int | None:
    """Which of the GPUs that a process sees is the first one reserved for it; None where none is, or where it is not known.

    `reserved` are GPU numbers of the node or identifiers, `shown` is the value of CUDA_VISIBLE_DEVICES, None where it is not
    set.

    >>> device_index(["3"], "3"), device_index(["3"], None), device_index(["6"], "4,5,6,7"), device_index([], None)
    (0, 3, 2, None)
    """
    if not reserved:
        return None
    if shown is None:
        return int(reserved[0]) if reserved[0].isdecimal() else None
    entries = [entry.strip() for entry in shown.split(",")]
    return entries.index(reserved[0]) if reserved[0] in entries else None

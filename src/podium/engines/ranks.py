"""The data-parallel ranks that train one model together: what they agree on, and how its tensors are spread over them.

Without a process group a rank has everything and calls no collective. The ranks of a group, also of a group of one, shard
parameters, gradients and optimizer with FSDP2. The caller sees no difference but for `size`. Numbers are summed on the CPU,
which the group's backends can do whatever the device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


class DataParallelRanks:
    """The ranks of torch.distributed's default group, or this process alone where there is none."""

    def __init__(self, device: torch.device) -> None:
        self.is_sharded = dist.is_initialized()
        """Whether parameters are spread over a group, which may be of one rank."""
        self.size = dist.get_world_size() if self.is_sharded else 1
        self.rank = dist.get_rank() if self.is_sharded else 0
        self._mesh: DeviceMesh | None = (
            init_device_mesh(device.type, (self.size,), mesh_dim_names=("dp",)) if self.is_sharded else None
        )

    def sum(self, value: float) -> float:
        """The sum of a number over the ranks, the same on each."""
        return self._reduce(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """The largest of a number over the ranks, the same on each."""
        return self._reduce(value, dist.ReduceOp.MAX)

    def shard(self, model: nn.Module, block_names: set[str], policy: MixedPrecisionPolicy) -> None:
        """Spread the model's parameters over the ranks, in place: one unit per block, and one for the rest.

        `policy` says in which dtypes they are gathered and their gradients added up.
        """
        if self._mesh is None:
            return
        for module in model.modules():
            if type(module).__name__ in block_names:
                fully_shard(module, mesh=self._mesh, mp_policy=policy)
        fully_shard(model, mesh=self._mesh, mp_policy=policy)

    def reshard(self, model: nn.Module) -> None:
        """Give back what a forward pass without a backward has gathered; otherwise its parameters would be plain tensors."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _reduce(self, value: float, op: dist.ReduceOp.RedOpType) -> float:
        if self.size == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(number, op)
        return float(number)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, on every rank (a collective); any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def fill(target: Tensor, source: Tensor) -> None:
    """Copy a full tensor into `target`, each rank its own shard; nothing is sent."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            target.to_local().copy_(_shard(target, source).to_local())
        else:
            target.copy_(source)


def sharded_like(template: Tensor, source: Tensor) -> Tensor:
    """A private copy of a full tensor, on the template's device and spread as it is; nothing is sent."""
    copied = source.to(template.device, copy=True)
    return _shard(template, copied) if isinstance(template, DTensor) else copied


def _shard(template: DTensor, source: Tensor) -> DTensor:
    return distribute_tensor(source.to(template.device), template.device_mesh, template.placements, src_data_rank=None)

"""`ResourcePool`: how many ranks on which nodes. A value; nothing is reserved until a group is started on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podium.errors import ResourceError


@dataclass(frozen=True, init=False)
class ResourcePool:
    """`process_on_nodes[n]` ranks on node n; ranks are numbered node by node.

    >>> pool = ResourcePool([2, 1])
    >>> pool.world_size, pool.local_rank_list(), pool.local_world_size_list()
    (3, [0, 1, 0], [2, 2, 1])
    """

    process_on_nodes: tuple[int, ...]
    max_colocate_count: int
    """How many groups share the pool's devices; each rank takes 1/max_colocate_count of one."""
    use_gpu: bool | None
    """None uses GPUs where the machine has enough of them."""

    def __init__(self, process_on_nodes: Sequence[int], *, max_colocate_count: int = 1, use_gpu: bool | None = None) -> None:
        object.__setattr__(self, "process_on_nodes", tuple(process_on_nodes))
        object.__setattr__(self, "max_colocate_count", max_colocate_count)
        object.__setattr__(self, "use_gpu", use_gpu)
        if not self.process_on_nodes or any(type(count) is not int or count < 1 for count in self.process_on_nodes):
            counts = list(self.process_on_nodes)
            raise ResourceError(f"process_on_nodes is the number of ranks (1 or more) of each node, got {counts}")
        if max_colocate_count < 1:
            raise ResourceError(f"max_colocate_count is 1 or more, got {max_colocate_count}")

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of ranks on its node."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For each rank, its number within its node."""
        return [local_rank for count in self.process_on_nodes for local_rank in range(count)]

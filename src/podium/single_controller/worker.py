"""`Worker`: the base of everything that runs on ranks. It knows its place in the group and which meshes it is part of."""

from __future__ import annotations

from typing import Any, Self

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch exports it without saying so

from podium.errors import DispatchError, RegistrationError, nearest
from podium.single_controller.context import RankContext, current_context
from podium.single_controller.dispatch import Dispatch
from podium.single_controller.registration import register
from podium.single_controller.runtime.capabilities import require


class Worker:
    """One rank of a group. Outside any group it is a group of one, so `MyWorker()` works as a plain object.

    Its rank is known before `__init__` runs, whether or not a subclass calls `super().__init__()` and when.
    """

    _rank_context: RankContext
    _meshes: dict[str, tuple[int, bool]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls)
        worker._rank_context = current_context()
        worker._meshes = {}
        return worker

    def __init__(self) -> None:
        pass  # says that a worker takes no arguments unless its class does: object.__init__ would swallow any

    @property
    def rank(self) -> int:
        return self._rank_context.rank

    @property
    def world_size(self) -> int:
        return self._rank_context.world_size

    @property
    def local_rank(self) -> int:
        """The rank among those of the same node."""
        return self._rank_context.local_rank

    @property
    def local_world_size(self) -> int:
        return self._rank_context.local_world_size

    def init_process_group(self, backend: str) -> None:
        """Join the peers in torch.distributed's default group; a second call does nothing.

        A group of one needs no peers and works everywhere. UnsupportedByRuntime where ranks cannot run at the same time.
        """
        if dist.is_initialized():
            return
        if self.world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            return
        require(self._rank_context.runtime, "collectives", f"collectives between {self.world_size} ranks")
        dist.init_process_group(backend)

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Say, once per mesh, which shard this rank works on and whether its result is the one that counts."""
        if mesh_name in self._meshes:
            raise RegistrationError(f"{type(self).__name__} on rank {self.rank} has registered mesh {mesh_name!r} already")
        self._meshes[mesh_name] = (dp_rank, is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> tuple[int, bool]:
        """This rank's (dp_rank, is_collect) in a mesh; the controller asks once and remembers."""
        if mesh_name not in self._meshes:
            raise DispatchError(
                f"{type(self).__name__} has no mesh {mesh_name!r}{nearest(mesh_name, self._meshes)}; it has "
                f"{', '.join(self._meshes) or 'none'}; its constructor calls "
                f"self._register_dispatch_collect_info({mesh_name!r}, dp_rank, is_collect)"
            )
        return self._meshes[mesh_name]

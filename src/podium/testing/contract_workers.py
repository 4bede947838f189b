"""The workers of the runtimes' contract suite."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import (
    ConfigError,
)
from podium.protocol import DataProto
from podium.single_controller import (
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from podium.testing.by_reference import RowMaker

WORLD_SIZE = 4
THREADS = 2
MESH = ((1, False), (1, True), (0, True), (0, False))
"""(dp_rank, is_collect) by rank: two shards of two peers each, in an order that is not the ranks'."""


class NodeSetup:
    """Leaves a mark in a folder, and refuses one that has it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self) -> None:
        mark = Path(self.folder) / "mark"
        if mark.exists():
            raise ConfigError(f"{mark} was here already")
        mark.touch()


class LooksAtSetup(Worker):
    """Counts, as it is built, what the setup has left."""

    def __init__(self, folder: str) -> None:
        self.found = len([*Path(folder).iterdir()])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def files_at_start(self) -> int:
        return self.found


class ContractWorker(RowMaker):
    """Reports where and how it runs, and its arguments. It calls no `super().__init__()`, as some workers do not."""

    def __init__(self, mesh: tuple[tuple[int, bool], ...] = ()) -> None:
        if mesh:
            self._register_dispatch_collect_info("model", *mesh[self.rank])
        self.thread = threading.get_ident()
        self.threads_at_start = torch.get_num_threads()
        self.log: list[int] = []
        self.marks: list[int | None] = []
        self.kept: dict[str, Tensor | NDArray[np.float64]] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self) -> dict[str, str | None]:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        return {name: os.environ.get(name) for name in names}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def threads(self) -> tuple[int, int, bool]:
        return self.threads_at_start, torch.get_num_threads(), threading.get_ident() == self.thread

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def async_add(self, left: int, *, right: int) -> int:
        return self.rank + left + right

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def on_rank_zero(self, values: list[int]) -> tuple[int, list[int]]:
        return self.rank, values

    @register(Dispatch.RANK_ZERO)
    def on_rank_zero_only(self, values: list[int]) -> tuple[int, list[int]]:
        return self.rank, values

    @register()
    def own_and_shared(self, own: object, shared: object = None) -> tuple[object, object]:
        return own, shared

    @register(Dispatch.DP_COMPUTE_METRIC)
    def count_rows(self, batch: DataProto) -> tuple[int, int]:
        return len(batch), int(batch.padding_mask.sum())

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_one(self, batch: DataProto) -> DataProto:
        time.sleep(0.05)
        return DataProto({"x": batch.batch["x"] + 1})

    def not_registered(self, number: Any) -> Any:
        return self.rank * number

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def tag_rows(self, batch: DataProto, *, factor: int = 1) -> DataProto:
        ranks = torch.full((len(batch),), self.rank)
        return DataProto({"x": batch.batch["x"] * factor, "rank": ranks, "shard": torch.full_like(ranks, len(batch))})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"))
    def tag_rows_on_mesh(self, batch: DataProto) -> DataProto:
        self.kept["rows"] = batch.batch["x"]
        return self.tag_rows(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept_rows(self) -> list[int]:
        return [int(row) for row in self.kept["rows"]]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_and_write(self, batch: DataProto, array: NDArray[np.float64]) -> tuple[Tensor, NDArray[np.float64]]:
        batch.batch["x"].add_(1)
        batch.non_tensor_batch["row"][0] += 1
        batch.meta_info["note"][0] += 1
        array += 1
        self.kept = {"tensor": batch.batch["x"], "array": array}
        return batch.batch["x"], array

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept_sum(self) -> float:
        return float(self.kept["tensor"].sum() + self.kept["array"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def append(self, number: int) -> list[int]:
        self.log.append(number)
        return self.log

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def mark(self, number: int | None = None, payload: Tensor | None = None) -> None:
        self.marks.append(number)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def mark_own(self, own: object) -> None:
        self.marks.append(None)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_marks(self) -> list[int | None]:
        marks, self.marks = self.marks, []
        return marks

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def echo_later(self, value: object) -> object:
        return value

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def zeros_later(self, num: int) -> NDArray[np.float64]:
        self.kept["zeros"] = zeros = np.zeros(num)
        return zeros

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_zeros(self) -> float:
        return float(self.kept["zeros"].sum())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def repeat_rows(self, batch: DataProto, times: int) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"].repeat_interleave(times)}, meta_info=batch.meta_info)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def asks_for_gradients(self, value: dict[str, list[Tensor]]) -> bool:
        return value["k"][0].requires_grad

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def computed(self) -> tuple[Tensor, dict[str, Tensor], DataProto]:
        result = torch.ones(2, requires_grad=True) * 2
        return result, {"k": result}, DataProto({"x": result})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def computed_later(self) -> tuple[Tensor, dict[str, Tensor], DataProto]:
        return self.computed()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sparse_rows(self, batch: DataProto) -> DataProto:
        batch.batch["s"] = torch.eye(len(batch)).to_sparse()
        return batch

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def product(self, seed: int) -> tuple[Tensor, Tensor]:
        return product(seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def raise_on(self, rank: int) -> int:
        if self.rank == rank:
            raise KeyError(f"raised on rank {rank}")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def raise_later(self, rank: int) -> int:
        if self.rank == rank:
            raise KeyError(f"raised later on rank {rank}")
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep_on(self, rank: int, seconds: float) -> int:
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_ranks(self) -> int:
        self.init_process_group("gloo")
        total = torch.tensor(self.rank)
        if self.world_size > 1:
            dist.all_reduce(total)
        return int(total)


class Neighbour(Worker):
    """A second role: it has a method of the first one's name, and a mesh of its own."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("model", self.rank, True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> str:
        return f"neighbour {self.rank} of {self.world_size}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ask_the_other(self) -> list[int]:
        other: ContractWorker = self.get_fused_worker_by_name("first")
        return other.kept_rows()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("model"))
    def tag_rows_on_mesh(self, batch: DataProto) -> DataProto:
        return DataProto({"rank": torch.full((len(batch),), self.rank)})


def add(worker: ContractWorker, batch: DataProto, number: int) -> DataProto:
    """What a driver brings along: the rows' rank, plus a number."""
    return DataProto({"x": batch.batch["x"] + worker.rank + number})


class FailsToStart(Worker):
    def __init__(self, rank: int) -> None:
        if self.rank == rank:
            raise FileNotFoundError("no such model")


def product(seed: int) -> tuple[Tensor, Tensor]:
    """Sums whose order, and so whose last bits, depend on the number of threads."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(257, 1023, generator=generator)
    return left @ left.T, torch.randn(1 << 18, generator=generator).sum()

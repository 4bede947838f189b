"""What every runtime must do, as checks of behaviour that a driver sees. What a runtime cannot do, by its capabilities,
must be refused with UnsupportedByRuntime.

A check of `CALL_CHECKS` takes a healthy group of four ranks and leaves it healthy; one of `LIFE_CHECKS` takes the
runtime's name and makes groups of its own, which may end badly. `check_runtime` runs them all.
"""

from __future__ import annotations

import os
import pickle
import platform
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import (
    CallTimeoutError,
    ConfigError,
    DispatchError,
    GroupClosedError,
    ResourceError,
    UnsupportedByRuntime,
    WorkerError,
    WorkerLostError,
)
from podium.protocol import DataProto
from podium.runtimes import runtimes_with
from podium.single_controller import (
    CAPABILITIES,
    Copy,
    Dispatch,
    Execute,
    Init,
    PerRank,
    ResourcePool,
    State,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from podium.testing.by_reference import REFERENCE_CHECKS, RowMaker
from podium.testing.expecting import expected

WORLD_SIZE = 4
THREADS = 2
MIXED_CALLS = 200
MESH = ((1, False), (1, True), (0, True), (0, False))
"""(dp_rank, collects) by rank: two shards of two peers each, in an order that is not the ranks'."""

ContractGroup: TypeAlias = WorkerGroup["ContractWorker"]


def check_runtime(runtime: str) -> None:
    """Run the whole suite on a runtime of that name; the first check that does not hold raises."""
    with contract_group(runtime) as group:
        for check in CALL_CHECKS:
            check(group)
    for life_check in LIFE_CHECKS:
        life_check(runtime)


def contract_group(runtime: str) -> ContractGroup:
    """The group that `CALL_CHECKS` share: four ranks of two threads."""
    made = Init(ContractWorker, MESH)
    return WorkerGroup(ResourcePool([WORLD_SIZE]), made, runtime=runtime, name="contract", threads_per_rank=THREADS)


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
    def seen(self) -> int:
        return self.found


class ContractWorker(RowMaker):
    """Says where and how it runs, and what it was given. It calls no `super().__init__()`, as some workers do not."""

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


# -- calls: a healthy group in, a healthy group out --------------------------------------------------------------------


def check_places(group: ContractGroup) -> None:
    """Results come in rank order, and each rank knows its place."""
    assert group.call.place() == [(rank, WORLD_SIZE, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]


def check_rows(group: ContractGroup) -> None:
    """Rows are split into shards that differ by at most one row, empty ones included, and come back in their order."""
    for num_rows, shards in ((7, [2, 2, 2, 1]), (5, [2, 1, 1, 1]), (1, [1, 0, 0, 0]), (0, [0, 0, 0, 0])):
        batch = DataProto({"x": torch.arange(num_rows)})
        result = group.call.tag_rows(batch=batch, factor=3)
        assert result.batch["x"].tolist() == [3 * row for row in range(num_rows)]
        assert result.batch["rank"].tolist() == [rank for rank, size in enumerate(shards) for _ in range(size)]
        assert batch.batch.keys() == {"x"}, "the caller's batch was changed"


def check_mesh(group: ContractGroup) -> None:
    """Peers get the same shard; the results of the ranks that collect come in the order of the shards, not of the ranks."""
    result = group.call.tag_rows_on_mesh(DataProto({"x": torch.arange(6)}))
    assert result.batch["x"].tolist() == [0, 1, 2, 3, 4, 5]
    assert result.batch["rank"].tolist() == [2, 2, 2, 1, 1, 1]
    assert group.call.kept_rows() == [[3, 4, 5], [3, 4, 5], [0, 1, 2], [0, 1, 2]]


def check_rank_zero(group: ContractGroup) -> None:
    """Execute.RANK_ZERO, and the mode RANK_ZERO, pass arguments as they are and return what rank 0 returned."""
    assert group.call.on_rank_zero([1, 2, 3, 4]) == (0, [1, 2, 3, 4])
    assert group.call.on_rank_zero_only([1, 2, 3, 4]) == (0, [1, 2, 3, 4])


def check_lists(group: ContractGroup) -> None:
    """ALL_TO_ALL gives each rank its own item of a list, and everything else to all."""
    ranks = range(WORLD_SIZE)
    assert group.call.own_and_shared(list("abcd"), 5) == [("abcd"[rank], 5) for rank in ranks]
    assert group.call.own_and_shared(Copy([1, 2])) == [([1, 2], None)] * WORLD_SIZE
    with expected(DispatchError) as caught:
        group.call.own_and_shared([1, 2, 3])
    assert "3 values for 4 ranks" in str(caught.error)


def check_padding(group: ContractGroup) -> None:
    """A batch that asks for it comes in shards of equal size, whose padding is marked and never comes back."""
    batch = DataProto.from_dict({"x": torch.arange(5)}, auto_padding=True)
    assert group.call.count_rows(batch) == [(2, 0), (2, 0), (2, 1), (2, 2)]
    assert group.call.tag_rows(batch).batch["x"].tolist() == [0, 1, 2, 3, 4]
    assert group.call.add_one(batch).get().batch["x"].tolist() == [1, 2, 3, 4, 5]
    assert group.call.repeat_rows(batch, 3).batch["x"].tolist() == [row for row in range(5) for _ in range(3)]
    assert len(batch) == 5


def check_functions_of_the_driver(group: ContractGroup) -> None:
    """A function runs on every rank with its worker, or on rank 0; any method can be called by its name."""
    batch = DataProto({"x": torch.zeros(4, dtype=torch.int64)})
    assert group.execute_with_func_generator(add, batch, 10).batch["x"].tolist() == [10, 11, 12, 13]
    assert group.execute_with_func_generator(partial(add, number=5), batch).batch["x"].tolist() == [5, 6, 7, 8]
    assert group.execute_with_func_generator(lambda worker, rows: rows, batch).batch["x"].tolist() == [0] * 4
    assert group.execute_func_rank_zero(max, 3, 7) == 7
    assert group.execute_all_sync("not_registered", 10) == [0, 10, 20, 30]
    assert group.execute_all_sync("not_registered", number=PerRank([4, 3, 2, 1])) == [0, 3, 4, 3]
    assert group.execute_rank_zero_sync("place") == (0, WORLD_SIZE, 0, WORLD_SIZE)


def check_chains(group: ContractGroup) -> None:
    """A future is an argument like its value, of calls that wait and of calls that do not."""
    batch = DataProto({"x": torch.arange(3)})
    later = group.call.add_one(group.call.add_one(group.call.add_one(batch)))  # type: ignore[arg-type]
    assert group.call.tag_rows(later).batch["x"].tolist() == [3, 4, 5]  # type: ignore[arg-type]
    assert later.get().batch["x"].tolist() == [3, 4, 5]


def check_unread_failure(group: ContractGroup) -> None:
    """A failure that nobody has read is raised at the next call, and only there."""
    lost = group.call.raise_later(1)
    while not lost.done():
        time.sleep(0.01)
    with expected(WorkerError) as caught:
        group.call.place()
    assert "raised later on rank 1" in caught.error.cause_message
    check_places(group)


def check_async_methods(group: ContractGroup) -> None:
    """A coroutine method is run to its end."""
    assert group.call.async_add(10, right=100) == [110, 111, 112, 113]


def check_futures(group: ContractGroup) -> None:
    """Non-blocking calls run in the order they were made; each rank's result is as it was when it was returned."""
    before = [list(log) for log in group.call.append(-1).get()]
    futures = [group.call.append(number) for number in range(3)]
    assert [future.get(timeout=60) for future in futures] == [
        [[*log, *range(number + 1)] for log in before] for number in range(3)
    ]
    assert all(future.done() for future in futures)


def check_order(group: ContractGroup) -> None:
    """Calls run in the order they were made, whatever their arguments weigh, non-blocking and blocking ones alike."""
    payload = torch.zeros(1 << 16)
    sizes: tuple[Callable[[int], object], ...] = (
        lambda number: group.call.mark(),
        lambda number: group.call.mark(number),
        lambda number: group.call.mark(number, payload),
    )
    for number in range(MIXED_CALLS):
        sizes[number % 3](number)
    marks = [number if number % 3 else None for number in range(MIXED_CALLS)]
    assert group.call.take_marks() == [marks] * WORLD_SIZE


def check_bytes(group: ContractGroup) -> None:
    """Bytes come and go as they are, also those that look like a message of the runtime's own."""
    for value in (b"", b"plain", b"buffers:", pickle.dumps([1, 2]), bytes(1 << 18), bytearray(b"pickle")):
        assert group.call.echo_later(value).get() == [value] * WORLD_SIZE
        assert group.call.own_and_shared(Copy(value)) == [(value, None)] * WORLD_SIZE
        assert group.execute_all_sync("not_registered", value) == [value * rank for rank in range(WORLD_SIZE)]


def check_graphs(group: ContractGroup) -> None:
    """Tensors travel detached, both ways and wherever in a value they are; what gradients need them for stays with its rank."""
    leaf = torch.ones(3, requires_grad=True)
    for sent in (leaf, leaf * 2):
        assert group.call.asks_for_gradients({"k": [sent]}) == [False] * WORLD_SIZE
    for results in (group.call.computed(), group.call.computed_later().get()):
        for alone, inside, rows in results:
            assert not any(tensor.requires_grad for tensor in (alone, inside["k"], rows.batch["x"]))
            assert alone.tolist() == inside["k"].tolist() == rows.batch["x"].tolist() == [2.0, 2.0]


def check_sparse(group: ContractGroup) -> None:
    """A sparse tensor travels whole; of a sparse column rows cannot be cut, and the error names it."""
    sparse = torch.eye(3).to_sparse()
    for result in group.call.echo_later(sparse).get():
        assert isinstance(result, Tensor)
        assert torch.equal(result.to_dense(), torch.eye(3))
    with expected(WorkerError) as caught:
        group.call.sparse_rows(DataProto({"x": torch.arange(8)}))
    assert caught.error.cause_type == "DataError"
    assert "tensor column 's' has layout torch.sparse_coo" in caught.error.cause_message


def check_what_cannot_travel(group: ContractGroup) -> None:
    """What cannot be sent to one rank is sent to none, and the group goes on."""
    group.call.take_marks()
    for rank in (0, WORLD_SIZE - 1):
        own: list[object] = [threading.Lock() if other == rank else other for other in range(WORLD_SIZE)]
        with expected(DispatchError):
            group.call.mark_own(own)
        assert group.call.take_marks() == [[]] * WORLD_SIZE, f"rank {rank} could not be sent its call, and others ran it"


def check_nothing_is_shared(group: ContractGroup) -> None:
    """A worker writes into its arguments and what it returned, the driver into what it got: nobody else sees it."""
    for rows in (3, 1 << 16):  # inside a message, and beside it
        array, row, note = np.zeros(rows), np.zeros(3), np.zeros(3)
        batch = DataProto({"x": torch.zeros(rows)}, {"row": [row, *[None] * (rows - 1)]}, {"note": note})
        results = group.call.keep_and_write(batch, array)
        for mine in (batch.batch["x"], array, row, note):
            assert not mine.any()
        for tensor, written in results:
            assert tensor.tolist() == written.tolist() == [1.0] * rows
            tensor.fill_(9)
            written.fill(9)
        assert group.call.kept_sum() == [2.0 * rows] * WORLD_SIZE
    for num in (3, 1 << 16):
        for zeros in group.call.zeros_later(num).get():
            zeros += 1
        assert group.call.sum_of_zeros() == [0.0] * WORLD_SIZE


def check_threads(group: ContractGroup) -> None:
    """Constructor and methods run on one thread with the asked-for number of torch threads; the driver's own stays."""
    mine = torch.get_num_threads()
    assert group.call.threads() == [(THREADS, THREADS, True)] * WORLD_SIZE
    assert torch.get_num_threads() == mine


def check_bits(group: ContractGroup) -> None:
    """With equal threads, the same bits as in the driver."""
    mine = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    expected = product(seed=0)
    torch.set_num_threads(mine)
    for result in group.call.product(seed=0):
        assert all(map(torch.equal, result, expected))


def check_a_rank_raises(group: ContractGroup) -> None:
    """The error says what, where and how; all ranks having answered, the group is ready again."""
    with expected(WorkerError) as caught:
        group.call.raise_on(2)
    error = caught.error
    assert (error.cause_type, error.consequences) == ("KeyError", ())
    assert "raised on rank 2" in error.cause_message
    assert (error.origin.group, error.origin.method, error.origin.rank) == ("contract", "raise_on", 2)
    assert error.origin.node == platform.node()
    assert "in raise_on" in error.remote_traceback
    assert "podium/single_controller" not in error.remote_traceback, "the traceback begins in the user's code"
    assert group.call.raise_on(-1) == [0, 1, 2, 3]


def check_wrong_arguments(group: ContractGroup) -> None:
    """Arguments that do not fit the worker's method are a TypeError on the driver."""
    with expected(TypeError) as caught:
        group.tag_rows(DataProto({"x": torch.zeros(4)}), facter=2)
    assert "facter" in str(caught.error)


def check_environment(group: ContractGroup) -> None:
    """What torch.distributed and ported code read is set in a worker's process, and never in the driver's."""
    if not CAPABILITIES[group.runtime_name].environment:
        assert group.call.environment() == [ContractWorker().environment()] * WORLD_SIZE
        return
    for rank, environment in enumerate(group.call.environment()):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == str(WORLD_SIZE)
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert int(environment["MASTER_PORT"] or 0) > 0


def check_collectives(group: ContractGroup) -> None:
    """Ranks meet in torch.distributed, or are told which runtime lets them."""
    if CAPABILITIES[group.runtime_name].collectives:
        assert group.call.sum_ranks() == [6] * WORLD_SIZE
        return
    with expected(UnsupportedByRuntime) as caught:
        group.call.sum_ranks()
    assert all(name in str(caught.error) for name in runtimes_with("collectives"))


# -- lives: groups that end --------------------------------------------------------------------------------------------


def check_constructor_fails(runtime: str) -> None:
    """A constructor that raises is told like a call that raises."""
    with expected(WorkerError) as caught:
        WorkerGroup(ResourcePool([2]), Init(FailsToStart, rank=1), runtime=runtime)
    error = caught.error
    assert (error.cause_type, error.origin.rank, error.origin.method) == ("FileNotFoundError", 1, "__init__")


def check_closed(runtime: str) -> None:
    """A closed group says so; closing again is harmless. A group of one may have a process group anywhere."""
    with WorkerGroup(ResourcePool([1]), ContractWorker, runtime=runtime) as group:
        assert group.call.sum_ranks() == [0]
        if not CAPABILITIES[runtime].environment and dist.is_initialized():
            dist.destroy_process_group()
    group.close()
    with expected(GroupClosedError) as caught:
        group.call.place()
    assert "closed" in str(caught.error)


def check_timeouts(runtime: str) -> None:
    """A call that takes too long names its silent ranks and breaks the group; a runtime without limits refuses them."""
    with WorkerGroup(ResourcePool([2]), ContractWorker, runtime=runtime) as group:
        if not CAPABILITIES[runtime].timeouts:
            with expected(UnsupportedByRuntime) as refused:
                group.call.sleep_on.options(timeout=1.0)(1, seconds=0.0)
            assert all(name in str(refused.error) for name in runtimes_with("timeouts"))
            return
        with expected(CallTimeoutError) as caught:
            group.call.sleep_on.options(timeout=0.5)(1, seconds=60.0)
        assert caught.error.silent_ranks == (1,)
        assert "sleep_on" in str(caught.error)
        with expected(GroupClosedError) as closed:
            group.call.place()
        assert "timed out" in str(closed.error)


def check_roles(runtime: str) -> None:
    """Workers that share a process have a group each, with methods and meshes of their own, and see each other."""
    roles: dict[str, Init[Any] | type] = {"first": Init(ContractWorker, MESH), "second": Neighbour}
    batch = DataProto({"x": torch.arange(4)})
    with WorkerGroup(ResourcePool([WORLD_SIZE]), create_colocated_worker_cls(roles), runtime=runtime) as both:
        groups = both.spawn()
        assert groups["first"].place() == [(rank, WORLD_SIZE, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
        assert both.second_place() == groups["second"].place() == [f"neighbour {rank} of 4" for rank in range(WORLD_SIZE)]
        assert groups["first"].tag_rows_on_mesh(batch).batch["rank"].tolist() == [2, 2, 1, 1]
        assert groups["second"].tag_rows_on_mesh(batch).batch["rank"].tolist() == [0, 1, 2, 3]
        assert groups["second"].ask_the_other() == [[2, 3], [2, 3], [0, 1], [0, 1]]
        with expected(WorkerError) as caught:
            groups["first"].raise_on(3)
        assert (caught.error.origin.method, caught.error.origin.rank) == ("first.raise_on", 3)
    with expected(GroupClosedError):
        groups["second"].place()


def check_environment_of_the_callers(runtime: str) -> None:
    """Variables that the caller sets are there from the start, and may not contradict the runtime's own."""
    if not CAPABILITIES[runtime].worker_env:
        with expected(UnsupportedByRuntime):
            WorkerGroup(ResourcePool([1]), ContractWorker, runtime=runtime, worker_env={"COLOUR": "red"})
        return
    with WorkerGroup(ResourcePool([1]), ContractWorker, runtime=runtime, worker_env={"COLOUR": "red"}) as group:
        assert group.call.variable("COLOUR") == ["red"]
    with expected(ConfigError) as caught:
        WorkerGroup(ResourcePool([1]), ContractWorker, runtime=runtime, worker_env={"RANK": "1"})
    assert "RANK" in str(caught.error)


def check_nodes_are_set_up(runtime: str) -> None:
    """Once on each node, before any worker is built; what fails there is a ResourceError that names the node and the reason."""
    with tempfile.TemporaryDirectory() as folder:
        setup = NodeSetup(folder)
        with WorkerGroup(ResourcePool([2]), Init(LooksAtSetup, folder), runtime=runtime, node_setup=setup) as group:
            assert group.call.seen() == [1, 1]
        assert len([*Path(folder).iterdir()]) == 1
        with expected(ResourceError) as caught:
            WorkerGroup(ResourcePool([2]), Init(LooksAtSetup, folder), runtime=runtime, node_setup=setup)
        assert "1 of 1 nodes are not ready" in str(caught.error)
        assert "was here already" in str(caught.error)
        assert platform.node() in str(caught.error)


def check_restart(runtime: str) -> None:
    """A group whose rank has died is made ready again, with the arguments of the first time."""
    with WorkerGroup(ResourcePool([2]), Init(ContractWorker, ((0, True), (1, True))), runtime=runtime) as group:
        if not CAPABILITIES[runtime].restart:
            with expected(UnsupportedByRuntime):
                group.restart()
            return
        with expected(WorkerLostError):
            group.call.die_on(0)
        assert group.status().state is State.BROKEN
        group.restart()
        assert group.call.sum_ranks() == [1, 1]
        assert group.call.tag_rows_on_mesh(DataProto({"x": torch.arange(2)})).batch["rank"].tolist() == [0, 1]
        assert group.status().state is State.READY


def check_a_rank_dies(runtime: str) -> None:
    """A process that ends in a call is a WorkerLostError that names it; the group is broken and says why."""
    if not CAPABILITIES[runtime].own_processes:
        return  # a rank that lives in the driver's process dies with it
    with WorkerGroup(ResourcePool([2]), ContractWorker, runtime=runtime) as group:
        with expected(WorkerLostError) as caught:
            group.call.die_on(1)
        origin = caught.error.origin
        assert (origin.rank, origin.method) == (1, "die_on")
        assert origin.pid not in (0, os.getpid())
        with expected(GroupClosedError) as closed:
            group.call.place()
        assert "died" in str(closed.error)


CALL_CHECKS: tuple[Callable[[ContractGroup], None], ...] = (
    check_places,
    check_rows,
    check_mesh,
    check_rank_zero,
    check_lists,
    check_padding,
    check_functions_of_the_driver,
    check_chains,
    check_unread_failure,
    check_async_methods,
    check_futures,
    check_order,
    check_bytes,
    check_graphs,
    check_sparse,
    check_what_cannot_travel,
    check_nothing_is_shared,
    check_threads,
    check_bits,
    check_a_rank_raises,
    check_wrong_arguments,
    check_environment,
    check_collectives,
    *REFERENCE_CHECKS,
)
LIFE_CHECKS: tuple[Callable[[str], None], ...] = (
    check_constructor_fails,
    check_closed,
    check_timeouts,
    check_roles,
    check_environment_of_the_callers,
    check_nodes_are_set_up,
    check_restart,
    check_a_rank_dies,
)

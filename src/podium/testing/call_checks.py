"""What calls must do on every runtime. Each check takes the group of `contract_group`, and leaves it healthy."""

from __future__ import annotations

import pickle
import platform
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from podium.errors import (
    DispatchError,
    UnsupportedByRuntime,
    WorkerError,
)
from podium.protocol import DataProto
from podium.runtimes import runtimes_with
from podium.single_controller import (
    CAPABILITIES,
    Copy,
    PerRank,
    WorkerGroup,
)
from podium.testing.by_reference import REFERENCE_CHECKS
from podium.testing.contract_workers import THREADS, WORLD_SIZE, ContractWorker, add, product
from podium.testing.expecting import expected

MIXED_CALLS = 200

ContractGroup: TypeAlias = WorkerGroup[ContractWorker]


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
    """A failure that was not read is raised at the next call, and only there."""
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


def check_arguments_that_cannot_be_sent(group: ContractGroup) -> None:
    """Arguments that cannot be sent to one rank are sent to none, and the group goes on."""
    group.call.take_marks()
    for rank in (0, WORLD_SIZE - 1):
        own: list[object] = [threading.Lock() if other == rank else other for other in range(WORLD_SIZE)]
        with expected(DispatchError):
            group.call.mark_own(own)
        assert group.call.take_marks() == [[]] * WORLD_SIZE, f"rank {rank} could not be sent its call, and others ran it"


def check_nothing_is_shared(group: ContractGroup) -> None:
    """A worker writes into its arguments and what it returned, the driver into what it got: no other process sees it."""
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
    """Ranks meet in torch.distributed, or the error names the runtimes where they do."""
    if CAPABILITIES[group.runtime_name].collectives:
        assert group.call.sum_ranks() == [6] * WORLD_SIZE
        return
    with expected(UnsupportedByRuntime) as caught:
        group.call.sum_ranks()
    assert all(name in str(caught.error) for name in runtimes_with("collectives"))


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
    check_arguments_that_cannot_be_sent,
    check_nothing_is_shared,
    check_threads,
    check_bits,
    check_a_rank_raises,
    check_wrong_arguments,
    check_environment,
    check_collectives,
    *REFERENCE_CHECKS,
)

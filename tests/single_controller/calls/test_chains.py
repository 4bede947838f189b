"""C3: a chain of two groups of unequal sizes gives the same whichever way its rows and its calls go, on both runtimes."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from podium.errors import WorkerError
from podium.protocol import DataProto
from podium.protocol.jagged import lengths_of, parts
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register
from tests.protocol.builders import ragged


def custom_dispatch(group: Any, rows: DataProto) -> Any:
    return (rows.partition(group.world_size),), {}


def custom_collect(group: Any, outputs: list[DataProto]) -> DataProto:
    """In the reverse order of ranks: to be noticed where it is left out."""
    return DataProto.concat(outputs[::-1])


CUSTOM = {"dispatch_fn": custom_dispatch, "collect_fn": custom_collect}
WAYS: dict[str, dict[str, Any]] = {
    "value": {},
    "value_later": {"blocking": False},
    "reference": {"by_reference": True},
    "reference_later": {"by_reference": True, "blocking": False},
}


def made(worker: Worker, rows: DataProto) -> DataProto:
    numbers = rows.batch["x"].tolist()
    if 99 in numbers:
        raise ValueError("no row 99")
    tokens = ragged([list(range(n, n + n % 3 + 1)) for n in numbers])
    wide = rows.batch["x"][:, None].expand(-1, 20_000).contiguous()
    return DataProto({"x": rows.batch["x"], "wide": wide, "tokens": tokens}, {"name": list(map(str, numbers))}, rows.meta_info)


def used(worker: Worker, rows: DataProto) -> DataProto:
    doubled = rows.batch["tokens"] * 2
    who = torch.full((len(rows),), worker.rank)
    return DataProto({"x": rows.batch["x"], "first": rows.batch["wide"][:, 0], "doubled": doubled, "who": who})


def padded(worker: Worker, rows: DataProto) -> list[bool]:
    marks: list[bool] = rows.padding_mask.tolist()
    return marks


def registered(function: Callable[..., Any], **how: Any) -> Any:
    def method(self: Worker, rows: DataProto) -> Any:
        return function(self, rows)

    method.__name__ = method.__qualname__ = function.__name__
    return register(**how)(method)


class Producer(Worker):
    value, value_later, reference, reference_later = (
        registered(made, dispatch_mode=Dispatch.DP_COMPUTE_PROTO, **how) for how in WAYS.values()
    )
    custom, custom_later = (registered(made, dispatch_mode=CUSTOM, blocking=blocking) for blocking in (True, False))


class Consumer(Worker):
    value, value_later, reference, reference_later = (
        registered(used, dispatch_mode=Dispatch.DP_COMPUTE_PROTO, **how) for how in WAYS.values()
    )
    custom, custom_later = (registered(used, dispatch_mode=CUSTOM, blocking=blocking) for blocking in (True, False))
    padding = registered(padded, dispatch_mode=Dispatch.DP_COMPUTE_METRIC)


class Chain(NamedTuple):
    producer: WorkerGroup[Any]
    consumer: WorkerGroup[Any]


@pytest.fixture(scope="module", params=["inline", pytest.param("ray", marks=pytest.mark.slow)])
def chain(request: pytest.FixtureRequest) -> Iterator[Chain]:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    with (
        WorkerGroup(ResourcePool([2]), Producer, runtime=request.param, name="producer") as producer,
        WorkerGroup(ResourcePool([3]), Consumer, runtime=request.param, name="consumer") as consumer,
    ):
        yield Chain(producer, consumer)


def rows(count: int, *, padding: bool = False) -> DataProto:
    return DataProto({"x": torch.arange(count)}, meta_info={"step": 1}, auto_padding=padding)


def plain(result: Any) -> dict[str, Any]:
    """What a consumer returned, whichever way, as Python's own."""
    found = result if isinstance(result, DataProto) else result.get()
    values, lengths = parts(found.batch["doubled"])[0].tolist(), lengths_of(found.batch["doubled"]).tolist()
    return {key: found.batch[key].tolist() for key in ("x", "first", "who")} | {"values": values, "lengths": lengths}


@pytest.mark.parametrize("padding", [False, True], ids=["uneven", "padded"])
def test_five_rows_of_two_ranks_go_to_three(chain: Chain, padding: bool) -> None:
    expected = {"x": [0, 1, 2, 3, 4], "first": [0, 1, 2, 3, 4], "who": [0, 0, 1, 1, 2], "lengths": [1, 2, 3, 1, 2]}
    for produce in WAYS:
        made = getattr(chain.producer, produce)(rows(5, padding=padding))
        marks = chain.consumer.padding(made)
        assert marks == ([[False] * 2, [False] * 2, [False, padding]] if padding else [[False] * 2, [False] * 2, [False]])
        for consume in WAYS:
            found = plain(getattr(chain.consumer, consume)(made))
            assert {key: found[key] for key in expected} == expected, (produce, consume)
            assert found["values"] == [0, 2, 4, 4, 6, 8, 6, 8, 10], (produce, consume)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_rows_than_ranks_and_none(chain: Chain, count: int) -> None:
    results = [plain(getattr(chain.consumer, way)(getattr(chain.producer, way)(rows(count)))) for way in WAYS]
    assert results[0]["x"] == list(range(count))
    assert all(one == results[0] for one in results)


def test_a_collect_of_the_users_own_is_asked_whichever_way(chain: Chain) -> None:
    """The producer's parts come back in reverse, and so do the consumer's."""
    expected = plain(chain.consumer.custom(chain.producer.custom(rows(5))))
    assert expected["x"] == [2, 0, 1, 3, 4]
    assert expected["who"] == [2, 1, 1, 0, 0]
    for produce in ("custom", "custom_later"):
        for consume in ("custom", "custom_later"):
            assert plain(getattr(chain.consumer, consume)(getattr(chain.producer, produce)(rows(5)))) == expected
    for way in WAYS:  # a collect function of the user's own gets rows, also where they came by reference
        assert plain(chain.consumer.custom(getattr(chain.producer, way)(rows(5))))["x"] == [4, 2, 3, 0, 1]


def test_a_failure_of_the_producer_is_raised_where_the_consumer_is_called(chain: Chain) -> None:
    bad = DataProto({"x": torch.tensor([0, 99, 1])})
    results = []
    for produce in [*WAYS, "custom", "custom_later"]:
        for consume in [*WAYS, "custom", "custom_later"]:
            with pytest.raises(WorkerError, match="no row 99") as caught:
                plain(getattr(chain.consumer, consume)(getattr(chain.producer, produce)(bad)))
            error = caught.value
            assert (error.origin.group, error.origin.method, error.origin.rank) == ("producer", produce, 0)
            assert 'raise ValueError("no row 99")' in error.remote_traceback
            assert traceback.format_exception(error)
            results.append((error.cause_type, error.cause_message))
    assert set(results) == {("ValueError", "no row 99")}


def test_a_failure_of_the_dispatch_has_the_same_message_in_every_way(chain: Chain) -> None:
    results = set()
    for way in WAYS:
        made = getattr(chain.producer, way)(rows(5))
        short = made.select(["x"])
        with pytest.raises(WorkerError) as caught:
            plain(chain.consumer.value(short))
        results.add((caught.value.origin.group, caught.value.cause_type, caught.value.cause_message))
    assert results == {("consumer", "KeyError", "'tokens'")}

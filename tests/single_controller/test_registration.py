from __future__ import annotations

import inspect
from typing import Any, cast

import pytest

from podium.errors import RegistrationError
from podium.protocol import DataProto
from podium.single_controller import (
    MAGIC_ATTR,
    Dispatch,
    Execute,
    Registration,
    ResourcePool,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from podium.single_controller.routing.registration import registration_of

anything = cast(Any, register)  # for calls that a type checker would refuse


def test_register_returns_the_function_itself_with_one_record():
    def update(self: object, batch: DataProto, *, lr: float = 1.0) -> DataProto:
        """Update."""
        return batch

    registered = anything(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)(update)
    assert registered is update
    assert inspect.isfunction(registered)
    assert getattr(registered, MAGIC_ATTR) == Registration(
        Dispatch.DP_COMPUTE_PROTO, Execute.ALL, blocking=False, materialize_futures=True, is_async=False
    )


def test_a_coroutine_method_stays_one():
    @anything(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def method(self: object) -> None: ...

    assert inspect.iscoroutinefunction(method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dispatch_mode": "ONE_TO_ALL"}, "dispatch_mode must be a member of Dispatch or a dict .*, got 'ONE_TO_ALL'"),
        ({"blocking": "no"}, "blocking must be True or False, got 'no'"),
        ({"blocking": None}, "blocking must be True or False, got None"),
        ({"materialize_futures": "no"}, "materialize_futures must be True or False, got 'no'"),
        ({"materialize_futures": 0}, "materialize_futures must be True or False, got 0"),
        ({"dispatch_mode": {"dispatch_fn": len}}, "must have the keys 'dispatch_fn' and 'collect_fn', got"),
        (
            {"dispatch_mode": {"dispatch_fn": len, "collect_fn": None}},
            "collect_fn of a dispatch mode must be a function, got None",
        ),
        (
            {"dispatch_mode": {"dispatch_fn": "f", "collect_fn": len}},
            "dispatch_fn of a dispatch mode must be a function, got 'f'",
        ),
        ({"dispatch_mode": Dispatch.ONE_TO_ALL, "execute_mode": "all"}, "execute_mode must be a member of Execute"),
        (
            {"dispatch_mode": Dispatch.DP_COMPUTE_PROTO, "execute_mode": Execute.RANK_ZERO},
            "execute_mode must be Execute.ALL for DP_COMPUTE_PROTO",
        ),
    ],
)
def test_modes_that_cannot_work_are_refused_at_decoration(options: dict[str, Any], message: str):
    with pytest.raises(RegistrationError, match=message):
        anything(**options)


@pytest.mark.parametrize("mode", [Dispatch.DP_COMPUTE_PROTO, make_nd_compute_dataproto_dispatch_fn("m")])
def test_a_batch_mode_needs_a_method_that_takes_a_batch(mode: Any):
    decorate = anything(dispatch_mode=mode)
    for fits in (lambda self, batch: batch, lambda self, *batches: batches, lambda self, *, batch: batch):
        decorate(fits)
    for does_not in (lambda self: None, lambda self, **options: options):
        with pytest.raises(RegistrationError, match="takes no batch"):
            decorate(does_not)


def test_register_without_parentheses_raises_with_a_hint():
    with pytest.raises(RegistrationError, match=r"dispatch_mode .*; write @register\(\) with parentheses"):

        @anything
        def method(self: object) -> None: ...


def test_only_functions_are_inspected_for_a_record():
    class Moody:
        def __getattr__(self, name: str) -> object:
            raise ValueError(f"no {name} yet")

    class Own(Worker):
        lazy = Moody()

        @register(Dispatch.ONE_TO_ALL)
        def one(self) -> int:
            return 1

    assert registration_of(Moody()) is None
    with WorkerGroup(ResourcePool([1]), Own) as group:
        assert group.one() == [1]


def test_anything_but_a_method_is_refused():
    with pytest.raises(RegistrationError, match="must take self first"):
        anything(dispatch_mode=Dispatch.ONE_TO_ALL)(lambda: None)
    with pytest.raises(RegistrationError, match="plain method"):
        anything(dispatch_mode=Dispatch.ONE_TO_ALL)(staticmethod(lambda self: None))

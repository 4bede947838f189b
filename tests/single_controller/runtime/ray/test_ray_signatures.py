"""Ray's tracing writes a parameter of its own into the signature of every method it sees; the user's class is not Ray's."""

from __future__ import annotations

import inspect

import pytest

from podium.single_controller import Dispatch, Init, ResourcePool, Worker, WorkerGroup, register

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("ray_cluster")]


class Signed(Worker):
    def __init__(self, scale: int) -> None:
        self.scale = scale

    @register(Dispatch.ONE_TO_ALL)
    def times(self, number: int) -> int:
        return self.scale * number

    def unregistered(self) -> None:
        """Not a method of the group."""


def test_a_group_on_ray_leaves_the_signatures_of_its_class_alone():
    functions = (Signed.times, Signed.unregistered, Worker.init_process_group)
    before = [inspect.signature(function) for function in functions]
    with WorkerGroup(ResourcePool([1]), Init(Signed, 2), runtime="ray"):
        pass
    assert [inspect.signature(function) for function in functions] == before
    with WorkerGroup(ResourcePool([1]), Init(Signed, 2)) as group, pytest.raises(TypeError, match="_ray_trace_ctx"):
        group.times(1, _ray_trace_ctx=None)


def test_a_detached_group_is_found_by_a_class_whose_constructor_takes_arguments():
    with WorkerGroup(ResourcePool([1]), Init(Signed, 2), runtime="ray", name_prefix="signed_", detached=True):
        attached = WorkerGroup.from_detached(Signed, name_prefix="signed_")
        assert attached.times(3) == [6]
        attached.close()

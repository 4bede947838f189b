"""Async methods on inline: nothing that one of them does leaves those after it waiting."""

from __future__ import annotations

import asyncio
import os

import pytest

from podium.errors import WorkerError
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register


class Restless(Worker):
    @register(Dispatch.ONE_TO_ALL)
    async def five(self) -> int:
        await asyncio.sleep(0)
        return 5

    @register(Dispatch.ONE_TO_ALL)
    async def cancel_itself(self) -> None:
        raise asyncio.CancelledError

    @register(Dispatch.ONE_TO_ALL)
    async def leave(self) -> None:
        raise SystemExit(3)

    @register(Dispatch.ONE_TO_ALL)
    async def stop_the_loop(self) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(60)

    @register(Dispatch.ONE_TO_ALL)
    async def ask_another(self) -> list[int]:
        with WorkerGroup(ResourcePool([1]), Restless) as other:
            found: list[int] = other.five()
            return found


@pytest.mark.timeout(60)
def test_later_async_methods_run_whatever_an_earlier_one_did():
    with WorkerGroup(ResourcePool([2]), Restless) as group:
        with pytest.raises(SystemExit):
            group.leave()
        assert group.five() == [5, 5]
        with pytest.raises(WorkerError, match="CancelledError") as caught:
            group.cancel_itself()
        assert caught.value.origin.method == "cancel_itself"
        assert group.five() == [5, 5]
        with pytest.raises(WorkerError, match="the coroutine stopped the event loop"):
            group.stop_the_loop()
        assert group.five() == [5, 5]


@pytest.mark.timeout(60)
def test_an_async_method_may_call_the_async_method_of_another_group():
    with WorkerGroup(ResourcePool([1]), Restless) as group:
        assert group.ask_another() == [[5]]


@pytest.mark.timeout(60)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_loop_of_its_own():
    with WorkerGroup(ResourcePool([1]), Restless) as group:
        assert group.five() == [5]
        child = os.fork()
        if not child:
            os._exit(group.five()[0])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5

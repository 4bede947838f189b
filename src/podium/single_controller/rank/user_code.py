"""Run user code as a rank, whichever runtime hosts it."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from types import CoroutineType
from typing import Any, cast

import torch

from podium.single_controller.rank.context import RankContext, running_as


def run_as_rank(context: RankContext, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function as that rank, with its number of torch threads; a coroutine is run to completion."""
    with running_as(context), torch_threads(context.threads):
        return run_to_end(function(*args, **kwargs), context)


def run_to_end(result: Any, context: RankContext) -> Any:
    """The result of a method; of one that returned a coroutine, that of the coroutine."""
    return _run_coroutine(result, context.threads) if type(result) is CoroutineType else result


def run_on_loop(coroutine: Coroutine[Any, Any, Any], context: RankContext, loop: asyncio.AbstractEventLoop) -> Any:
    """The coroutine's result, of a loop that runs in another thread."""
    result, error = asyncio.run_coroutine_threadsafe(_outcome_of(coroutine, context.threads), loop).result()
    if error is not None:
        raise error
    return result


def method_of(worker: Any, role: str | None, method: str) -> Callable[..., Any]:
    """The method of a rank's worker, or of the worker of that role in the same process."""
    target = worker if role is None else worker.get_fused_worker_by_name(role)
    return cast(Callable[..., Any], getattr(target, method))


def call_method(worker: Any, role: str | None, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the method, looked up only now: that it is missing is the call's failure."""
    return method_of(worker, role, method)(*args, **kwargs)


def called_as(role: str | None, method: str) -> str:
    """A method's name in messages: `update`, or `actor.update` for that of a role."""
    return method if role is None else f"{role}.{method}"


class torch_threads:  # noqa: N801 - a context manager, as a class since every call on `inline` enters it
    """Use that many torch threads in the block; 0 leaves the setting alone."""

    __slots__ = ("_before", "_count")

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if self._count not in (0, self._before):
            torch.set_num_threads(self._count)

    def __exit__(self, *exc: object) -> None:
        if self._count not in (0, self._before):
            torch.set_num_threads(self._before)


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="podium-async-methods", daemon=True)
        self.thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether it runs, here: a forked child has the loop without its thread."""
        return self.pid == os.getpid() and self.thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, Any], threads: int) -> Any:
        """The coroutine's result; raises what it raised, and RuntimeError when it stopped the loop."""
        future = asyncio.run_coroutine_threadsafe(_outcome_of(coroutine, threads), self.loop)
        try:
            while not wait([future], timeout=1.0).done and self.thread.is_alive():
                pass
        except BaseException:
            future.cancel()  # Ctrl-C ends the wait; the coroutine shall not go on behind it
            raise
        if not future.done():
            raise RuntimeError("the coroutine stopped the event loop that it ran on")
        result, error = future.result()
        if error is not None:
            raise error
        return result

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


_shared_loop: _LoopThread | None = None


def _run_coroutine(coroutine: Coroutine[Any, Any, Any], threads: int) -> Any:
    # On a loop thread of its own, since the caller may be inside a running loop (a notebook) and cannot start another.
    global _shared_loop
    if _shared_loop is None or not _shared_loop.is_usable:
        _shared_loop = _LoopThread()
    if threading.current_thread() is not _shared_loop.thread:
        return _shared_loop.run(coroutine, threads)
    nested = _LoopThread()  # an async method that calls a group's async method waits for it, and so blocks the shared loop
    try:
        return nested.run(coroutine, threads)
    finally:
        nested.stop()


def use_torch_threads(count: int) -> None:
    """Use that many torch threads in this thread from here on; 0 leaves the setting alone."""
    if count:
        torch.get_num_threads()  # first: at a thread's first look torch takes over what any other has set last
        torch.set_num_threads(count)


async def _outcome_of(coroutine: Coroutine[Any, Any, Any], threads: int) -> tuple[Any, BaseException | None]:
    use_torch_threads(threads)  # the count is per thread, and this is the loop's
    try:
        return await coroutine, None
    except BaseException as error:  # a loop does not survive SystemExit and its like: whoever waits raises it
        return None, error

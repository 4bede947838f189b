"""What happens inside a rank, whichever runtime hosts it: run user code as that rank, and word its failures."""

from __future__ import annotations

import asyncio
import inspect
import os
import platform
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Any, cast

import torch

from podium.errors import Origin, WorkerError
from podium.single_controller.context import RankContext, running_as

_HOSTS = ("podium.single_controller.runtime.", "ray.")  # frames of whoever runs the user's code


def run_as_rank(context: RankContext, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function as that rank, with its number of torch threads; a coroutine is run to completion."""
    with running_as(context), torch_threads(context.threads):
        result = function(*args, **kwargs)
        return _run_coroutine(result, context.threads) if inspect.iscoroutine(result) else result


def method_of(worker: Any, role: str | None, method: str) -> Callable[..., Any]:
    """The method of a rank's worker, or of the worker of that role in the same process."""
    target = worker if role is None else worker.get_fused_worker_by_name(role)
    return cast(Callable[..., Any], getattr(target, method))


def called_as(role: str | None, method: str) -> str:
    """A method's name in messages: `update`, or `actor.update` for that of a role."""
    return method if role is None else f"{role}.{method}"


def worker_error(context: RankContext, method: str, error: Exception) -> WorkerError:
    """The picklable account of what a rank raised; its traceback begins in the user's code."""
    cause = traceback.TracebackException(type(error), error, _skip_hosts(error.__traceback__))
    return WorkerError(
        origin_here(context, method),
        cause_type=type(error).__name__,
        cause_message=_message_of(error),
        remote_traceback="".join(cause.format()),
    )


def _message_of(error: Exception) -> str:
    try:
        return str(error)
    except Exception as second:  # whatever a foreign exception does when it is printed
        return f"(its message cannot be shown: {type(second).__name__})"


def origin_here(context: RankContext, method: str) -> Origin:
    """This process as the place of a failure."""
    return Origin(context.group, method, context.rank, platform.node(), os.getpid())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use that many torch threads in the block; 0 leaves the setting alone."""
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_coroutine(coroutine: Coroutine[Any, Any, Any], threads: int) -> Any:
    # On a loop thread of its own, since the caller may be inside a running loop (a notebook) and cannot start another.
    future = asyncio.run_coroutine_threadsafe(_with_threads(coroutine, threads), _loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # Ctrl-C ends the wait; the coroutine shall not go on behind it
        raise


async def _with_threads(coroutine: Coroutine[Any, Any, Any], threads: int) -> Any:
    if threads:
        torch.set_num_threads(threads)  # the count is per thread, and this is the loop's
    return await coroutine


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="podium-async-methods", daemon=True).start()
    return loop


def _skip_hosts(trace: TracebackType | None) -> TracebackType | None:
    first = trace
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(_HOSTS):
        trace = trace.tb_next
    return trace or first

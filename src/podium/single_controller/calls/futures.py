"""Results of group calls that may still be running.

A `GroupFuture` is one value, a `FutureList` one value per rank. Both can be awaited, and passed to another call, which is sent
when their values are known. Those of rows are in `row_futures`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, Generic, Self, TypeAlias, TypeVar, cast

from podium.errors import CallTimeoutError, DataError
from podium.single_controller.processes.deferred import DeferredCall
from podium.single_controller.processes.pending_call import PendingCall

R = TypeVar("R")
Call: TypeAlias = PendingCall | DeferredCall


class GroupFuture(Generic[R]):
    """The result of a group call that is still running, or its error. `await` it or `get()` it, from any thread.

    The result is collected once. From then on the future refers to the result alone, so the call and its arguments are freed.
    """

    def __init__(self, call: Call | None, collect: Callable[[dict[int, Any]], Any]) -> None:
        self.when_read: Callable[[], object] = lambda: None
        self._unsettled: tuple[Call, Callable[[dict[int, Any]], Any]] | None = None if call is None else (call, collect)
        self._lock = threading.Lock()
        self._is_handed_over = False
        self._value: Any = None
        self._error: Exception | None = None

    @classmethod
    def settled(cls, value: Any) -> Self:
        """The future of a result that is known."""
        future = cls(None, _no_collect)
        future._value = value
        return future

    @property
    def is_read(self) -> bool:
        """Whether a caller has read the result or the error, or is reading it now."""
        return self._is_handed_over or self._unsettled is None or self._lock.locked()

    @property
    def has_failed(self) -> bool:
        """Whether the call is known to have failed."""
        unsettled = self._unsettled
        return self._error is not None or (unsettled is not None and unsettled[0].has_failed)

    def done(self) -> bool:
        """Whether `get` would return, or raise, without waiting for a rank."""
        unsettled = self._unsettled
        return unsettled is None or unsettled[0].is_over()

    def get(self, timeout: float | None = None) -> R:
        """Wait for the result; every call returns the same object or raises the same error.

        `timeout` limits this wait only: after a CallTimeoutError the call is still running, and `get` may be called again. The
        call's own limit is another one, and breaks the group.
        """
        return cast(R, self._settle(timeout))

    def hand_over(self) -> None:
        """The caller reads the result from the runtime itself: the group stops tracking the call."""
        self._is_handed_over = True
        self.when_read()
        unsettled = self._unsettled
        if unsettled is not None and isinstance(unsettled[0], PendingCall):
            unsettled[0].untrack()

    def as_argument(self) -> R:
        """This future itself, for type checkers its value: to be passed to another call, which waits for the value."""
        return cast(R, self)

    def __await__(self) -> Generator[Any, None, R]:
        return _awaitable(self.get).__await__()

    def __reduce__(self) -> tuple[Any, ...]:
        raise _stays_in_driver()

    def _settle(self, timeout: float | None) -> Any:
        unsettled = self._unsettled
        if unsettled is not None:
            _wait(unsettled[0], timeout)
            self._collect()
        if self._error is not None:
            raise self._error
        return self._value

    def _collect(self) -> None:
        with self._lock:
            if self._unsettled is None:
                return
            call, collect = self._unsettled
            try:
                self._value = collect(call.finish())
            except Exception as error:
                self._error = error  # raised by `get`, now and every time
            self._unsettled = None
            self.when_read()


class FutureList(list[Any], Generic[R]):
    """One result per rank, in rank order. On Ray its items are ObjectRefs, so that `ray.get(futures)` works too.

    `get`, `done` and `await` are those of `GroupFuture`, and report a failure with its rank and cause. A caller who takes
    references out of the list reads the results without the group, which then stops tracking the call.
    """

    def __init__(self, references: Iterable[Any], future: GroupFuture[list[R]]) -> None:
        super().__init__(references)
        self._future = future

    def __iter__(self) -> Iterator[Any]:
        self._future.hand_over()
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self._future.hand_over()
        return super().__getitem__(place)

    def __add__(self, other: list[Any]) -> list[Any]:
        """A plain list of the references of both, which `ray.get` reads at once."""
        return [*self, *other] if isinstance(other, list) else NotImplemented

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    __iadd__ = __add__  # type: ignore[assignment]  # this future does not track the results of another call

    def __reversed__(self) -> Iterator[Any]:
        return iter([*self][::-1])

    def copy(self) -> list[Any]:
        """The references as a plain list."""
        return [*self]

    # Compared by identity, unlike a list: `asyncio.gather` keeps what it awaits in a dict.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __reduce__(self) -> tuple[Any, ...]:
        raise _stays_in_driver()

    def done(self) -> bool:
        """See `GroupFuture.done`."""
        return self._future.done()

    def get(self, timeout: float | None = None) -> list[R]:
        """Wait for all results; see `GroupFuture.get`."""
        return self._future.get(timeout)

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self._future.__await__()


def is_future(value: object) -> bool:
    """Whether the value is the result of a call that may still run."""
    return isinstance(value, GroupFuture | FutureList)


def _wait(call: Call, timeout: float | None) -> None:
    if timeout is not None and not call.is_over(timeout):
        message = f"method {call.method!r} has not finished within {timeout:g} s; it is still running, call get() again"
        raise CallTimeoutError(message, silent_ranks=call.silent_ranks)


def _stays_in_driver() -> DataError:
    return DataError(
        "a future stays in the driver: it is replaced by its value where it is an argument itself, not inside a list or dict, "
        "and where the method was registered with materialize_futures=True; call .get() on it"
    )


def _no_collect(answers: dict[int, Any]) -> None:
    raise AssertionError("a settled future is not collected")


def _awaitable(get: Callable[[], R]) -> asyncio.Future[R]:
    """The result as an asyncio future, which a thread of its own fills."""
    # Not asyncio's pool: its threads are few, and a loop cannot end before they do, however long a call hangs.
    outcome: Future[R] = Future()
    outcome.set_running_or_notify_cancel()  # cancelling the wait does not cancel the call

    def wait() -> None:
        try:
            outcome.set_result(get())
        except StopIteration as error:  # a coroutine cannot raise it: asyncio would wait for ever
            outcome.set_exception(RuntimeError(f"the call raised StopIteration: {error}"))
        except BaseException as error:  # raised where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=copy_context().run, args=(wait,), name="podium-await", daemon=True).start()
    return asyncio.wrap_future(outcome)

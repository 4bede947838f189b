"""Results of group calls that are still running.

A `GroupFuture` is one value, a `FutureList` one per rank. Both are awaitable and go into another call as they are: the
call is sent when their values are there. Those of rows are in `row_futures`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextvars import copy_context
from typing import Any, Generic, Protocol, TypeVar, cast

from podium.errors import CallTimeoutError
from podium.single_controller.runtime.copies import stays_in_driver

R = TypeVar("R")


class Pending(Protocol):
    """A call on its way, sent or waiting to be."""

    @property
    def method(self) -> str: ...

    @property
    def silent_ranks(self) -> tuple[int, ...]:
        """The ranks that have not answered yet."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether a failure has been seen."""
        ...

    def is_over(self, wait_s: float = 0.0) -> bool:
        """Whether `finish` would return or raise at once; waits for it up to `wait_s`."""
        ...

    def finish(self) -> dict[int, Any]:
        """Every rank's answer; raises what the call failed of."""
        ...

    def let_go(self) -> None:
        """Its answers are read without us: nobody but the future's owner keeps it."""
        ...


class Settling(Generic[R]):
    """What both kinds of future have: one result or error, found once, whoever asks and from whichever thread.

    Once settled it holds the result alone: the call and its arguments are let go.
    """

    def __init__(self, pending: Pending, collect: Callable[[dict[int, Any]], R]) -> None:
        self.when_read: Callable[[], object] = lambda: None
        self._unsettled: tuple[Pending, Callable[[dict[int, Any]], R]] | None = (pending, collect)
        self._lock = threading.Lock()
        self._is_handed_over = False
        self._value: R | None = None
        self._error: Exception | None = None

    @property
    def is_read(self) -> bool:
        """Whether somebody has got the result or the error, or is about to."""
        return self._is_handed_over or self._unsettled is None or self._lock.locked()

    @property
    def has_failed(self) -> bool:
        """Whether a failure is known."""
        unsettled = self._unsettled
        return self._error is not None or (unsettled is not None and unsettled[0].has_failed)

    def done(self) -> bool:
        unsettled = self._unsettled
        return unsettled is None or unsettled[0].is_over()

    def get(self, timeout: float | None = None) -> R:
        unsettled = self._unsettled
        if unsettled is not None:
            _wait(unsettled[0], timeout)
            self._settle()
        if self._error is not None:
            raise self._error
        return cast(R, self._value)

    def hand_over(self) -> None:
        """Somebody reads the result without us: from here on the call lives as long as the future, or until it is asked."""
        self._is_handed_over = True
        self.when_read()
        unsettled = self._unsettled
        if unsettled is not None:
            unsettled[0].let_go()

    def _settle(self) -> None:
        with self._lock:
            if self._unsettled is None:
                return
            pending, collect = self._unsettled
            try:
                self._value = collect(pending.finish())
            except Exception as error:
                self._error = error  # raised by `get`, now and every time
            self._unsettled = None
            self.when_read()


def _wait(pending: Pending, timeout: float | None) -> None:
    if timeout is not None and not pending.is_over(timeout):
        message = f"method {pending.method!r} has not finished within {timeout:g} s; it goes on, ask again"
        raise CallTimeoutError(message, silent_ranks=pending.silent_ranks)


class Settled(Generic[R]):
    """A result that is there."""

    def __init__(self, value: R) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def get(self, timeout: float | None = None) -> R:
        return self._value


class GroupFuture(Generic[R]):
    """The result of a group call that is still running, or the error it ended with. `await` it or `get()` it."""

    def __init__(self, settling: Settling[R] | Settled[R]) -> None:
        self._settling = settling

    def done(self) -> bool:
        """Whether `get` would return, or raise, without waiting for a rank's work."""
        return self._settling.done()

    def get(self, timeout: float | None = None) -> R:
        """Wait for the result; every call returns the same object or raises the same error.

        `timeout` bounds this wait only: CallTimeoutError then leaves the call running, and it may be asked again. The
        call's own limit breaks the group.
        """
        return self._settling.get(timeout)

    def as_argument(self) -> R:
        """This future itself, for type checkers its value: to be passed to another call, which waits for the value."""
        return cast(R, self)

    def __await__(self) -> Generator[Any, None, R]:
        return _awaitable(self.get).__await__()

    def __reduce__(self) -> tuple[Any, ...]:
        raise stays_in_driver()


class FutureList(list[Any], Generic[R]):
    """One result per rank, in rank order. On Ray its items are ObjectRefs, so that `ray.get(futures)` works too.

    `get`, `done` and `await` are those of `GroupFuture`, and tell of a failure with its rank and cause.
    """

    def __init__(self, references: Iterable[Any], settling: Settling[list[R]]) -> None:
        super().__init__(references)
        self._settling = settling

    def __iter__(self) -> Iterator[Any]:
        """The references, to be read without us, as `ray.get` does: a failure is the reader's from here on."""
        self._settling.hand_over()
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        self._settling.hand_over()
        return super().__getitem__(place)

    def __add__(self, other: list[Any]) -> list[Any]:
        """A plain list of the references of both, which `ray.get` reads at once."""
        return [*self, *other] if isinstance(other, list) else NotImplemented

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    __iadd__ = __add__  # type: ignore[assignment]  # the results of another call are none of this future's

    def __reversed__(self) -> Iterator[Any]:
        return iter([*self][::-1])

    def copy(self) -> list[Any]:
        """The references as a plain list."""
        return [*self]

    # A future is itself and no other, unlike a list: `asyncio.gather` keeps what it awaits in a dict.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __reduce__(self) -> tuple[Any, ...]:
        raise stays_in_driver()

    def done(self) -> bool:
        """Whether `get` would return, or raise, without waiting for a rank's work."""
        return self._settling.done()

    def get(self, timeout: float | None = None) -> list[R]:
        """Wait for all results; see `GroupFuture.get`."""
        return self._settling.get(timeout)

    def __await__(self) -> Generator[Any, None, list[R]]:
        return _awaitable(self.get).__await__()


def _awaitable(get: Callable[[], R]) -> asyncio.Future[R]:
    """The result as something to `await`, in a thread of its own."""
    # Not asyncio's pool: its threads are few, and a loop does not end before they do, however long a call hangs.
    outcome: Future[R] = Future()
    outcome.set_running_or_notify_cancel()  # who gives up waiting does not cancel the call

    def wait() -> None:
        try:
            outcome.set_result(get())
        except StopIteration as error:  # which no coroutine can raise: asyncio would wait for ever
            outcome.set_exception(RuntimeError(f"the call raised StopIteration: {error}"))
        except BaseException as error:  # raised where it is awaited
            outcome.set_exception(error)

    threading.Thread(target=copy_context().run, args=(wait,), name="podium-await", daemon=True).start()
    return asyncio.wrap_future(outcome)


_FUTURES = (GroupFuture, FutureList)


def is_future(value: object) -> bool:
    """Whether the value is the result of a call that may still run."""
    return isinstance(value, _FUTURES)

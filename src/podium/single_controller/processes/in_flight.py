"""Calls in flight: those that some rank has not answered, and those whose result the driver has not read.

There may be many, and one may run as long as its group (the loop of a server). A call that is over removes itself, so its
data can be freed. Safe to use from several threads: each step is one operation on a dict.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

LOOKS_PER_CALL = 4
"""How many unread results a new call checks: a check costs a round trip, and there may be hundreds."""


class SentCall(Protocol):
    """A call that was sent."""

    @property
    def began(self) -> float: ...

    def is_over(self, wait_s: float = 0.0) -> bool: ...


class Unread(Protocol):
    """The future of a call whose result the driver may not have read."""

    when_read: Callable[[], object]
    """Called when the driver has read it."""

    @property
    def is_read(self) -> bool: ...

    @property
    def has_failed(self) -> bool: ...

    def done(self) -> bool: ...

    def get(self) -> Any: ...


CallT = TypeVar("CallT", bound=SentCall)


class InFlightCalls(Generic[CallT]):
    """The calls of one group, in the order they were sent."""

    def __init__(self) -> None:
        self._unanswered: dict[int, CallT] = {}
        self._unread: dict[int, Unread] = {}

    def __len__(self) -> int:
        return len(self._unanswered) + len(self._unread)

    def add(self, call: CallT) -> None:
        """The call was sent; `remove` it when it is over."""
        self._unanswered[id(call)] = call

    def remove(self, call: CallT) -> None:
        """Harmless when repeated."""
        self._unanswered.pop(id(call), None)

    def unanswered(self) -> list[CallT]:
        """The calls that are not over, oldest first."""
        return [call for call in self.in_order() if not call.is_over()]

    def in_order(self) -> list[CallT]:
        """The calls that are not known to be over, oldest first."""
        return sorted(self._unanswered.values(), key=lambda call: call.began)

    def expect_reader(self, future: Unread) -> None:
        """Track the future until it is read, so that its failure is not lost."""
        self._unread[id(future)] = future
        future.when_read = partial(self._unread.pop, id(future), None)

    @property
    def has_unread(self) -> bool:
        """Whether the result of a call has not been read; the call may still run."""
        return bool(self._unread)

    def unread_failure(self, *, look_at_all: bool = False) -> Unread | None:
        """A failed call that was not read, returned once. Checks a few calls, and others the next time, or all of them."""
        for key in list(islice(self._unread, len(self._unread) if look_at_all else LOOKS_PER_CALL)):
            future = self._unread.pop(key, None)
            if future is None or future.is_read:
                continue
            if not future.done():
                self._unread[key] = future  # behind the others
            elif future.has_failed:
                return future
        return None

    def clear(self) -> None:
        self._unanswered.clear()
        self._unread.clear()

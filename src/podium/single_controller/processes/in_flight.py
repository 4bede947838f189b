"""Calls in flight: those that some rank has not answered, and those whose result the driver has not read.

There may be many, and one may run as long as its group (the loop of a server). A call that is over removes itself, so its
data can be freed. Safe to use from several threads: each step is one operation on a dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Protocol

LOOKS_PER_CALL = 4
"""How many unread calls a new call looks at: a look costs a round trip, and hundreds may be on their way."""


class InFlightCall(Protocol):
    """A call that was sent."""

    @property
    def method(self) -> str: ...

    @property
    def silent_ranks(self) -> tuple[int, ...]: ...

    @property
    def began(self) -> float: ...

    @property
    def age_s(self) -> float: ...

    def has_lost(self, rank: int) -> bool: ...

    def is_over(self, wait_s: float = 0.0) -> bool: ...


class Unread(Protocol):
    """The future of a call whose result nobody may have read yet."""

    when_read: Callable[[], object]
    """To be called when somebody has."""

    @property
    def is_read(self) -> bool: ...

    @property
    def has_failed(self) -> bool: ...

    def done(self) -> bool: ...

    def get(self) -> Any: ...


class InFlightCalls:
    """The calls of one group, in the order they were sent."""

    def __init__(self) -> None:
        self._unanswered: dict[int, InFlightCall] = {}
        self._handed_over: dict[int, weakref.ref[InFlightCall]] = {}
        """Not answered either, and known as long as somebody else keeps them: a call keeps its result alive."""
        self._unread: dict[int, Unread] = {}

    def __len__(self) -> int:
        return len(self._unanswered) + len(self._handed_over) + len(self._unread)

    def add(self, call: InFlightCall) -> None:
        """The call was sent; `remove` it when it is over."""
        self._unanswered[id(call)] = call

    def remove(self, call: InFlightCall) -> None:
        """Harmless when repeated."""
        self._unanswered.pop(id(call), None)
        self._handed_over.pop(id(call), None)

    def hand_over(self, call: InFlightCall) -> None:
        """Somebody reads the answers of this call without us, and may drop it before we have seen them."""
        key = id(call)
        if key in self._unanswered:
            self._handed_over[key] = weakref.ref(call, lambda _: self._handed_over.pop(key, None))
            self._unanswered.pop(key, None)

    def unanswered(self) -> list[InFlightCall]:
        """The calls that are not over, oldest first."""
        return [call for call in self._in_order() if not call.is_over()]

    def before(self, call: InFlightCall) -> list[InFlightCall]:
        """Those of the calls that are not over, as far as anybody has looked, which were sent before this one."""
        return [other for other in self._in_order() if other.began < call.began]

    def expect_reader(self, future: Unread) -> None:
        """The result of this future shall be read: its failure shall not be lost."""
        self._unread[id(future)] = future
        future.when_read = partial(self._unread.pop, id(future), None)

    @property
    def has_unread(self) -> bool:
        """Whether the result of some call has not been read yet; it may still be running."""
        return bool(self._unread)

    def unread_failure(self, *, look_at_all: bool = False) -> Unread | None:
        """A failed call that nobody has read, given once. Looks at a few, and at others the next time, unless at all."""
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
        self._handed_over.clear()
        self._unread.clear()

    def _in_order(self) -> list[InFlightCall]:
        handed_over = [call for kept in list(self._handed_over.values()) if (call := kept()) is not None]
        return sorted([*self._unanswered.values(), *handed_over], key=lambda call: call.began)

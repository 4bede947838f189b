"""What pytest does for a test's author: this kit does not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

ErrorT = TypeVar("ErrorT", bound=Exception)


@dataclass
class Caught(Generic[ErrorT]):
    """The error that a block raised."""

    _error: ErrorT | None = None

    @property
    def error(self) -> ErrorT:
        assert self._error is not None
        return self._error


@contextmanager
def expected(kind: type[ErrorT]) -> Iterator[Caught[ErrorT]]:
    """The block must raise an error of that kind; any other passes through."""
    caught: Caught[ErrorT] = Caught()
    try:
        yield caught
    except kind as error:
        caught._error = error
        return
    raise AssertionError(f"{kind.__name__} was expected, nothing was raised")

"""Wall-clock seconds of named phases, and a callback for which phase runs. Not here: a timeline of single calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from podium.observability.metrics import Max, Metrics
from podium.observability.names import TIMING_PREFIX

SpanListener: TypeAlias = Callable[[str | None], None]
"""Called with the innermost open phase whenever it changes; with None after the last one closes."""


class Spans:
    """Collects seconds per phase; a phase that is entered again adds to its time, and one that raises counts too.

    >>> spans = Spans()
    >>> with spans("rollout"):
    ...     pass
    >>> list(spans.take())
    ['timing_s/rollout']
    """

    def __init__(self, listener: SpanListener | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._listener = listener
        self._clock = clock
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body under `name`. Phases nest: the outer one's time includes the inner one's."""
        self._open.append(name)
        self._tell()
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - start
            self._open.pop()
            self._tell()

    def take(self) -> Metrics:
        """`timing_s/<name>` of the phases that ended since the last call; of several ranks the slowest counts."""
        taken, self._seconds = self._seconds, {}
        return Metrics({name: Max(seconds) for name, seconds in taken.items()}).prefixed(TIMING_PREFIX)

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self._open[-1] if self._open else None)

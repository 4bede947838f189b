"""Bytes of each column by direction, counted where calls are sent and collected, while a caller records.

Tensors are counted exactly, objects are estimated. A rank reads only the rows of its own shard, and only the columns that it was
sent, so the driver can count those too.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from podium.protocol.column_types import bytes_of_columns
from podium.protocol.remote_rows import RemoteRows
from podium.protocol.rows import as_proto, is_rows

Way: TypeAlias = Literal["sent", "read", "returned", "stayed", "fetched"]
"""sent: from the driver to ranks. read: by ranks, of rows that lie elsewhere. returned: from ranks to the driver. stayed: on the
ranks that made it. fetched: by the driver, of rows that lie elsewhere."""
WAYS: tuple[Way, ...] = get_args(Way)
THROUGH_DRIVER: tuple[Way, ...] = ("sent", "returned", "fetched")
DRIVER = "driver"
"""The entry for rows that the driver itself reads, in place of a call."""


@dataclass
class Traffic:
    """Bytes by call, way and column."""

    bytes: Counter[tuple[str, Way, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, call: str, way: Way, columns: Mapping[str, int]) -> None:
        with self._lock:  # other threads send deferred calls and await futures
            for column, count in columns.items():
                self.bytes[call, way, column] += count

    def counted(self) -> dict[tuple[str, Way, str], int]:
        """A copy of the counts so far, in the order of the calls."""
        with self._lock:
            return dict(self.bytes)

    def through_driver(self) -> int:
        """Bytes that passed through the driver."""
        return sum(count for (_, way, _), count in self.counted().items() if way in THROUGH_DRIVER)

    def sent(self, call: str, values: Iterable[Any]) -> None:
        """Count the arguments of a call; arguments that ranks share are given once."""
        for value in values:
            self._add(call, value, here="sent", away="read")

    def returned(self, call: str, answers: Iterable[Any]) -> None:
        for answer in answers:
            self._add(call, answer, here="returned", away="stayed")

    def _add(self, call: str, value: Any, *, here: Way, away: Way) -> None:
        if not is_rows(value):
            return
        if isinstance(value, RemoteRows):
            self.add(call, here, value.local_bytes())
            self.add(call, away, value.column_bytes())
        else:
            self.add(call, here, bytes_of_columns(as_proto(value)))


_recording: ContextVar[Traffic | None] = ContextVar("podium_traffic", default=None)


@contextmanager
def recorded_traffic(traffic: Traffic | None = None) -> Iterator[Traffic]:
    """Count the calls that this thread makes in the block: in a new `Traffic`, or in addition to what is in `traffic`."""
    traffic = Traffic() if traffic is None else traffic
    token = _recording.set(traffic)
    try:
        yield traffic
    finally:
        _recording.reset(token)


def recording() -> Traffic | None:
    """The `Traffic` that records this thread's calls, or None."""
    return _recording.get()

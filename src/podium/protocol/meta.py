"""What is true of a whole batch: how meta values are copied, merged and carried along with rows.

Two keys are Podium's own. `AUTO_PADDING_KEY` marks a batch that may be padded when it does not divide among ranks.
`PADDING_ROWS_KEY` is set on a shard that was padded: the numbers of its rows that are copies. Both stay with the rows through
every operation, whichever meta keys it names; row operations keep the numbers right.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, Protocol, Self, runtime_checkable

from torch import Tensor

from podium.errors import DataError
from podium.protocol import wire

AUTO_PADDING_KEY = "_podium_auto_padding"
"""True on a batch whose dispatch may copy its last row until all ranks get as many."""
PADDING_ROWS_KEY = "_podium_padding_rows"
"""A tuple of the rows that are such copies; absent where there are none."""

METRICS_KEY = "metrics"
"""A plain dict under this key holds what one rank measured, so concatenating makes it a dict of lists, an entry per part."""

_IMMUTABLE = frozenset({bool, bytes, complex, float, int, str, type(None)})


@runtime_checkable
class Mergeable(Protocol):
    """A meta value that knows how to become one when batches are concatenated (metrics, counters)."""

    def merge(self, others: Sequence[Self], /) -> Self: ...


def copy_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing that can be changed."""
    if all(type(value) in _IMMUTABLE for value in meta.values()):
        return dict(meta)
    return copy.deepcopy(dict(meta))


def meta_of_rows(meta: Mapping[str, Any], rows: range | Tensor) -> dict[str, Any]:
    """A copy of the meta for a batch that holds these rows, by number, of the one it comes from."""
    copied = copy_meta(meta)
    padding = copied.pop(PADDING_ROWS_KEY, ())
    if padding:
        numbers = rows if isinstance(rows, range) else rows.tolist()
        mark_padding(copied, [new for new, old in enumerate(numbers) if old in padding])
    return copied


def mark_padding(meta: dict[str, Any], rows: Sequence[int]) -> None:
    """Say which rows are padding, in place."""
    meta.pop(PADDING_ROWS_KEY, None)
    if rows:
        meta[PADDING_ROWS_KEY] = tuple(rows)


def private_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the meta that stays with the rows whatever keys are chosen."""
    return {key: meta[key] for key in (AUTO_PADDING_KEY, PADDING_ROWS_KEY) if key in meta}


def merge_meta(metas: Sequence[Mapping[str, Any]], parts: Sequence[Sized]) -> dict[str, Any]:
    """One meta for the concatenation of parts, whose metas these are.

    A `Mergeable` merges itself, plain dicts under `METRICS_KEY` become one of lists, other values must be equal.
    """
    if not any(metas):
        return {}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for meta in metas for key in meta if key != PADDING_ROWS_KEY):
        merged[key] = _merge_values(key, [(number, meta[key]) for number, meta in enumerate(metas) if key in meta])
    if any(PADDING_ROWS_KEY in meta for meta in metas):
        starts = accumulate((len(part) for part in parts), initial=0)
        padding = [start + row for start, meta in zip(starts, metas, strict=False) for row in meta.get(PADDING_ROWS_KEY, ())]
        mark_padding(merged, padding)
    return merged


def _merge_values(key: str, found: Sequence[tuple[int, Any]]) -> Any:
    (first_number, first), rest = found[0], found[1:]
    if key == METRICS_KEY and all(type(value) is dict for _, value in found):
        return _lists_of([value for _, value in found])
    if type(first) not in _IMMUTABLE and isinstance(first, Mergeable):
        return first.merge([value for _, value in rest])
    for number, value in rest:
        if not wire.equal(first, value):
            raise DataError(f"concat: meta {key!r} is {first!r} in part {first_number} but {value!r} in part {number}")
    return copy.deepcopy(first)


def _lists_of(metrics: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Each metric's values in the order of the parts; a list, as from an earlier concatenation, adds its items."""
    lists: dict[str, list[Any]] = {}
    for measured in metrics:
        for name, value in measured.items():
            lists.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return lists

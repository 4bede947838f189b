"""How the meta of several batches becomes that of their concatenation, key by key.

A value that is `Mergeable` merges itself, as metrics of `podium.observability` do; plain dicts under `METRICS_KEY` become one of
lists; anything else must be equal. The result is the same whether parts are joined at once or in groups.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

from podium.errors import DataError
from podium.protocol import equality, formatting
from podium.protocol.meta import IMMUTABLE, PADDING_OF_KEY, PADDING_ROWS_KEY, STALE, is_marked, mark_padding

_REMEDY = "use a value that merges itself, such as podium.observability.Mean(total, weight), or drop the key by select()"

METRICS_KEY = "metrics"
"""A plain dict under this key, or a list of them, holds what one rank measured, so concatenating makes it a dict of lists, an
entry per dict; None is left out."""


@runtime_checkable
class Mergeable(Protocol):
    """A meta value that knows how to become one when batches are concatenated (metrics, counters)."""

    def merge(self, others: Sequence[Self], /) -> Self:
        """One value for this and the others, of which there may be none; a new one, which shares nothing that can be changed."""
        ...


class _Found(NamedTuple):
    """A key's value in one of the parts."""

    part: int
    value: Any


def merge_meta(metas: Sequence[Mapping[str, Any]], parts: Sequence[Sized]) -> dict[str, Any]:
    """One meta for the concatenation of parts, whose metas these are.

    DataError names the key, the two parts and both values where they cannot become one.
    """
    if not any(metas):
        return {}
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for meta in metas for key in meta if key not in (PADDING_ROWS_KEY, PADDING_OF_KEY)):
        merged[key] = _merge_values(key, [_Found(number, meta[key]) for number, meta in enumerate(metas) if key in meta])
    counts = list(map(len, parts))
    starts = accumulate(counts, initial=0)
    marked = [place for place in zip(metas, counts, starts, strict=False) if place[1] and PADDING_ROWS_KEY in place[0]]
    mark_padding(merged, [start + row for meta, _, start in marked for row in meta[PADDING_ROWS_KEY]], sum(counts))
    if not all(is_marked(meta, count) for meta, count, _ in marked):
        merged[PADDING_OF_KEY] = STALE  # a guess would leave real rows out of the training
    return merged


def _merge_values(key: str, found: Sequence[_Found]) -> Any:
    first = found[0].value
    if key == METRICS_KEY:
        measured = [each for _, value in found for each in (value if type(value) is list else [value]) if each is not None]
        if measured and all(type(each) is dict for each in measured):
            return _lists_of(measured)
    if type(first) not in IMMUTABLE and isinstance(first, Mergeable):
        merged = first.merge([value for _, value in found[1:]])
        return _copied(merged) if any(merged is value for _, value in found) else merged  # many a merge returns self
    for other, value in found[1:]:
        try:
            is_equal = equality.equal(first, value)
        except DataError as exc:
            raise DataError(f"concat: meta {key!r}, parts {found[0].part} and {other}: {exc}; {_REMEDY}") from exc
        if not is_equal:
            raise DataError(
                f"concat: meta {key!r} must be equal in all parts, got {formatting.short(first)} in part {found[0].part} and "
                f"{formatting.short(value)} in part {other}; {_REMEDY}"
            )
    return _copied(first)


def _lists_of(metrics: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Each metric's values in the order of the parts; a list, as from an earlier concatenation, adds its items."""
    lists: dict[str, list[Any]] = {}
    for measured in metrics:
        for name, value in measured.items():
            lists.setdefault(name, []).extend(map(_copied, value if isinstance(value, list) else [value]))
    return lists


def _copied(value: Any) -> Any:
    return value if type(value) in IMMUTABLE else copy.deepcopy(value)

"""How the meta of several batches becomes that of their concatenation, key by key, by a policy that is declared.

In this order: a policy declared for the key (`DataProto(..., meta_policies={"peak_mem": "max"})`, which travels with the
batch, or the argument of `concat`); a value that is `Mergeable` merges itself; plain dicts under `METRICS_KEY` become one of
lists; anything else must be equal. Every policy gives the same whether parts are joined at once or in groups.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence, Sized
from itertools import accumulate
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from torch import Tensor

from podium.errors import DataError, nearest
from podium.protocol import equality, wording
from podium.protocol.meta import (
    IMMUTABLE,
    META_POLICIES_KEY,
    PADDING_OF_KEY,
    PADDING_ROWS_KEY,
    STALE,
    is_marked,
    mark_padding,
)

MetaPolicy: TypeAlias = Literal["equal", "first", "list", "sum", "min", "max", "weighted_mean"]
"""How one meta key merges. The values of the parts must be equal; the first one's is taken; they are listed (a list adds its
items); added; the least or the largest is taken (NaN where there is one); averaged, each weighing as many as the rows of its
part that are not padding. `weighted_mean` may be missing only in parts of which no row counts; where all parts are such, the mean
is NaN."""

_OWN_WEIGHT = "A podium.observability.Mean(total, weight) brings its own weight"

METRICS_KEY = "metrics"
"""A plain dict under this key, or a list of them, holds what one rank measured, so concatenating makes it a dict of lists, an
entry per dict; None is left out."""


@runtime_checkable
class Mergeable(Protocol):
    """A meta value that knows how to become one when batches are concatenated (metrics, counters)."""

    def merge(self, others: Sequence[Self], /) -> Self:
        """One value for this and the others, of which there may be none; a new one, which shares nothing that can be changed."""
        ...


class _Part(Sized, Protocol):
    """Rows to be joined: their number, and whether they have any column."""

    @property
    def batch(self) -> Sized: ...
    @property
    def non_tensor_batch(self) -> Sized: ...


class _Found(NamedTuple):
    """A key's value in one of the parts."""

    part: int
    value: Any
    weight: int | None
    """Rows of the part that are not padding; None where the part has no column, and so no row count at all."""


def check_policies(policies: Mapping[str, str], keys: Mapping[str, Any]) -> dict[str, str]:
    """A copy of declared policies. DataError for a policy that does not exist, or a key that no meta has."""
    for key, policy in policies.items():
        if policy not in _MERGE:
            raise DataError(
                f"meta {key!r} has no policy {policy!r}{nearest(str(policy), _MERGE)}; the policies are: {', '.join(_MERGE)}"
            )
        if key not in keys:
            raise DataError(f"a policy is declared for meta {key!r}, which is not there{nearest(key, keys)}")
    return dict(policies)


def merge_meta(
    metas: Sequence[Mapping[str, Any]], parts: Sequence[_Part], policies: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """One meta for the concatenation of parts, whose metas these are; `policies` overrule what the parts declare.

    DataError names the key, the two parts and both values where they cannot become one.
    """
    if not any(metas):
        return {}
    declared = joined_policies(metas) | check_policies(policies or {}, {key: None for meta in metas for key in meta})
    weights = list(map(_weight, parts, metas))
    merged: dict[str, Any] = {}
    of_rows = (PADDING_ROWS_KEY, PADDING_OF_KEY, META_POLICIES_KEY)
    for key in dict.fromkeys(key for meta in metas for key in meta if key not in of_rows):
        found = [_Found(number, meta[key], weights[number]) for number, meta in enumerate(metas) if key in meta]
        if declared.get(key) == "weighted_mean":
            _check_all_have(key, metas, weights)
        merged[key] = _merge_values(key, found, declared.get(key))
    if declared:
        merged[META_POLICIES_KEY] = declared
    counts = list(map(len, parts))
    starts = accumulate(counts, initial=0)
    marked = [place for place in zip(metas, counts, starts, strict=False) if place[1] and PADDING_ROWS_KEY in place[0]]
    mark_padding(merged, [start + row for meta, _, start in marked for row in meta[PADDING_ROWS_KEY]], sum(counts))
    if not all(is_marked(meta, count) for meta, count, _ in marked):
        merged[PADDING_OF_KEY] = STALE  # a guess would leave real rows out of the training
    return merged


def joined_policies(metas: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What the metas declare together. DataError when two declare different policies for one key."""
    declared: dict[str, str] = {}
    for meta in metas:
        for key, policy in meta.get(META_POLICIES_KEY, {}).items():
            if declared.setdefault(key, policy) != policy:
                raise DataError(f"meta {key!r} is declared {declared[key]!r} in one part but {policy!r} in another")
    return declared


def _weight(part: _Part, meta: Mapping[str, Any]) -> int | None:
    rows = len(part)
    if not rows and not part.batch and not part.non_tensor_batch:
        return None
    padding: Sequence[int] = meta.get(PADDING_ROWS_KEY, ())
    return rows - sum(row < rows for row in padding)


def _check_all_have(key: str, metas: Sequence[Mapping[str, Any]], weights: Sequence[int | None]) -> None:
    """DataError where a part has rows to be averaged over, but no value: the mean would be another when parts join in groups."""
    for number, (meta, weight) in enumerate(zip(metas, weights, strict=True)):
        if weight and key not in meta:
            raise DataError(
                f"concat: meta {key!r} is averaged by rows, but part {number} has {weight} rows and no such value: set it in "
                f"every part that has rows. {_OWN_WEIGHT}"
            )


def _merge_values(key: str, found: Sequence[_Found], policy: str | None) -> Any:
    first = found[0].value
    if policy is not None:
        return _MERGE[policy](key, found)
    if key == METRICS_KEY:
        measured = [each for _, value, _ in found for each in (value if type(value) is list else [value]) if each is not None]
        if measured and all(type(each) is dict for each in measured):
            return _lists_of(measured)
    if type(first) not in IMMUTABLE and isinstance(first, Mergeable):
        merged = first.merge([value for _, value, _ in found[1:]])
        return _copied(merged) if any(merged is value for _, value, _ in found) else merged  # many a merge returns self
    return _equal(key, found)


def _equal(key: str, found: Sequence[_Found]) -> Any:
    number, first, _ = found[0]
    for other, value, _ in found[1:]:
        try:
            is_equal = equality.equal(first, value)
        except DataError as exc:
            raise DataError(f"concat: meta {key!r}, parts {number} and {other}: {exc}; {_declare(key)}") from exc
        if not is_equal:
            raise DataError(
                f"concat: meta {key!r} is {wording.short(first)} in part {number} but {wording.short(value)} in part {other}; "
                f"{_declare(key)}"
            )
    return _copied(first)


def _declare(key: str) -> str:
    return f"declare how it merges, as meta_policies={{{key!r}: 'list'}}"


def _first(key: str, found: Sequence[_Found]) -> Any:
    return _copied(found[0].value)


def _list(key: str, found: Sequence[_Found]) -> list[Any]:
    return [_copied(item) for _, value, _ in found for item in (value if isinstance(value, list) else [value])]


def _sum(key: str, found: Sequence[_Found]) -> Any:
    return sum(_numbers(key, found))


def _min(key: str, found: Sequence[_Found]) -> Any:
    return min(_numbers(key, found), key=lambda number: -math.inf if math.isnan(number) else number)


def _max(key: str, found: Sequence[_Found]) -> Any:
    return max(_numbers(key, found), key=lambda number: math.inf if math.isnan(number) else number)


def _weighted_mean(key: str, found: Sequence[_Found]) -> float:
    numbers = _numbers(key, found)
    for number, each in zip(numbers, found, strict=True):
        if each.weight is None and not math.isnan(number):
            raise DataError(
                f"concat: meta {key!r} is averaged by rows, but part {each.part}, where it is {number}, has no columns, so no "
                f"rows that it could be the mean of: give it rows. {_OWN_WEIGHT}"
            )
    weights = [each.weight or 0 for each in found]
    total = math.fsum(number * weight for number, weight in zip(numbers, weights, strict=True) if weight)
    return total / sum(weights) if any(weights) else math.nan  # which later weighs nothing


def _numbers(key: str, found: Sequence[_Found]) -> list[int | float]:
    """Python's own numbers; those of torch and numpy are converted."""
    plain = [value.item() if isinstance(value, Tensor | np.generic) and not value.shape else value for _, value, _ in found]
    for number, value in enumerate(plain):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DataError(f"concat: meta {key!r} is to be a number, but is {value!r} in part {found[number].part}")
    return plain


def _lists_of(metrics: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Each metric's values in the order of the parts; a list, as from an earlier concatenation, adds its items."""
    lists: dict[str, list[Any]] = {}
    for measured in metrics:
        for name, value in measured.items():
            lists.setdefault(name, []).extend(map(_copied, value if isinstance(value, list) else [value]))
    return lists


def _copied(value: Any) -> Any:
    return value if type(value) in IMMUTABLE else copy.deepcopy(value)


_MERGE: Mapping[str, Callable[[str, Sequence[_Found]], Any]] = {
    "equal": _equal,
    "first": _first,
    "list": _list,
    "sum": _sum,
    "min": _min,
    "max": _max,
    "weighted_mean": _weighted_mean,
}

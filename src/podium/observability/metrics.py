"""Typed metrics: how values of several ranks or micro-batches become one is part of the value, never read off its name.

A metric holds plain Python floats (tensors and numpy scalars are converted), so it pickles small and keeps no graph alive.
It merges itself when batches are concatenated (it is a `podium.protocol.Mergeable`). The result doesn't depend on the
order of the parts, except for `Last`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

from podium.errors import DataError


@dataclass(frozen=True)
class Metric(ABC):
    """A value with its reduction: a kind says how the numbers of several parts become one, and what to report of them."""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, float(getattr(self, field.name)))

    @property
    @abstractmethod
    def value(self) -> float:
        """The number to report."""

    @staticmethod
    @abstractmethod
    def _join(numbers: Sequence[float]) -> float:
        """One field of the merged metric, from that field of the parts (at least one), in their order."""

    def merge(self, others: Sequence[Self], /) -> Self:
        """One metric for this and the others. DataError when they are not all of one kind."""
        parts = [self, *others]
        kinds = sorted({type(part).__name__ for part in parts})
        if len(kinds) > 1:
            raise DataError(f"metrics of different kinds do not merge: {' and '.join(kinds)}; report one name with one kind")
        return type(self)(*(self._join([getattr(part, field.name) for part in parts]) for field in fields(self)))


@dataclass(frozen=True)
class Mean(Metric):
    """A weighted mean, kept as its sum and its weight, so that unequal parts merge to the mean of the whole.

    >>> Mean(4.0, 1).merge([Mean(3.0, 3)]).value
    1.75
    """

    total: float
    """Sum of weight times value."""
    weight: float
    """Sum of the weights (rows, tokens), at least 0. At 0 there is no value: NaN here, and left out of reports."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weight < 0:
            raise DataError(f"the weight of a Mean must be at least 0, got {self.weight}")

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """The plain mean of some values; none at all gives weight 0."""
        numbers = [float(value) for value in values]
        return cls(_sum(numbers), len(numbers))

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan

    @staticmethod
    def _join(numbers: Sequence[float]) -> float:
        return _sum(numbers)


@dataclass(frozen=True)
class _Single(Metric):
    """A metric that is one number."""

    number: float

    @property
    def value(self) -> float:
        return self.number


class Sum(_Single):
    """Parts are added."""

    @staticmethod
    def _join(numbers: Sequence[float]) -> float:
        return _sum(numbers)


class Max(_Single):
    """The largest part; NaN if any part is NaN."""

    @staticmethod
    def _join(numbers: Sequence[float]) -> float:
        return max(numbers, key=_nan_last)


class Min(_Single):
    """The smallest part; NaN if any part is NaN."""

    @staticmethod
    def _join(numbers: Sequence[float]) -> float:
        return -max((-number for number in numbers), key=_nan_last)


class Last(_Single):
    """The last part, for a value that all ranks share or that only the latest of counts (learning rate, weight version)."""

    @staticmethod
    def _join(numbers: Sequence[float]) -> float:
        return numbers[-1]


class Metrics(dict[str, Metric]):
    """Metrics by name (`actor/pg_loss`).

    >>> first = Metrics({"actor/terminated_frac": Mean(0, 1), "tokens": Sum(3)})
    >>> first.merge([Metrics({"actor/terminated_frac": Mean(1, 1)})]).to_floats()
    {'actor/terminated_frac': 0.5, 'tokens': 3.0}
    """

    def merge(self, others: Sequence[Mapping[str, Metric]], /) -> Self:
        """The union of the names, each reduced by its kind over the parts that have it.

        Raises DataError, naming the metric, when two parts declare it with different kinds.
        """
        parts: list[Mapping[str, Metric]] = [self, *others]
        names = dict.fromkeys(name for part in parts for name in part)
        return type(self)({name: _merge_named(name, [part[name] for part in parts if name in part]) for name in names})

    def prefixed(self, prefix: str) -> Self:
        """The same metrics as `prefix/name`; the prefix is given with or without its slash."""
        return type(self)({f"{prefix.removesuffix('/')}/{name}": metric for name, metric in self.items()})

    def to_floats(self) -> dict[str, float]:
        """What to report, by name; a `Mean` of weight 0 has nothing to report and is left out."""
        return {name: metric.value for name, metric in self.items() if not (isinstance(metric, Mean) and metric.weight == 0)}


def _merge_named(name: str, found: Sequence[Metric]) -> Metric:
    try:
        return found[0].merge(found[1:])
    except DataError as exc:
        raise DataError(f"metric {name!r}: {exc}") from exc


def _sum(numbers: Sequence[float]) -> float:
    """The exact sum, rounded once, whatever the order; with an inf, a NaN or an overflow, what plain addition gives."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return sum(numbers)


def _nan_last(number: float) -> tuple[bool, float]:
    return math.isnan(number), number

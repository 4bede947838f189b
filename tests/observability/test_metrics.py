"""Reductions worked out by hand, and what must not merge."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from podium.errors import DataError
from podium.observability import Last, Max, Mean, Metric, Metrics, Min, Sum
from podium.protocol import DataProto, Mergeable


def test_each_kind_reduces_as_declared() -> None:
    assert Mean(4.0, 1).merge([Mean(3.0, 3), Mean(0.0, 0)]).value == 1.75
    assert Sum(1).merge([Sum(2), Sum(4)]).value == 7.0
    assert Max(1).merge([Max(5), Max(2)]).value == 5.0
    assert Min(1).merge([Min(-5), Min(2)]).value == -5.0
    assert Last(1).merge([Last(5), Last(2)]).value == 2.0
    assert Sum(3).merge([]) == Sum(3)


def test_the_name_does_not_choose_the_reduction() -> None:
    """Field report G7: 'terminated' holds 'min', 'softmax' holds 'max'."""
    first = Metrics({"actor/terminated_frac": Mean.of([0]), "softmax_entropy": Mean.of([1]), "seqlen/minmax_diff": Max(3)})
    second = Metrics({"actor/terminated_frac": Mean.of([1]), "softmax_entropy": Mean.of([3]), "seqlen/minmax_diff": Max(5)})
    expected = {"actor/terminated_frac": 0.5, "softmax_entropy": 2.0, "seqlen/minmax_diff": 5.0}
    assert first.merge([second]).to_floats() == expected


def test_a_mean_of_nothing_is_nan_and_not_reported() -> None:
    empty = Mean.of([])
    assert math.isnan(empty.value)
    assert Metrics({"a": empty, "b": Sum(0)}).to_floats() == {"b": 0.0}
    assert empty.merge([Mean(6, 2)]).value == 3.0
    with pytest.raises(DataError, match="at least 0"):
        Mean(1.0, -1)


def test_two_kinds_of_one_name_are_refused_naming_both() -> None:
    with pytest.raises(DataError, match=r"'actor/loss'.*Max and Mean"):
        Metrics({"actor/loss": Mean(1, 1)}).merge([Metrics({"actor/loss": Max(1)})])
    with pytest.raises(DataError, match="Max and Min"):
        Max(1).merge([Min(1)])  # type: ignore[list-item]


def test_union_of_names_keeps_what_only_some_parts_have() -> None:
    merged = Metrics({"a": Sum(1)}).merge([Metrics({"b": Max(2)}), Metrics({"a": Sum(3), "b": Max(1)})])
    assert merged == Metrics({"a": Sum(4), "b": Max(2)})


@pytest.mark.parametrize("kind", [Sum, Max, Min])
def test_order_of_the_parts_does_not_matter(kind: type[Sum] | type[Max] | type[Min]) -> None:
    numbers = [0.1, 1e16, -1e16, 0.2, 0.3]
    there = kind(numbers[0]).merge([kind(x) for x in numbers[1:]])
    back = kind(numbers[-1]).merge([kind(x) for x in reversed(numbers[:-1])])
    assert there == back


def test_non_finite_numbers_pass_through() -> None:
    for kind in (Max, Min, Sum):
        assert math.isnan(kind(1).merge([kind(math.nan), kind(2)]).value)
        assert math.isnan(kind(math.nan).merge([kind(1)]).value)
    assert math.isnan(Sum(math.inf).merge([Sum(-math.inf)]).value)
    assert Sum(1e308).merge([Sum(1e308)]).value == math.inf


def test_numbers_become_plain_floats() -> None:
    loss = torch.tensor(1.5)
    for metric in (Mean(loss, np.int64(2)), Sum(np.float32(2)), Last(3)):
        assert all(type(value) is float for value in vars(metric).values())
        assert type(metric.value) is float


def test_prefix() -> None:
    metrics = Metrics({"loss": Sum(1)})
    assert metrics.prefixed("actor") == metrics.prefixed("actor/") == {"actor/loss": Sum(1)}


def test_metrics_travel_as_meta_of_a_batch() -> None:
    parts = [DataProto.from_dict({"x": torch.zeros(1)}, {}, {"metrics": Metrics({"m": Mean(rank, 1)})}) for rank in range(4)]
    assert isinstance(Metrics(), Mergeable)
    assert isinstance(Sum(1), Mergeable)
    merged: Metrics = DataProto.concat([pickle.loads(pickle.dumps(part)) for part in parts]).meta_info["metrics"]
    assert isinstance(merged, Metrics)
    metric: Metric = merged["m"]
    assert metric == Mean(6, 4)

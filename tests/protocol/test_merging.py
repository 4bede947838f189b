"""How meta values of several batches become one: values that merge themselves, lists of metrics, equality."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from podium.errors import DataError
from podium.observability import Max, Mean, Sum
from podium.protocol import DataProto

NAN = float("nan")


def report(rows: int, **meta: Any) -> DataProto:
    """A batch of so many rows, as a rank returns it."""
    return DataProto({"x": torch.zeros(rows)}, meta_info=meta)


def test_typed_values_merge_themselves() -> None:
    """10.0 and 12.0 by max, 5 and 7 by sum, 1.0 of one row and 2.0 of three by weighted mean; in groups too."""
    parts = [
        report(1, peak_mem=Max(10.0), tokens=Sum(5), loss=Mean(1.0, 1)),
        report(3, peak_mem=Max(12.0), tokens=Sum(7), loss=Mean(6.0, 3)),
        report(0, peak_mem=Max(1.0), tokens=Sum(0), loss=Mean(0.0, 0)),
    ]
    grouped = DataProto.concat([DataProto.concat(parts[:2]), parts[2]])
    for joined in (DataProto.concat(parts), grouped):
        assert [metric.value for metric in joined.meta_info.values()] == [12.0, 12.0, 1.75]


def test_plain_metrics_become_lists_also_in_groups() -> None:
    parts = [report(1, metrics=metrics) for metrics in ({"loss": 1.0}, {"loss": 2.0, "lens": [3, 4]}, [None, {"loss": 5.0}])]
    whole = DataProto.concat(parts).meta_info["metrics"]
    assert whole == {"loss": [1.0, 2.0, 5.0], "lens": [3, 4]}
    assert DataProto.concat([DataProto.concat(parts[:2]), parts[2]]).meta_info["metrics"] == whole


@pytest.mark.parametrize("value", [1, [1, NAN], {"a": np.ones(2), "b": torch.ones(2)}, None])
def test_equal_values_become_one_that_is_a_copy(value: Any) -> None:
    parts = [report(1, m=value), report(2), report(3, m=value)]
    merged = DataProto.concat(parts).meta_info["m"]
    assert repr(merged) == repr(value)
    assert merged is not value or value is None or isinstance(value, int)


@pytest.mark.parametrize(
    ("values", "message"), [([1, 2], "got 1 in part 0 and 2 in part 1"), ([1, "1"], "got 1 in part 0 and '1'")]
)
def test_a_conflict_names_the_key_the_parts_and_both_values(values: list[Any], message: str) -> None:
    parts = [DataProto(meta_info={"m": value}) for value in values]
    with pytest.raises(DataError, match=rf"meta 'm' must be equal in all parts, {message}.*; use a value that merges itself"):
        DataProto.concat(parts)
    assert [part.meta_info["m"] for part in parts] == values


def test_a_mean_of_padding_rows_is_the_callers_weight() -> None:
    joined = DataProto.concat([report(3, loss=Mean(4.0, 1)), report(0, loss=Mean(0.0, 0)), report(3, loss=Mean(0.0, 3))])
    assert joined.meta_info["loss"].value == 1.0
    assert math.isnan(DataProto.concat([report(0, loss=Mean(0.0, 0))]).meta_info["loss"].value)


def test_keys_of_different_parts_are_all_kept() -> None:
    parts = [DataProto(meta_info={"x": 1, "t": torch.ones(2)}), DataProto(meta_info={"y": np.ones(2), "t": torch.ones(2)})]
    assert list(DataProto.concat(parts).meta_info) == ["x", "t", "y"]

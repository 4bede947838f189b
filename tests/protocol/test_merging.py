"""How meta values of several batches become one: declared policies, mergeable values, equality; each error names both parts."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import DataError
from podium.observability import Max, Mean, Sum
from podium.protocol import DataProto, MetaPolicy

POLICIES: dict[str, MetaPolicy] = {"peak_mem": "max", "tokens": "sum", "loss": "weighted_mean"}


def report(rows: int, **meta: Any) -> DataProto:
    """What a rank that had so many rows returns."""
    return DataProto({"x": torch.zeros(rows)}, meta_info=meta)


def test_numbers_of_ranks_merge_as_declared() -> None:
    """B2: 10.0 and 12.0 by max, 5 and 7 by sum, 1.0 of one row and 2.0 of three by weighted mean."""
    parts = [report(1, peak_mem=10.0, tokens=5, loss=1.0), report(3, peak_mem=12.0, tokens=7, loss=2.0)]
    merged = DataProto.concat(parts, meta_policies=POLICIES).meta_info
    assert [merged[key] for key in POLICIES] == [12.0, 12, 1.75]
    assert type(merged["tokens"]) is int


def test_the_declaration_travels_with_the_batch() -> None:
    """B2 through the wire, an operation on rows, a union and a concatenation in groups."""
    parts = [
        DataProto({"x": torch.zeros(rows)}, meta_info={"loss": loss, "tokens": rows}, meta_policies={"loss": "weighted_mean"})
        for rows, loss in ((1, 1.0), (3, 2.0), (4, 4.0))
    ]
    parts = [pickle.loads(pickle.dumps(part))[:] for part in parts]
    for part in parts:
        part.meta_info.pop("tokens")
        part.union(DataProto(meta_info={"tokens": len(part)}, meta_policies={"tokens": "sum"}))
    whole = DataProto.concat(parts).meta_info
    grouped = DataProto.concat([DataProto.concat(parts[:2]), *parts[2:]]).meta_info
    assert whole == grouped
    assert (whole["loss"], whole["tokens"]) == ((1 + 3 * 2 + 4 * 4) / 8, 8)


def test_values_that_say_themselves_how_they_merge() -> None:
    """B2 once more, by typed values."""
    parts = [
        DataProto(meta_info={"peak_mem": Max(10.0), "tokens": Sum(5), "loss": Mean(1.0, 1)}),
        DataProto(meta_info={"peak_mem": Max(12.0), "tokens": Sum(7), "loss": Mean(6.0, 3)}),
    ]
    assert [metric.value for metric in DataProto.concat(parts).meta_info.values()] == [12.0, 12.0, 1.75]


NAN = float("nan")


@pytest.mark.parametrize(
    ("policy", "values", "expected"),
    [
        ("equal", [[1, NAN], [1, NAN]], [1, NAN]),
        ("first", ["a", "b"], "a"),
        ("first", [Max(1.0), Max(2.0)], Max(1.0)),
        ("list", [1, 2], [1, 2]),
        ("list", [[1, 2], 3], [1, 2, 3]),
        ("list", [{"a": 1}, (1, 2)], [{"a": 1}, (1, 2)]),
        ("sum", [1, 2.5], 3.5),
        ("sum", [torch.tensor(1), np.int64(2)], 3),
        ("min", [3.0, 2], 2),
        ("max", [3.0, 2], 3.0),
        ("max", [1.0, NAN, 2.0], NAN),
        ("min", [NAN, 2.0], NAN),
        ("weighted_mean", [1.0, 4.0], 3.0),
        ("weighted_mean", [5, 5], 5.0),
    ],
)
def test_each_policy(policy: MetaPolicy, values: list[Any], expected: Any) -> None:
    parts = [report(rows, m=value) for rows, value in zip((1, 2, 3), values, strict=False)]
    lacking = report(0 if policy == "weighted_mean" else 1)
    merged = DataProto.concat([*parts, lacking], meta_policies={"m": policy}).meta_info["m"]
    assert merged == expected or (math.isnan(merged) and math.isnan(expected)) or (merged[0] == 1 and math.isnan(merged[1]))


def declared(rows: int, value: float | None, policy: MetaPolicy) -> DataProto:
    """What a rank returns that had so many rows, with a value under `m` unless that is None."""
    if value is None:
        return report(rows)
    return DataProto({"x": torch.zeros(rows)}, meta_info={"m": value}, meta_policies={"m": policy})


def merged_or_refused(join: Any, parts: list[DataProto]) -> float | list[float] | None:
    """The value under `m`, NaN where no part has any; None where the parts cannot be joined."""
    try:
        return join(parts).meta_info.get("m", NAN)
    except DataError:
        return None


REPORTS = st.lists(st.tuples(st.integers(0, 3), st.one_of(st.none(), st.just(NAN), st.integers(0, 9))), min_size=1, max_size=5)


@pytest.mark.parametrize("policy", ["first", "list", "sum", "min", "max", "weighted_mean"])
@given(reports=REPORTS, cut=st.integers(1, 3))
def test_joining_in_groups_gives_the_same(policy: MetaPolicy, reports: list[tuple[int, float | None]], cut: int) -> None:
    """Whatever is missing, and whichever parts have no rows: what is refused at once is refused in groups."""
    parts = [declared(rows, value, policy) for rows, value in reports]

    def in_groups(parts: list[DataProto]) -> DataProto:
        return DataProto.concat([DataProto.concat(group) for group in (parts[:cut], parts[cut:]) if group])

    whole, grouped = merged_or_refused(DataProto.concat, parts), merged_or_refused(in_groups, parts)
    assert grouped == (pytest.approx(whole, nan_ok=True) if whole is not None else None)


def test_a_mean_is_refused_where_rows_have_no_value() -> None:
    """Parts of 1, 1 and 2 rows, of which the first has no value: at once 5/3, in groups 3/2, and neither is right."""
    parts = [declared(rows, value, "weighted_mean") for rows, value in ((1, None), (1, 1.0), (2, 2.0))]
    for group in (parts, parts[:2]):
        with pytest.raises(DataError, match=r"'m' is averaged by rows, but part 0 has 1 rows and no such value: .*Mean\(total"):
            DataProto.concat(group)
    parts[0].meta_info["_podium_padding_rows"] = (0,)  # a row that only pads needs none
    assert DataProto.concat(parts).meta_info["m"] == pytest.approx(5 / 3)


def test_values_of_no_rows_join_to_one_that_weighs_nothing() -> None:
    empty = [declared(0, value, "weighted_mean") for value in (5.0, 6.0)]
    joined = DataProto.concat(empty)
    assert math.isnan(joined.meta_info["m"])
    one = declared(3, 1.0, "weighted_mean")
    assert [DataProto.concat(parts).meta_info["m"] for parts in ([joined, one], [*empty, one], [one, joined])] == [1.0] * 3


def test_padding_and_empty_parts_weigh_nothing() -> None:
    padded = report(3, loss=4.0)
    padded.meta_info["_podium_padding_rows"] = (1, 2, 9)
    parts = [padded, report(0, loss=NAN), report(3, loss=0.0)]
    assert DataProto.concat(parts, meta_policies={"loss": "weighted_mean"}).meta_info["loss"] == 1.0
    nothing = DataProto.concat([report(0, loss=NAN)], meta_policies={"loss": "weighted_mean"})
    assert math.isnan(nothing.meta_info["loss"])


@pytest.mark.parametrize(
    ("values", "policies", "message"),
    [
        ([1, 2], {}, r"meta 'm' is 1 in part 0 but 2 in part 1; declare how it merges, as meta_policies=\{'m': 'list'\}"),
        ([1, 2], {"m": "equal"}, "meta 'm' is 1 in part 0 but 2 in part 1"),
        ([1, 2], {"m": "maximum"}, "meta 'm' has no policy 'maximum'; .*the policies are: equal, first, list, sum"),
        ([1, 2], {"mm": "max"}, "a policy is declared for meta 'mm', which is not there; did you mean 'm'"),
        ([1, "2"], {"m": "sum"}, "meta 'm' is to be a number, but is '2' in part 1"),
        ([True, 1], {"m": "max"}, "meta 'm' is to be a number, but is True in part 0"),
        ([torch.ones(2), 1], {"m": "max"}, r"meta 'm' is to be a number, but is tensor\(\[1., 1.\]\) in part 0"),
        (
            [1.0, 2.0],
            {"m": "weighted_mean"},
            r"'m' is averaged by rows, but part 0, where it is 1.0, has no columns, so no rows .*: give it rows. A podium",
        ),
    ],
)
def test_a_conflict_names_the_key_the_parts_and_both_values(values: list[Any], policies: dict[str, Any], message: str) -> None:
    """B1."""
    parts = [DataProto(meta_info={"m": value}) for value in values]
    with pytest.raises(DataError, match=message):
        DataProto.concat(parts, meta_policies=policies)
    assert [part.meta_info["m"] for part in parts] == values


def test_parts_must_agree_on_a_policy() -> None:
    parts = [DataProto(meta_info={"m": 1}, meta_policies={"m": "max"}), DataProto(meta_info={"m": 1}, meta_policies={"m": "min"})]
    with pytest.raises(DataError, match="meta 'm' is declared 'max' in one part but 'min' in another"):
        DataProto.concat(parts)
    with pytest.raises(DataError, match="meta 'm' is declared 'max' in one part but 'min' in another"):
        parts[0].union(parts[1])


def test_a_wrong_declaration_is_found_at_once() -> None:
    wrong: Any = {"m": "maxx"}
    with pytest.raises(DataError, match="no policy 'maxx'; did you mean 'max'"):
        DataProto(meta_info={"m": 1}, meta_policies=wrong)
    with pytest.raises(DataError, match="declared for meta 'n', which is not there"):
        DataProto(meta_info={"m": 1}, meta_policies={"n": "max"})


def test_keys_of_different_parts_are_all_kept() -> None:
    """B1: {'x': 1} and {'y': 2} give both; equal arrays and tensors do not conflict."""
    parts = [DataProto(meta_info={"x": 1, "t": torch.ones(2)}), DataProto(meta_info={"y": np.ones(2), "t": torch.ones(2)})]
    assert list(DataProto.concat(parts).meta_info) == ["x", "t", "y"]

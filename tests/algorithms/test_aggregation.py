"""The four modes of aggregation: values, gradients, masks, and parts that add up to the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from podium.algorithms import Aggregation
from podium.algorithms.aggregation import AggregationMode
from podium.errors import ConfigError
from podium.protocol.jagged import offsets_of

MODES: tuple[AggregationMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SCALE = 8.0


def of(mode: AggregationMode) -> Aggregation:
    return Aggregation(mode, SCALE if mode == "seq-mean-token-sum-norm" else None)


def pack(rows: list[list[float]]) -> tuple[Tensor, Tensor]:
    """(values [N] float64, offsets)."""
    values = torch.tensor([item for row in rows for item in row], dtype=torch.float64)
    return values, offsets_of(torch.tensor([len(row) for row in rows], dtype=torch.int64))


@pytest.mark.parametrize(
    ("mode", "loss", "gradient"),
    [
        ("token-mean", 1.75, [1 / 4] * 4),
        ("seq-mean-token-mean", 2.5, [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("seq-mean-token-sum", 3.5, [1 / 2] * 4),
        ("seq-mean-token-sum-norm", 0.4375, [1 / 16] * 4),
    ],
)
def test_one_row_of_one_token_and_one_of_three(mode: AggregationMode, loss: float, gradient: list[float]) -> None:
    """Row A [4], row B [1, 1, 1]: 1.75, 2.5, 3.5 and, with the constant 8, 0.4375; whole or in two parts; gradients."""
    aggregation = of(mode)
    for cut in ([[[4.0], [1.0, 1.0, 1.0]]], [[[4.0]], [[1.0, 1.0, 1.0]]]):
        packed = [pack(part) for part in cut]
        count = sum(aggregation.count(torch.ones(len(values)), offsets) for values, offsets in packed)
        leaves = [values.requires_grad_() for values, _ in packed]
        total = sum(aggregation.sum(values, torch.ones(len(values)), offsets) / count for values, offsets in packed)
        torch.autograd.backward(torch.as_tensor(total))
        assert float(torch.as_tensor(total).detach()) == pytest.approx(loss, abs=1e-15)
        assert torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]).tolist() == pytest.approx(gradient, abs=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_what_is_under_the_mask_is_not_read(mode: AggregationMode, dtype: torch.dtype) -> None:
    """Loss [1, NaN, 3] under mask [1, 0, 1] has mean 2 and a finite gradient."""
    values, offsets = pack([[1.0, math.nan, 3.0]])
    mask = torch.tensor([1, 0, 1]).to(dtype)
    total = of(mode).sum(values.requires_grad_(), mask, offsets)
    (total / of(mode).count(mask, offsets)).backward()
    kept = {"seq-mean-token-sum": 1.0, "seq-mean-token-sum-norm": 1.0 / SCALE}.get(mode, 0.5)
    assert float(total.detach()) / of(mode).count(mask, offsets) == 4.0 * kept
    assert values.grad is not None
    assert values.grad.tolist() == [kept, 0.0, kept]


@pytest.mark.parametrize(
    ("mode", "total", "count"),
    [
        ("token-mean", 5.0, 2.0),
        ("seq-mean-token-mean", 2.5, 1.0),
        ("seq-mean-token-sum", 5.0, 1.0),
        ("seq-mean-token-sum-norm", 5.0, 8.0),
    ],
)
def test_rows_without_a_kept_token_do_not_count(mode: AggregationMode, total: float, count: float) -> None:
    values, offsets = pack([[9.0, 9.0], [], [2.0, 3.0], []])
    mask = torch.tensor([0, 0, 1, 1])
    assert (float(of(mode).sum(values, mask, offsets)), of(mode).count(mask, offsets)) == (total, count)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_at_all_is_a_sum_and_a_count_of_zero(mode: AggregationMode) -> None:
    for rows in ([], [[]], [[1.0, 2.0]]):
        values, offsets = pack(rows)
        mask = torch.zeros(len(values))
        assert (float(of(mode).sum(values, mask, offsets)), of(mode).count(mask, offsets)) == (0.0, 0.0)


tokens = st.lists(st.tuples(st.integers(-8, 8).map(float), st.booleans()), max_size=4)


@given(st.lists(tokens, min_size=1, max_size=5), st.data(), st.sampled_from(MODES))
def test_parts_add_up_and_agree_with_python(
    rows: list[list[tuple[float, bool]]], data: st.DataObject, mode: AggregationMode
) -> None:
    kept = [[value for value, keep in row if keep] for row in rows]
    expected = {
        "token-mean": (sum(map(sum, kept)), sum(map(len, kept))),
        "seq-mean-token-mean": (sum(sum(row) / len(row) for row in kept if row), sum(map(bool, kept))),
        "seq-mean-token-sum": (sum(map(sum, kept)), sum(map(bool, kept))),
        "seq-mean-token-sum-norm": (sum(map(sum, kept)), SCALE * sum(map(bool, kept))),
    }[mode]
    cut = data.draw(st.integers(0, len(rows)))
    found = [0.0, 0.0]
    for part in (rows[:cut], rows[cut:]):
        values, offsets = pack([[value for value, _ in row] for row in part])
        mask = torch.tensor([keep for row in part for _, keep in row], dtype=torch.bool)
        found[0] += float(of(mode).sum(values, mask, offsets))
        found[1] += of(mode).count(mask, offsets)
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_constant_is_required_where_it_divides_and_refused_elsewhere() -> None:
    """A divisor read off the batch would change with its padding or its cut."""
    with pytest.raises(ConfigError, match="needs a scale, no other mode takes one; got seq-mean-token-sum-norm, None"):
        Aggregation("seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match=r"no other mode takes one; got token-mean, 8\.0"):
        Aggregation("token-mean", 8.0)
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match="must be positive"):
            Aggregation("seq-mean-token-sum-norm", scale)


def test_an_unknown_mode_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown aggregation mode 'token_mean'; did you mean 'token-mean'"):
        Aggregation("token_mean")  # type: ignore[arg-type]

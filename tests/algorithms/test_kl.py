"""KL estimators: the table of values and gradients by hand, far from the reference, straight-through, and as a penalty."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from podium.algorithms import KL_ESTIMATORS, kl_estimates, kl_of_rows
from podium.algorithms.kl import LINEAR_BEYOND, is_linearised
from podium.config.schema import KLKind
from podium.errors import ConfigError, DataError
from tests.algorithms.builders import policy_batch

PLAIN = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def value_and_gradient(kind: str, logprob: float, ref: float, dtype: torch.dtype = torch.float64) -> tuple[float, float]:
    """The estimate, and its derivative for the log-prob."""
    leaf = torch.tensor([logprob], dtype=dtype, requires_grad=True)
    found = kl_estimates(kind, leaf, torch.tensor([ref], dtype=dtype))
    found.sum().backward()
    assert leaf.grad is not None
    return float(found.detach()), float(leaf.grad)


@pytest.mark.parametrize(
    ("kinds", "value", "gradient"),
    [
        (("kl", "k1"), 0.5, 1.0),
        (("abs",), 0.5, 1.0),
        (("mse", "k2"), 0.125, 0.5),
        (("low_var_kl", "k3"), math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5)),
    ],
)
def test_the_table(kinds: tuple[str, ...], value: float, gradient: float) -> None:
    """Logp = -1.0, ref = -1.5: 0.5, 0.5, 0.125, 0.10653."""
    for kind in kinds:
        assert value_and_gradient(kind, -1.0, -1.5) == pytest.approx((value, gradient), abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        ("kl", -0.5, 1.0),
        ("abs", 0.5, -1.0),
        ("k2", 0.125, -0.5),
        ("k3", 0.1487212707, 1 - math.exp(0.5)),
        ("kl+", -0.5, -0.5),
        ("abs+", 0.5, -0.5),
        ("k2+", 0.125, -0.5),
        ("k3+", 0.1487212707, -0.5),
    ],
)
def test_on_the_other_side_and_straight_through(kind: str, value: float, gradient: float) -> None:
    """D = ref - logp = 0.5: k3 0.14872 with gradient -0.64872; straight-through the same value with gradient -0.5."""
    assert value_and_gradient(kind, -1.5, -1.0) == pytest.approx((value, gradient), abs=1e-9)


def test_no_estimator_but_k1_pushes_away_from_the_reference() -> None:
    """A step against the gradient moves the log-prob towards the reference, from either side; k1 always pushes down."""
    for kind in set(KL_ESTIMATORS) - {"kl", "k1"}:
        assert value_and_gradient(kind, -2.0, -1.0)[1] < 0 < value_and_gradient(kind, -1.0, -2.0)[1]


@pytest.mark.parametrize("kind", PLAIN)
def test_at_the_reference_all_are_zero_and_with_a_plus_flat(kind: str) -> None:
    assert value_and_gradient(kind, -1.0, -1.0)[0] == 0.0
    assert value_and_gradient(f"{kind}+", -1.0, -1.0) == (0.0, 0.0)


def test_where_the_policy_drifted_the_gradient_lives() -> None:
    """Ref - logp = 3: k3 16.0855 and gradient 1 - e^3, which a clamp of the value at 10 would make 0."""
    assert value_and_gradient("k3", -4.0, -1.0) == pytest.approx((16.0855369, 1 - math.exp(3)), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_off_k3_goes_on_along_its_tangent(dtype: torch.dtype) -> None:
    """Below, nothing needs a clamp: the gradient tends to 1. Above, exp is linear: finite, growing, and never flat."""
    edge = math.exp(LINEAR_BEYOND)
    assert value_and_gradient("k3", 0.0, -100.0, dtype) == pytest.approx((99.0, 1.0), rel=1e-6)
    assert value_and_gradient("k3", -20.0, 0.0, dtype) == pytest.approx((edge - 21, 1 - edge), rel=1e-6)
    assert value_and_gradient("k3", -21.0, 0.0, dtype) == pytest.approx((2 * edge - 22, 1 - edge), rel=1e-6)
    assert value_and_gradient("k3", -1000.0, 0.0, dtype) == pytest.approx((981 * edge - 1001, 1 - edge), rel=1e-6)


def test_where_the_tangent_is_taken_is_reported() -> None:
    logprobs, ref = torch.tensor([-20.0, -20.5, 0.0]), torch.tensor([0.0, 0.0, -99.0])
    for kind in ("k3", "low_var_kl", "k3+"):
        assert is_linearised(kind, logprobs, ref).tolist() == [False, True, False]
    assert not is_linearised("k1", logprobs, ref).any()


def test_small_differences_are_not_lost_in_float32() -> None:
    """e^x - x - 1 at x = 1e-3 is 5.0017e-7; exp(x) - x - 1 in float32 gives 4.77e-7."""
    found = kl_estimates("k3", torch.tensor([-1e-3]), torch.tensor([0.0]))
    assert float(found) == pytest.approx(5.0017e-7, rel=1e-3)


def test_every_documented_name_works_and_the_config_knows_the_same() -> None:
    assert set(get_args(KLKind)) == set(KL_ESTIMATORS)
    assert len(KL_ESTIMATORS) == 14
    for kind in KL_ESTIMATORS:
        assert all(map(math.isfinite, value_and_gradient(kind, -1.0, -3.0)))


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown KL estimator 'low_var_k'; did you mean 'low_var_kl'\?"):
        kl_estimates("low_var_k", torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize(
    ("kind", "expected"), [("kl", [0.5 - 1.0, 0.0, 2.0]), ("abs", [1.5, 0.0, 2.0]), ("k2", [0.625, 0.0, 2.0])]
)
def test_the_penalty_of_a_row_is_the_sum_over_its_kept_tokens(kind: str, expected: list[float]) -> None:
    """What stands under the mask is not read."""
    nan = math.nan
    batch = policy_batch([[1, 0, 1], [0], [1]], [[-1.0, nan, -2.0], [nan], [-1.0]], [[0.0] * 3, [0.0], [0.0]])
    batch.union(policy_batch([[1, 0, 1], [0], [1]], [[-1.5, 0.0, -1.0], [nan], [-3.0]], [[0.0] * 3, [0.0], [0.0]]).select(
        ["old_log_probs"]
    ).rename("old_log_probs", "ref_log_prob"))  # fmt: skip
    for name in (kind, f"{kind}+"):
        assert kl_of_rows(name, batch).tolist() == expected
    with pytest.raises(DataError, match="needs the column 'ref_log_prob'"):
        kl_of_rows(kind, policy_batch([[1]], [[0.0]], [[0.0]]))

"""The terms beside the surrogate: dual clip, KL and entropy, by hand; how they add up; and what they need of rows."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from podium.algorithms import Aggregation, KLTerm, LossSum, PolicyLoss
from podium.errors import ConfigError, DataError
from podium.protocol import DataProto
from tests.algorithms.builders import clipped, outputs, policy_batch

DUAL = clipped(0.2, 0.3, clip_c=3.0)


def with_ref(batch: DataProto, ref: list[list[float]]) -> DataProto:
    mask = [[1] * len(row) for row in ref]
    return batch.union(policy_batch(mask, ref, ref).select(["old_log_probs"]).rename("old_log_probs", "ref_log_prob"))


def run(
    loss: PolicyLoss, logprobs: list[float], batch: DataProto, entropies: list[float] | None = None
) -> tuple[LossSum, list[float], list[float]]:
    """The loss, and the gradients of its sum for each token's log-prob and entropy."""
    leaf = torch.tensor(logprobs, dtype=torch.float64, requires_grad=True)
    other = None if entropies is None else torch.tensor(entropies, dtype=torch.float64, requires_grad=True)
    found = loss(outputs(leaf, other), batch)
    found.total.backward()
    return found, _gradient(leaf), [] if other is None else _gradient(other)


def _gradient(leaf: Tensor) -> list[float]:
    return [0.0] * len(leaf) if leaf.grad is None else leaf.grad.tolist()


# -- dual clip --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        # below 1 - clip_low the usual clip holds, then r A, and above clip_c a constant
        (0.79, -2.0, 1.6, 0.0),
        (1.0, -2.0, 2.0, 2.0),
        (2.99, -2.0, 5.98, 5.98),
        (3.01, -2.0, 6.0, 0.0),
        (50.0, -2.0, 6.0, 0.0),
        # a positive advantage never sees it
        (1.29, 2.0, -2.58, -2.58),
        (50.0, 2.0, -2.6, 0.0),
        (50.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_dual_clip_bounds_the_loss_of_bad_tokens(ratio: float, advantage: float, value: float, gradient: float) -> None:
    found, gradients, _ = run(DUAL, [math.log(ratio) - 1.0], policy_batch([[1]], [[-1.0]], [[advantage]]))
    assert found.terms == {"pg_loss": pytest.approx(value, abs=1e-12)}
    assert gradients == pytest.approx([gradient], abs=1e-12)


def test_the_dual_clip_is_counted_by_itself() -> None:
    ratios = [5.0, 5.0, 0.5, 1.0, 9.0]
    batch = policy_batch([[1, 1, 1, 1, 0]], [[-1.0] * 5], [[-1.0, 1.0, -1.0, -1.0, -1.0]])
    logprobs = [math.log(ratio) - 1.0 for ratio in ratios]
    floats = run(DUAL, logprobs, batch)[0].metrics.to_floats()
    assert (floats["pg_clipfrac_lower"], floats["pg_clipfrac"]) == (0.25, 0.5)
    assert "pg_clipfrac_lower" not in run(clipped(0.2, 0.3), logprobs, batch)[0].metrics


@pytest.mark.parametrize("clip_c", [1.0, 0.5, math.nan])
def test_a_dual_clip_of_one_or_less_is_refused(clip_c: float) -> None:
    with pytest.raises(ValidationError, match="clip_c"):
        clipped(0.2, 0.3, clip_c=clip_c)


# -- KL and entropy ---------------------------------------------------------------------------------------------------


def test_all_terms_by_hand() -> None:
    """Token-mean over three kept tokens at ratio 1: A = 2, 1, -1; k2 of 0.5, 1, 0 is 0.125, 0.5, 0; entropies 1, 2, 4."""
    batch = with_ref(
        policy_batch([[1, 0], [1, 1]], [[-1.0, 0.0], [-1.0, -2.0]], [[2.0, 9.0], [1.0, -1.0]]), [[-1.5, 7.0], [0.0, -2.0]]
    )
    loss = clipped(0.2, 0.3, kl=KLTerm(0.1, "k2"), entropy_coeff=0.01)
    found, gradients, entropy_gradients = run(loss, [-1.0, -5.0, -1.0, -2.0], batch, [1.0, 50.0, 2.0, 4.0])
    assert found.terms == pytest.approx({"pg_loss": -2.0, "entropy_loss": 7.0, "kl_loss": 0.625})
    assert found.count == 3.0
    assert float(found.total.detach()) == pytest.approx(-2.0 + 0.1 * 0.625 - 0.01 * 7.0)
    assert gradients == pytest.approx([-2.0 + 0.1 * 0.5, 0.0, -1.0 - 0.1 * 1.0, 1.0])
    assert entropy_gradients == pytest.approx([-0.01, 0.0, -0.01, -0.01])
    assert found.metrics.to_floats()["entropy"] == pytest.approx(7 / 3)


@pytest.mark.parametrize(
    ("aggregation", "pg", "kl", "entropy"),
    [
        (Aggregation(), -2.0 / 3, 0.625 / 3, 7.0 / 3),
        (Aggregation("seq-mean-token-mean"), (-2.0 + 0.0) / 2, (0.125 + 0.25) / 2, (1.0 + 3.0) / 2),
        (Aggregation("seq-mean-token-sum"), -2.0 / 2, 0.625 / 2, 7.0 / 2),
        (Aggregation("seq-mean-token-sum-norm", 8.0), -2.0 / 16, 0.625 / 16, 7.0 / 16),
    ],
)
def test_all_terms_are_aggregated_alike(aggregation: Aggregation, pg: float, kl: float, entropy: float) -> None:
    """Also entropy and KL, which once had a divisor of their own."""
    batch = with_ref(
        policy_batch([[1, 0], [1, 1]], [[-1.0, 0.0], [-1.0, -2.0]], [[2.0, 9.0], [1.0, -1.0]]), [[-1.5, 7.0], [0.0, -2.0]]
    )
    loss = clipped(0.2, 0.3, aggregation, kl=KLTerm(0.1, "k2"), entropy_coeff=0.01)
    found, _, _ = run(loss, [-1.0, -5.0, -1.0, -2.0], batch, [1.0, 50.0, 2.0, 4.0])
    terms = {name: value / found.count for name, value in found.terms.items()}
    assert terms == pytest.approx({"pg_loss": pg, "entropy_loss": entropy, "kl_loss": kl})
    assert float(found.total.detach()) / found.count == pytest.approx(pg + 0.1 * kl - 0.01 * entropy)


def test_the_signs_of_the_terms() -> None:
    """Against the gradient: the entropy rises, and log-probs go towards the reference."""
    batch = with_ref(policy_batch([[1, 1]], [[-1.0, -1.0]], [[0.0, 0.0]]), [[-2.0, -0.5]])
    loss = clipped(0.2, 0.3, kl=KLTerm(1.0), entropy_coeff=1.0)
    _, (above, below), entropies = run(loss, [-1.0, -1.0], batch, [1.0, 1.0])
    assert below < 0 < above
    assert entropies == [-1.0, -1.0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_under_the_mask_is_not_read(poison: float) -> None:
    """Reference log-probs, log-probs and entropies."""
    loss = clipped(0.2, 0.3, clip_c=3.0, kl=KLTerm(0.5, "k3"), entropy_coeff=0.1)
    found, gradients, entropy_gradients = run(
        loss, [-1.0, poison], with_ref(policy_batch([[1, 0]], [[-1.5, poison]], [[1.0, poison]]), [[-2.0, poison]]), [1.0, poison]
    )
    clean, expected, _ = run(loss, [-1.0], with_ref(policy_batch([[1]], [[-1.5]], [[1.0]]), [[-2.0]]), [1.0])
    assert (gradients, entropy_gradients) == ([*expected, 0.0], [-0.1, 0.0])
    assert (float(found.total.detach()), found.terms, found.metrics) == (float(clean.total.detach()), clean.terms, clean.metrics)


def test_a_coefficient_of_zero_reports_and_changes_nothing() -> None:
    batch = with_ref(policy_batch([[1, 1]], [[-1.0, -1.0]], [[1.0, -1.0]]), [[-math.inf, -1.0]])
    loss = clipped(0.2, 0.3, kl=KLTerm(0.0, "k1"), calculate_entropy=True)
    found, gradients, entropies = run(loss, [-1.0, -1.2], batch, [1.0, 3.0])
    plain, expected, _ = run(clipped(0.2, 0.3), [-1.0, -1.2], batch)
    assert (float(found.total.detach()), gradients) == (float(plain.total.detach()), expected)
    assert entropies == [0.0, 0.0]
    assert (found.terms["kl_loss"], found.metrics["entropy"].value) == (math.inf, 2.0)
    assert "entropy_loss" not in found.terms


def test_tokens_beyond_the_formula_are_counted() -> None:
    """Where k3 goes on along its tangent."""
    batch = with_ref(policy_batch([[1, 1, 1, 0]], [[-1.0] * 4], [[0.0] * 4]), [[-1.0, 25.0, -99.0, 99.0]])
    found, gradients, _ = run(clipped(0.2, 0.3, kl=KLTerm(1.0)), [-1.0, -1.0, -1.0, -1.0], batch)
    assert found.metrics["kl_clipfrac"].value == pytest.approx(1 / 3)
    assert gradients[1] < -1e8


# -- what the loss needs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (clipped(0.2, 0.3), ("log_probs",)),
        (clipped(0.2, 0.3, calculate_entropy=True), ("log_probs", "entropies")),
        (clipped(0.2, 0.3, entropy_coeff=0.1), ("log_probs", "entropies")),
    ],
)
def test_entropies_are_asked_for_only_where_they_are_used(loss: PolicyLoss, expected: tuple[str, ...]) -> None:
    assert loss.outputs == expected
    if "entropies" in expected:
        with pytest.raises(DataError, match="the loss reads the output 'entropies' of the model, got log_probs"):
            loss(outputs(torch.zeros(1)), policy_batch([[1]], [[0.0]], [[0.0]]))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (clipped(0.2, 0.3, drop_zero_advantage=True, clip_c=3.0), [False, True]),
        (clipped(0.2, 0.3, drop_zero_advantage=True, calculate_entropy=True), [False, True]),
        (clipped(0.2, 0.3, drop_zero_advantage=True, kl=KLTerm(0.0)), [True, True]),
        (clipped(0.2, 0.3, drop_zero_advantage=True, kl=KLTerm(0.1)), [True, True]),
        (clipped(0.2, 0.3, drop_zero_advantage=True, entropy_coeff=0.1), [True, True]),
    ],
)
def test_rows_of_zero_advantage_are_kept_where_another_term_concerns_them(loss: PolicyLoss, expected: list[bool]) -> None:
    """They have a gradient then, or a term that is only reported would be too small."""
    batch = with_ref(policy_batch([[1], [1]], [[-1.0], [-1.0]], [[0.0], [1.0]]), [[-2.0], [-2.0]])
    assert loss.is_needed(batch).tolist() == expected
    _, gradients, entropies = run(loss, [-1.0, -1.0], batch, [1.0, 1.0])
    if gradients[0] != 0 or entropies[0] != 0:
        assert expected[0]


def test_metrics_are_the_same_whether_or_not_rows_were_dropped() -> None:
    """An engine computes one such row where nothing else is left, and on as many ranks as that holds for."""
    batch = policy_batch([[1, 1], [1, 0]], [[-1.0, -2.0], [-1.0, 0.0]], [[0.0, 0.0], [-2.0, -2.0]])
    loss = clipped(0.2, 0.3, drop_zero_advantage=True, clip_c=1.5, calculate_entropy=True)
    whole, _, _ = run(loss, [-5.0, -9.0, -0.5, -7.0], batch, [1.0, 2.0, 3.0, 4.0])
    part, _, _ = run(loss, [-0.5, -7.0], batch[[1]], [3.0, 4.0])
    assert whole.metrics == part.metrics
    assert whole.terms == part.terms
    assert whole.metrics.to_floats() == pytest.approx(
        {"pg_clipfrac": 0.0, "pg_clipfrac_lower": 1.0, "ppo_kl": -0.5, "log_ratio_abs_max": 0.5, "entropy": 3.0}
    )
    nothing, _, _ = run(loss, [-5.0, -9.0], batch[[0]], [1.0, 2.0])
    assert nothing.metrics.to_floats() == {"log_ratio_abs_max": 0.0}


def test_a_reference_that_is_missing_is_named() -> None:
    with pytest.raises(DataError, match="the loss needs the column 'ref_log_prob'"):
        run(clipped(0.2, 0.3, kl=KLTerm(0.1)), [-1.0], policy_batch([[1]], [[-1.0]], [[0.0]]))


def test_an_unknown_estimator_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="unknown KL estimator 'k4'"):
        KLTerm(0.1, "k4")


def test_the_loss_pickles() -> None:
    loss = clipped(*(0.2, 0.3, Aggregation("seq-mean-token-sum-norm", 8.0)), clip_c=3.0, entropy_coeff=0.1, kl=KLTerm(0.1, "k3+"))
    assert pickle.loads(pickle.dumps(loss)) == loss


def test_no_rows_are_a_loss_of_zero_with_a_graph() -> None:
    loss = clipped(0.2, 0.3, clip_c=3.0, kl=KLTerm(0.1), entropy_coeff=0.1)
    leaf = torch.empty(0, requires_grad=True)
    found = loss(outputs(leaf, leaf * 2), with_ref(policy_batch([], [], []), []))
    found.total.backward()
    assert (float(found.total.detach()), found.count, found.metrics.to_floats()) == (0.0, 0.0, {"log_ratio_abs_max": 0.0})

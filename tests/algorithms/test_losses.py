"""Losses by hand: values and gradients on both sides of each clip edge, masks, metrics, and which rows are needed."""

from __future__ import annotations

import math
import pickle
from typing import get_args

import pytest
import torch
from torch import Tensor

from podium.algorithms import Aggregation, KLTerm, LossSum, PolicyLoss, SFTLoss
from podium.algorithms.aggregation import AggregationMode
from podium.errors import DataError
from podium.protocol import DataProto
from tests.algorithms.builders import clipped, outputs, policy_batch

LOSS = clipped(0.2, 0.3)


def run(loss: PolicyLoss | SFTLoss, logprobs: list[float] | Tensor, batch: DataProto) -> tuple[LossSum, list[float]]:
    """The loss and the gradient of its sum for each token's log-prob."""
    leaf = torch.as_tensor(logprobs, dtype=torch.float64).clone().requires_grad_()
    found = loss(outputs(leaf), batch)
    found.total.backward()
    assert leaf.grad is not None
    return found, leaf.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient"),
    [
        # a positive advantage pushes up, until the ratio is above 1 + clip_high
        (1.0, 2.0, -2.0, -2.0),
        (1.29, 2.0, -2.58, -2.58),
        (1.31, 2.0, -2.6, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.79, 2.0, -1.58, -1.58),
        # a negative one pushes down, until the ratio is below 1 - clip_low
        (1.0, -2.0, 2.0, 2.0),
        (0.81, -2.0, 1.62, 1.62),
        (0.79, -2.0, 1.6, 0.0),
        (1.31, -2.0, 2.62, 2.62),
        (4.0, -2.0, 8.0, 8.0),
        (1.7, 0.0, 0.0, 0.0),
    ],
)
def test_values_and_gradients_around_the_clip_edges(ratio: float, advantage: float, value: float, gradient: float) -> None:
    """-min(r A, clip(r, 0.8, 1.3) A); its derivative for the log-prob is -r A, or 0 where the clip holds."""
    found, gradients = run(LOSS, [math.log(ratio) - 1.0], policy_batch([[1]], [[-1.0]], [[advantage]]))
    assert float(found.total.detach()) == pytest.approx(value, abs=1e-12)
    assert gradients == pytest.approx([gradient], abs=1e-12)
    assert found.count == 1.0
    assert found.terms == {"pg_loss": pytest.approx(value, abs=1e-12)}


def test_a_step_against_the_gradient_makes_good_tokens_likelier() -> None:
    _, (good, bad) = run(LOSS, [-1.0, -1.0], policy_batch([[1, 1]], [[-1.0, -1.0]], [[0.5, -0.5]]))
    assert good < 0 < bad


@pytest.mark.parametrize(
    ("mode", "value", "gradient"),
    [
        ("token-mean", -4.0 / 3, [-2 / 3, 0.0, -1 / 3, -1 / 3]),
        ("seq-mean-token-mean", -1.5, [-1.0, 0.0, -1 / 4, -1 / 4]),
        ("seq-mean-token-sum", -2.0, [-1.0, 0.0, -1 / 2, -1 / 2]),
    ],
)
def test_two_rows_in_each_mode(mode: AggregationMode, value: float, gradient: list[float]) -> None:
    """Advantages 2 and 1, all ratios 1, one token masked; loss and gradient of sum over count."""
    batch = policy_batch([[1, 0], [1, 1]], [[-1.0, -5.0], [-1.0, -2.0]], [[2.0, 2.0], [1.0, 1.0]])
    found, gradients = run(clipped(0.2, 0.3, Aggregation(mode)), [-1.0, -3.0, -1.0, -2.0], batch)
    assert float(found.total.detach()) / found.count == pytest.approx(value, abs=1e-12)
    assert [item / found.count for item in gradients] == pytest.approx(gradient, abs=1e-12)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, -1e9])
def test_masked_tokens_may_hold_anything(poison: float) -> None:
    """Old log-probs and advantages under a zero mask touch neither the loss, nor its gradient, nor a metric."""
    clean, gradients = run(LOSS, [-1.0, -2.0], policy_batch([[1, 0]], [[-1.5, 0.0]], [[1.0, 0.0]]))
    for batch in (policy_batch([[1, 0]], [[-1.5, poison]], [[1.0, 0.0]]), policy_batch([[1, 0]], [[-1.5, 0.0]], [[1.0, poison]])):
        found, poisoned = run(LOSS, [-1.0, -2.0], batch)
        assert poisoned == gradients
        assert (float(found.total.detach()), found.count, found.metrics) == (float(clean.total.detach()), 1.0, clean.metrics)


def test_metrics_are_means_over_kept_tokens() -> None:
    ratios = [1.5, 1.5, 0.5, 1.0, 9.0]
    batch = policy_batch([[1, 1, 1, 1, 0]], [[-1.0] * 5], [[1.0, -1.0, -1.0, 1.0, 1.0]])
    found, _ = run(LOSS, [math.log(ratio) - 1.0 for ratio in ratios], batch)
    floats = found.metrics.to_floats()
    assert floats["pg_clipfrac"] == 0.5  # the first and the third: elsewhere the clip does not hold
    assert floats["ppo_kl"] == pytest.approx(-(2 * math.log(1.5) + math.log(0.5)) / 4)
    assert floats["log_ratio_abs_max"] == pytest.approx(math.log(2.0))


def test_no_kept_tokens_is_a_loss_of_zero_with_a_graph() -> None:
    """An all-zero mask."""
    found, gradients = run(LOSS, [-1.0, -2.0], policy_batch([[0, 0]], [[0.0, math.nan]], [[1.0, math.nan]]))
    assert (float(found.total.detach()), found.count, gradients) == (0.0, 0.0, [0.0, 0.0])
    assert found.metrics.to_floats() == {"log_ratio_abs_max": 0.0}
    empty = LOSS(outputs(torch.empty(0)), policy_batch([], [], []))
    assert (float(empty.total), empty.count) == (0.0, 0.0)


def test_rows_of_zero_advantage_need_no_computing_only_when_they_may_be_dropped() -> None:
    batch = policy_batch([[1], [1, 1], [], [1]], [[0.0], [0.0, 0.0], [], [0.0]], [[0.0], [0.0, -1.0], [], [2.0]])
    assert LOSS.is_needed(batch).tolist() == [True] * 4
    dropping = clipped(0.2, 0.3, drop_zero_advantage=True)
    assert dropping.is_needed(batch).tolist() == [False, True, False, True]
    assert dropping.is_needed(policy_batch([[1]], [[0.0]], [[0.0]])).tolist() == [False]
    assert dropping.count(batch) == LOSS.count(batch) == 4.0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_dropped_row_has_zero_gradient_and_adds_to_the_count(mode: AggregationMode) -> None:
    batch = policy_batch([[1, 1], [1]], [[-1.0, -2.0], [-3.0]], [[0.0, 0.0], [1.5]])
    loss = clipped(0.2, 0.3, Aggregation(mode), drop_zero_advantage=True)
    whole, gradients = run(loss, [-1.5, -2.5, -3.0], batch)
    needed = loss.is_needed(batch)
    part, part_gradients = run(loss, [-3.0], batch[needed])
    assert gradients == [0.0, 0.0, *part_gradients]
    assert float(whole.total.detach()) == float(part.total.detach())
    assert part.count + loss.count(batch[~needed]) == loss.count(batch) == whole.count


def test_likelihood_of_the_kept_tokens() -> None:
    """SFT: the sum of -log p over kept tokens; each has gradient -1, whatever stands under the mask."""
    batch = policy_batch([[1, 0], [1], []], [[0.0, 0.0], [0.0], []], [[0.0, 0.0], [0.0], []]).select(
        ["responses", "response_mask"]
    )
    found, gradients = run(SFTLoss(), [-0.5, math.nan, -1.5], batch)
    assert (float(found.total.detach()), found.count, SFTLoss().count(batch)) == (2.0, 2.0, 2.0)
    assert gradients == [-1.0, 0.0, -1.0]
    assert found.terms == {"loss": 2.0}
    assert SFTLoss().is_needed(batch).tolist() == [True] * 3


@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("cut", [[4], [2, 2], [1, 3], [1, 1, 1, 1]])
def test_the_loss_is_the_same_in_however_many_micro_batches(mode: AggregationMode, cut: list[int]) -> None:
    """Four rows at ratio 1 with advantages 1, 2, 3, -2 have the loss -1, also in four parts, and not -4."""
    loss = clipped(0.2, 0.3, Aggregation(mode, 1.0 if mode == "seq-mean-token-sum-norm" else None))
    advantages = [1.0, 2.0, 3.0, -2.0]
    batch = policy_batch([[1]] * 4, [[-1.0]] * 4, [[advantage] for advantage in advantages])
    count, value, gradients, start = loss.count(batch), 0.0, list[float](), 0
    for size in cut:
        found, part = run(loss, [-1.0] * size, batch[start : start + size])
        value, start = value + float(found.total.detach()) / count, start + size
        gradients += [gradient / count for gradient in part]
    assert value == -1.0
    assert gradients == [-advantage / 4 for advantage in advantages]


def test_an_advantage_reaches_each_stretch_of_own_tokens_and_nothing_between_them() -> None:
    """Three steps of one trajectory, each elsewhere in the row; the tokens between them are not the policy's."""
    mask = [0, 1, 1, 0, 0, 1, 0, 1, 0]
    found, gradients = run(LOSS, [-1.0] * 9, policy_batch([mask], [[-1.0] * 9], [[2.0] * 9]))
    assert gradients == [-2.0 * own for own in mask]
    assert (found.count, float(found.total.detach())) == (4.0, -8.0)


@pytest.mark.parametrize("key", ["response_mask", "old_log_probs", "advantages"])
def test_a_column_of_other_lengths_or_none_is_named(key: str) -> None:
    """Three tokens either way, so the sums would go through, with the numbers of one row taken for another's."""
    good, other = (policy_batch(mask, mask, mask) for mask in ([[1, 1], [1]], [[1], [1, 1]]))
    taken = good.pop([key])
    with pytest.raises(DataError, match=rf"the loss needs the column '{key}'; there are: .*responses"):
        LOSS(outputs(torch.zeros(3)), good)
    good.union(other.select([key]))
    with pytest.raises(DataError, match=f"row 0 of column '{key}' must have 2 tokens as in 'responses', got 1"):
        LOSS(outputs(torch.zeros(3)), good)
    assert len(taken) == 2


def test_a_dense_column_of_more_than_one_value_a_row_is_refused() -> None:
    batch = policy_batch([[1, 1], [1]], [[0.0, 0.0], [0.0]], [[1.0, 1.0], [1.0]])
    batch.batch["advantages"] = torch.zeros(2, 3)
    with pytest.raises(
        DataError, match=r"column 'advantages' must be \[B\] or jagged \[B, \*\], got a dense one of shape \[2, 3\]"
    ):
        LOSS(outputs(torch.zeros(3)), batch)


@pytest.mark.parametrize("key", ["response_mask", "old_log_probs", "ref_log_prob"])
def test_one_number_a_row_is_not_taken_for_that_of_each_token(key: str) -> None:
    """A row's log-prob is the sum of its tokens'."""
    batch = policy_batch([[1, 1], [1]], [[0.0, 0.0], [0.0]], [[1.0, 1.0], [1.0]])
    batch.batch["ref_log_prob"] = batch.batch["old_log_probs"]
    batch.batch[key] = torch.zeros(2)
    loss = clipped(0.1, 0.2, kl=KLTerm(0.1))
    with pytest.raises(DataError, match=rf"column '{key}' must be jagged \[B, \*\], got a dense one of shape \[2\]"):
        loss(outputs(torch.zeros(3)), batch)


def test_losses_pickle_and_do_not_share_their_defaults() -> None:
    for loss in (LOSS, SFTLoss(), clipped(0.1, 0.2, Aggregation("seq-mean-token-sum"), drop_zero_advantage=True)):
        assert pickle.loads(pickle.dumps(loss)) == loss
    first, second = LossSum(torch.zeros(()), 1.0, {}), LossSum(torch.zeros(()), 1.0, {})
    assert first.metrics is not second.metrics


@pytest.mark.parametrize("advantage", [2.0, 0.0, -2.0])
def test_a_ratio_beyond_float32_leaves_the_gradient_finite(advantage: float) -> None:
    """exp(100) overflows float32, and inf times a zero gradient would be NaN; beyond the clamp the ratio is constant."""
    leaf = torch.tensor([99.0], requires_grad=True)
    found = LOSS(outputs(leaf), policy_batch([[1]], [[-1.0]], [[advantage]], dtype=torch.float32))
    found.total.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0]
    expected = -min(advantage * math.exp(20), advantage * 1.3)
    assert float(found.total.detach()) == pytest.approx(expected, rel=1e-5)

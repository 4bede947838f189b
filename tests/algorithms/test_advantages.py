"""GRPO and RLOO: by hand, against numpy, and exactly zero where all rewards of a group are equal."""

from __future__ import annotations

import math
import statistics
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.algorithms import GRPO, RLOO, group_ids
from podium.config import GRPOConfig
from podium.errors import DataError
from tests.algorithms.builders import rewarded


def grpo_advantages(
    scores: torch.Tensor, groups: torch.Tensor, is_scored: torch.Tensor | None = None, *, norm_by_std: bool = True
) -> torch.Tensor:
    found = GRPO(GRPOConfig(norm_by_std=norm_by_std))(rewarded(scores, groups, is_scored))
    assert found.returns is None
    return found.advantages.float()


def test_two_groups_by_hand() -> None:
    """Scores 0, 1, 2: mean 1, unbiased deviation 1. Scores 3, 5: mean 4, deviation sqrt(2)."""
    found = grpo_advantages(torch.tensor([0.0, 1.0, 2.0, 3.0, 5.0]), torch.tensor([0, 0, 0, 1, 1]))
    assert found.dtype == torch.float32
    root = math.sqrt(2)
    assert found.tolist() == pytest.approx([-1, 0, 1, -1 / root, 1 / root], abs=2e-6)


def test_without_the_deviation_scores_are_only_centred() -> None:
    """Dr.GRPO."""
    found = grpo_advantages(torch.tensor([0.0, 1.0, 5.0]), torch.tensor([0, 0, 0]), norm_by_std=False)
    assert found.tolist() == [-2.0, -1.0, 3.0]


def test_groups_need_not_be_neighbours_and_are_those_of_the_uid() -> None:
    """Rows shuffled as u0, u1, u0, u1; two prompts of the same text have different uids and stay apart."""
    groups = group_ids(["u0", "u1", "u0", "u1"])
    assert groups.tolist() == [0, 1, 0, 1]
    assert grpo_advantages(torch.tensor([1.0, 10.0, 3.0, 30.0]), groups, norm_by_std=False).tolist() == [-1.0, -10.0, 1.0, 10.0]
    assert group_ids([]).tolist() == []


@pytest.mark.parametrize("reward", [0.1, 0.7, 1000.1, -1e30, 1e-30, 0.0])
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_rewards_give_exactly_zero(reward: float, norm_by_std: bool) -> None:
    """seven equal float32 rewards, whose float32 mean is not exactly the reward."""
    scores = torch.full((7,), reward)
    assert grpo_advantages(scores, torch.zeros(7, dtype=torch.int64), norm_by_std=norm_by_std).tolist() == [0.0] * 7


def test_rewards_that_differ_by_rounding_do_not_spike() -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit; the better one is not a success to learn from."""
    scores = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert grpo_advantages(scores, torch.zeros(3, dtype=torch.int64)).abs().max() < 1e-9


def test_a_group_of_one_and_no_rows() -> None:
    assert grpo_advantages(torch.tensor([5.0, 1.0, 2.0]), torch.tensor([0, 1, 1]))[0] == 0.0
    assert grpo_advantages(torch.empty(0), torch.empty(0, dtype=torch.int64)).shape == (0,)


def test_group_numbers_may_have_gaps() -> None:
    assert grpo_advantages(torch.tensor([1.0, 3.0]), torch.tensor([4, 4]), norm_by_std=False).tolist() == [-1.0, 1.0]


def scalar_advantage(row: int, scores: list[float], groups: list[int], *, norm_by_std: bool) -> float:
    """The advantage of one row, as one reads the formula."""
    own = [score for score, group in zip(scores, groups, strict=True) if group == groups[row]]
    if len(set(own)) == 1:
        return 0.0
    centred = scores[row] - statistics.mean(own)
    return centred / (statistics.stdev(own) + 1e-6) if norm_by_std else centred


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize(
    ("scores", "groups"),
    [
        ([1.0, 2.0, 6.0], [0, 0, 0]),
        ([5.0], [0]),
        ([1.0, 9.0, 2.0, 6.0], [0, 1, 0, 0]),  # three and one, not side by side
        ([9.0, 1.0, 8.0, 2.0, 6.0], [1, 0, 2, 0, 0]),
    ],
)
def test_a_group_of_one_has_no_advantage_however_it_is_computed(
    scores: list[float], groups: list[int], norm_by_std: bool
) -> None:
    """The vectorised form agrees with a scalar one, groups of one included."""
    found = grpo_advantages(torch.tensor(scores), torch.tensor(groups), norm_by_std=norm_by_std)
    expected = [scalar_advantage(row, scores, groups, norm_by_std=norm_by_std) for row in range(len(scores))]
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 5).map(lambda number: number / 8)), min_size=1, max_size=12))
def test_against_numpy(rows: list[tuple[str, float]]) -> None:
    scores, groups = np.array([score for _, score in rows]), np.array([uid for uid, _ in rows])
    expected = np.zeros(len(rows))
    for uid in set(groups):
        own = scores[groups == uid]
        if len(own) > 1:
            expected[groups == uid] = (own - own.mean()) / (own.std(ddof=1) + 1e-6)
    found = grpo_advantages(torch.tensor(scores), group_ids(list(groups)))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("score", [0.0, 9.0, math.nan])
def test_rows_without_a_score_are_in_no_group(norm_by_std: bool, score: float) -> None:
    """A reward that failed does not count as 0: the others' baseline is that of the rows which have one."""
    groups = torch.tensor([0, 1, 0, 1, 0])
    scores, is_scored = torch.tensor([1.0, 2.0, score, score, 3.0]), torch.tensor([True, True, False, False, True])
    found = grpo_advantages(scores, groups, is_scored, norm_by_std=norm_by_std)
    alone = grpo_advantages(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), norm_by_std=norm_by_std)
    assert found.tolist() == [float(alone[0]), 0.0, 0.0, 0.0, float(alone[1])]
    assert torch.equal(grpo_advantages(scores.nan_to_num(), groups, torch.zeros(5, dtype=torch.bool)), torch.zeros(5))


def test_a_row_without_a_uid_is_refused() -> None:
    """It would share its baseline with every other such row."""
    with pytest.raises(DataError, match="the uid of row 1 is None"):
        group_ids(["a", None, "b", None])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), min_size=1, max_size=10), st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(rows: list[tuple[str, bool]], random: Random) -> None:
    """Groups by uid only, wherever the rows stand."""
    order = list(range(len(rows)))
    random.shuffle(order)
    uids, scores = [uid for uid, _ in rows], torch.tensor([float(score) for _, score in rows])
    found = grpo_advantages(scores, group_ids(uids))
    moved = grpo_advantages(scores[order], group_ids([uids[row] for row in order]))
    torch.testing.assert_close(moved, found[order])


def test_rloo_by_hand() -> None:
    """Rewards 0, 1, 5: the means of the others are 3, 2.5 and 0.5. Rows that do not count change no mean; equal ones give 0."""
    scores, groups = torch.tensor([0.0, 1.0, 5.0, 2.0, 9.0, 2.0, 7.0]), torch.tensor([0, 0, 0, 1, 1, 1, 2])
    is_counted = torch.tensor([True, True, True, True, False, True, True])
    found = RLOO()(rewarded(scores, groups, is_counted)).advantages
    assert found.tolist() == pytest.approx([-3.0, -1.5, 4.5, 0.0, 0.0, 0.0, 0.0])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-5, 5).map(lambda number: number / 8)), min_size=1, max_size=12))
def test_rloo_is_the_reward_minus_the_mean_of_the_other_rewards(rows: list[tuple[str, float]]) -> None:
    found = RLOO()(rewarded(torch.tensor([score for _, score in rows]), group_ids([uid for uid, _ in rows]))).advantages
    for place, (uid, score) in enumerate(rows):
        others = [other for row, (name, other) in enumerate(rows) if name == uid and row != place]
        assert float(found[place]) == pytest.approx(score - statistics.mean(others) if others else 0.0, abs=1e-12)

"""REINFORCE as the surrogate of the policy loss."""

from __future__ import annotations

import math

import pytest
import torch

from podium.algorithms import PolicyLoss, Reinforce
from tests.algorithms.builders import outputs, policy_batch


def test_the_loss_is_minus_advantage_times_log_prob() -> None:
    """Tokens at log-probs -1, -2 with advantages 3, -1; the third is masked and holds infinities."""
    batch = policy_batch([[1, 1, 0]], [[-1.5, -2.0, -math.inf]], [[3.0, -1.0, math.inf]])
    leaf = torch.tensor([-1.0, -2.0, -math.inf], dtype=torch.float64, requires_grad=True)
    found = PolicyLoss(Reinforce())(outputs(leaf), batch)
    found.total.backward()
    assert leaf.grad is not None
    assert (float(found.total.detach()), found.count, leaf.grad.tolist()) == (3.0 - 2.0, 2.0, [-3.0, 1.0, 0.0])
    assert found.metrics.to_floats() == pytest.approx({"ppo_kl": -0.25, "log_ratio_abs_max": 0.5})

"""REINFORCE as the surrogate of the policy loss, and what a surrogate may return."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from podium.algorithms import PolicyLoss, PolicyTokens, Reinforce, Surrogate
from podium.errors import DataError
from podium.observability import Metrics
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


class Wrong(Surrogate):
    """A surrogate that returns what it is made with."""

    answer: ClassVar[Callable[[PolicyTokens], Any]]

    def __call__(self, tokens: PolicyTokens) -> Any:
        return type(self).answer(tokens)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda tokens: -tokens.logprobs_N, r"Wrong must return \(losses, Metrics\), got a Tensor"),
        (
            lambda tokens: (-tokens.logprobs_N[:, None], Metrics()),
            r"of shape \[3\], one for each .*, got \[3, 1\]; do not reduce",
        ),
        (lambda tokens: (-tokens.logprobs_N.sum(), Metrics()), r"losses of shape \[3\], one for each response token, got \[\]"),
        (lambda tokens: (-tokens.logprobs_N.detach(), Metrics()), "must return losses that depend on tokens.logprobs_N"),
        (lambda tokens: (-tokens.logprobs_N, {"gain": 0.5}), "must return typed metrics, got 'gain': 0.5; write tokens.mean"),
    ],
)
def test_an_answer_of_a_surrogate_that_is_not_a_loss_for_each_token_is_refused(answer: Any, message: str) -> None:
    batch = policy_batch([[1, 1, 0]], [[-1.5, -2.0, -1.0]], [[3.0, -1.0, 0.0]])
    Wrong.answer = staticmethod(answer)
    leaf = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    with pytest.raises(DataError, match=message):
        PolicyLoss(Wrong())(outputs(leaf), batch)

"""Log-probs and entropies in one pass: values, gradients, extreme logits, and independence of the blocks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from podium.algorithms import entropy as module
from podium.algorithms import logprobs_and_entropies


def plain(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_softmax = logits.log_softmax(-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def example(dtype: torch.dtype = torch.float64, rows: int = 7) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, 11, generator=rng, dtype=torch.float64).to(dtype)
    return logits.requires_grad_(), torch.randint(0, 11, (rows,), generator=rng)


def test_by_hand() -> None:
    """Two equal logits: ln 2, and flat. Probabilities 1/4 and 3/4: 0.562335, and -p (log p + H) is +-0.205991."""
    logits = torch.tensor([[5.0, 5.0], [0.0, math.log(3)]], dtype=torch.float64, requires_grad=True)
    logprobs, entropies = logprobs_and_entropies(logits, torch.tensor([0, 1]))
    entropies.sum().backward()
    assert logprobs.tolist() == pytest.approx([-math.log(2), math.log(0.75)], abs=1e-12)
    assert entropies.tolist() == pytest.approx([math.log(2), 0.25 * math.log(4) + 0.75 * math.log(4 / 3)], abs=1e-12)
    assert logits.grad is not None
    assert logits.grad.flatten().tolist() == pytest.approx([0.0, 0.0, 0.2059898, -0.2059898], abs=1e-6)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (1.3, -0.7)])
@pytest.mark.parametrize("block", [1, 22, 2**22])
def test_gradients_are_those_of_plain_autograd(weights: tuple[float, float], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_NUMBERS", block)
    found = []
    for function in (plain, logprobs_and_entropies):
        logits, targets = example()
        values = function(logits, targets)
        scale = torch.arange(1.0, 8.0, dtype=torch.float64)
        sum(weight * (scale * value).sum() for weight, value in zip(weights, values, strict=True)).backward()  # type: ignore[union-attr]
        assert logits.grad is not None
        found.append((torch.stack(values).detach(), logits.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-13)


def test_against_finite_differences() -> None:
    logits, targets = example(rows=3)
    assert torch.autograd.gradcheck(lambda leaf: logprobs_and_entropies(leaf, targets), (logits,))


def test_one_output_alone_may_be_used() -> None:
    for number in (0, 1):
        logits, targets = example()
        logprobs_and_entropies(logits, targets)[number].sum().backward()
        expected, _ = example()
        plain(expected, targets)[number].sum().backward()
        assert logits.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(logits.grad, expected.grad, rtol=0, atol=1e-13)


def test_float32_log_probs_and_their_gradient_are_cross_entropys_to_the_last_bit() -> None:
    """So that reporting the entropy does not change a run."""
    scale = torch.linspace(-2, 3, 7)
    logits, targets = example(torch.float32)
    logprobs, _ = logprobs_and_entropies(logits, targets)
    (logprobs * scale).sum().backward()
    other, _ = example(torch.float32)
    expected = -torch.nn.functional.cross_entropy(other, targets, reduction="none")
    (expected * scale).sum().backward()
    assert torch.equal(logprobs, expected)
    assert logits.grad is not None
    assert other.grad is not None
    assert torch.equal(logits.grad, other.grad)


def test_tokens_that_are_ruled_out_add_nothing() -> None:
    """A logit of -inf, or one so low that its probability is 0 in float32."""
    for low in (-math.inf, -1e4):
        logits = torch.tensor([[0.0, 0.0, low]], requires_grad=True)
        logprobs, entropies = logprobs_and_entropies(logits, torch.tensor([0]))
        (logprobs + entropies).sum().backward()
        assert entropies.tolist() == pytest.approx([math.log(2)], abs=1e-6)
        assert logits.grad is not None
        assert logits.grad.flatten().tolist() == pytest.approx([0.5, -0.5, 0.0], abs=1e-6)


def test_no_tokens_keep_a_graph() -> None:
    logits = torch.empty(0, 5, requires_grad=True)
    logprobs, entropies = logprobs_and_entropies(logits, torch.empty(0, dtype=torch.int64))
    (logprobs.sum() + entropies.sum()).backward()
    assert logits.grad is not None
    assert logits.grad.shape == (0, 5)


def test_only_the_logits_are_kept_for_the_way_back() -> None:
    """Plain autograd keeps three tensors of their size."""
    logits, targets = example()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):  # type: ignore[func-returns-value]
        logprobs_and_entropies(logits, targets)
    assert sum(tensor.numel() for tensor in kept) <= logits.numel() + len(logits)

"""Drawing against values worked out by hand, and streams that depend on their request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from podium.config.schema import SamplingConfig
from podium.errors import DataError
from podium.rollout.sampling import draw, inverse_cdf, kept_probs, uniforms

PROBS = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)
HALF = torch.tensor([0.5], dtype=torch.float64)


def drawn(logits: torch.Tensor, num_draws: int, **settings: float) -> torch.Tensor:
    """Tokens for evenly spread uniform numbers: what a stream draws in the long run, without its noise."""
    uniform = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    return draw(logits.expand(num_draws, -1), uniform, SamplingConfig(**settings))[0]


def test_log_probs_are_of_the_logits_over_the_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    uniform = torch.zeros(1, dtype=torch.float64)
    token, logprob = draw(logits, uniform, SamplingConfig(temperature=0.5))
    assert token.item() == 0
    assert logprob.item() == pytest.approx(-0.1429, abs=1e-4)
    assert draw(logits, uniform, SamplingConfig(temperature=1.0))[1].item() == pytest.approx(-0.4076, abs=1e-4)
    assert draw(logits, uniform, SamplingConfig(temperature=0.0))[1].item() == pytest.approx(-0.4076, abs=1e-4)
    assert logits.tolist() == [[2.0, 1.0, 0.0]]


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 0.1}, {"top_k": 2, "top_p": 0.9}])
def test_log_probs_are_taken_before_the_filters(settings: dict[str, float]) -> None:
    token, logprob = draw(PROBS.log(), HALF * 0, SamplingConfig(**settings))
    assert token.item() == 1
    assert logprob.item() == pytest.approx(np.log(0.4), abs=1e-12)


def test_filters_by_hand() -> None:
    def kept(**settings: float) -> dict[int, float]:
        probs, order = kept_probs(PROBS, top_k=int(settings.get("top_k", 0)), top_p=settings.get("top_p", 1.0))
        return {token: round(p, 9) for token, p in zip(order[0].tolist(), probs[0].tolist(), strict=True) if p}

    assert kept(top_k=2) == {1: 0.4, 3: 0.3}
    assert kept(top_k=9) == kept() == {1: 0.4, 3: 0.3, 2: 0.2, 0: 0.1}
    assert kept(top_p=0.39) == {1: 0.4}
    assert kept(top_p=0.65) == {1: 0.4, 3: 0.3}
    assert kept(top_p=0.75) == {1: 0.4, 3: 0.3, 2: 0.2}
    # Of the two that top-k leaves, the first holds 4/7 = 0.571 of the mass.
    assert kept(top_k=2, top_p=0.57) == {1: 0.4}
    assert kept(top_k=2, top_p=0.58) == {1: 0.4, 3: 0.3}


def test_top_k_keeps_exactly_k_of_equals_the_lowest_ids() -> None:
    assert set(drawn(torch.zeros(1, 6), 60, top_k=2).tolist()) == {0, 1}


def test_shares_of_the_draws() -> None:
    assert torch.bincount(drawn(PROBS.log(), 1000), minlength=4).tolist() == [100, 400, 200, 300]
    assert torch.bincount(drawn(PROBS.log(), 700, top_k=2), minlength=4).tolist() == [0, 400, 0, 300]
    # Temperature 0.5 squares the probabilities: 1, 16, 4, 9 of 30.
    assert torch.bincount(drawn(PROBS.log(), 300, temperature=0.5), minlength=4).tolist() == [10, 160, 40, 90]


def test_streams_fit_the_distribution() -> None:
    """Chi-square over 4000 real streams; with 3 degrees of freedom 16.3 is passed once in a thousand seeds."""
    uniform = uniforms([(f"uid-{i}", 0) for i in range(4000)], seed=1, step=2, count=1)[:, 0]
    counts = torch.bincount(draw(PROBS.log().expand(4000, -1), uniform, SamplingConfig())[0], minlength=4)
    expected = PROBS[0] * 4000
    assert ((counts - expected) ** 2 / expected).sum() < 16.3


def test_impossible_tokens_are_never_drawn() -> None:
    edges = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    weights = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0], dtype=torch.float64).expand(5, -1)
    assert inverse_cdf(weights, edges).tolist() == [1, 3, 4, 4, 4]
    random = torch.rand(2000, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    random[random < 0.9] = 0
    random[:, 7] += 1e-3
    tokens = inverse_cdf(random / random.sum(-1, keepdim=True), torch.full((2000,), 1 - 2**-53, dtype=torch.float64))
    assert bool((random.gather(1, tokens[:, None]) > 0).all())


def test_greedy_takes_the_first_of_equals() -> None:
    assert draw(torch.tensor([[1.0, 3.0, 3.0]]), HALF, SamplingConfig(temperature=0.0))[0].item() == 1


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(17, 11, generator=torch.Generator().manual_seed(0))
    uniform = uniforms([("a", i) for i in range(17)], seed=0, step=0, count=1)[:, 0]
    whole = draw(logits, uniform, SamplingConfig(top_p=0.9))
    monkeypatch.setattr("podium.rollout.sampling._SLICE_ELEMENTS", 25)
    sliced = draw(logits, uniform, SamplingConfig(top_p=0.9))
    assert torch.equal(whole[0], sliced[0])
    assert torch.equal(whole[1], sliced[1])


def test_bfloat16_logits_give_float32_log_probs() -> None:
    assert draw(PROBS.log().bfloat16(), HALF, SamplingConfig())[1].dtype == torch.float32


def test_a_stream_depends_on_its_request_alone() -> None:
    requests = [("a", 0), ("a", 1), ("b", 0)]
    together = uniforms(requests, seed=3, step=4, count=5)
    assert together.dtype == torch.float64
    assert torch.equal(uniforms(requests[::-1], seed=3, step=4, count=5).flip(0), together)
    assert torch.equal(uniforms(requests[2:], seed=3, step=4, count=9)[0, :5], together[2])
    others = [uniforms([("a", 0)], seed=seed, step=step, count=5)[0] for seed, step in ((4, 4), (3, 5))]
    assert len({tuple(row.tolist()) for row in (*together, *others)}) == 5


def test_a_stream_is_numpys_philox() -> None:
    """The quick way of setting the generator's state gives what a new Philox gives; pinned, since runs are resumed by it."""
    import hashlib

    key = int.from_bytes(hashlib.blake2b(b"(3, 4, 'a', 1)", digest_size=16).digest(), "little")
    fresh = np.random.Generator(np.random.Philox(key=key)).random(6)
    assert uniforms([("b", 0), ("a", 1)], seed=3, step=4, count=6)[1].tolist() == fresh.tolist()


def test_no_requests_give_no_streams() -> None:
    assert uniforms([], seed=0, step=0, count=3).shape == (0, 3)


@pytest.mark.parametrize("integer", [np.int64, np.uint8, np.int32, torch.tensor])
def test_an_integer_keys_the_same_stream_whatever_its_type(integer: Callable[[int], Any]) -> None:
    expected = uniforms([("u", 1)], seed=3, step=4, count=5)
    found = uniforms([(np.str_("u"), integer(1))], seed=integer(3), step=integer(4), count=5)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("wrong", [4.0, np.float64(4), True, np.True_, torch.tensor(4.0), "4", None])
@pytest.mark.parametrize("name", ["seed", "step", "sample index"])
def test_a_key_that_is_not_an_integer_is_refused(name: str, wrong: Any) -> None:
    keys = {"seed": 3, "step": 4, "sample index": 0} | {name: wrong}
    with pytest.raises(DataError, match=f"{name} must be a whole number, got"):
        uniforms([("u", keys["sample index"])], seed=keys["seed"], step=keys["step"], count=5)

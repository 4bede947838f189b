"""The whole policy loss through the engine: one update for every micro-batch size and layout, in every mode with every term."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from podium.algorithms import Aggregation, KLTerm, Outputs, PolicyLoss
from podium.algorithms.aggregation import AggregationMode
from podium.config import FSDP2Config
from podium.engines.fsdp2 import FSDP2Engine
from podium.errors import EngineError
from podium.protocol import DataProto
from podium.protocol.jagged import jagged, parts
from tests.algorithms.builders import clipped, outputs
from tests.engines.builders import (
    LENGTHS,
    LOSS,
    Layout,
    batch_of,
    bigram,
    engine_of,
    fsdp2,
    has_no_gradients,
    largest_difference,
    model_of,
    token_batch,
    weights_of,
)

AGGREGATIONS = {
    mode: Aggregation(mode, 8.0 if mode == "seq-mean-token-sum-norm" else None)
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
}
TERMS = {
    "plain": {},
    "kl": {"kl": KLTerm(0.3, "low_var_kl")},
    "kl straight-through": {"kl": KLTerm(0.3, "k3+")},
    "entropy": {"entropy_coeff": 0.2},
    "dual clip": {"clip_c": 1.2},
    "drop": {"drop_zero_advantage": True, "calculate_entropy": True},
    "all": {"kl": KLTerm(0.3, "k2"), "entropy_coeff": 0.2, "clip_c": 1.2, "drop_zero_advantage": True},
}
CUTS: tuple[tuple[Layout, int], ...] = (
    ("bucketed", 8),
    ("bucketed", 64),
    ("packed", 8),
    ("packed", 64),
    ("shared", 64),
    ("auto", 16),
)


def batch_with_ref() -> DataProto:
    """Half of the rows without advantage; reference log-probs on both sides of the policy's."""
    batch = batch_of(advantages=[1.0, 0.0, -2.0, 0.0, 0.0, -3.0])
    old, offsets = parts(batch.batch["old_log_probs"])
    noise = torch.rand(len(old), generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return batch.union(DataProto({"ref_log_prob": jagged(old + noise - 0.5, offsets)}))


def plain_outputs(model: nn.Module, batch: DataProto, temperature: float = 1.0) -> Outputs:
    """Log-probs and entropies, by one forward pass of each row alone and with plain autograd."""
    logprobs, entropies = [], []
    for input_ids, response in zip(batch.batch["input_ids"].unbind(), batch.batch["responses"].unbind(), strict=True):
        logits = model(input_ids=input_ids[None], use_cache=False).logits[0, len(input_ids) - len(response) - 1 : -1]
        log_softmax = (logits / temperature).log_softmax(-1)
        logprobs.append(log_softmax.gather(1, response[:, None])[:, 0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return outputs(torch.cat(logprobs), torch.cat(entropies))


def plain_update(batch: DataProto, loss: PolicyLoss, temperature: float) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights and numbers of one update, row by row, with torch's own loop and no micro-batches."""
    model = model_of("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.0)
    found = loss(plain_outputs(model, batch, temperature), batch)
    (found.total / found.count).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    numbers = {name: value / found.count for name, value in found.terms.items()} | found.metrics.to_floats()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, numbers | {"grad_norm": norm}


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_the_update_does_not_depend_on_how_it_is_cut(mode: AggregationMode, terms: str) -> None:
    """G1, G2, G5: weights, gradient norm, every term and every metric, in float64 to 1e-10."""
    batch, loss = batch_with_ref(), clipped(0.1, 0.1, AGGREGATIONS[mode], **TERMS[terms])  # type: ignore[arg-type]
    expected, numbers = plain_update(batch, loss, 0.8)
    for layout, budget in CUTS:
        engine = engine_of("llama", layout=layout, budget=budget)
        metrics = engine.train_batch(batch, loss, temperature=0.8).to_floats()
        found = weights_of(engine)
        assert largest_difference({name: found[name] for name in expected}, expected) <= 1e-10
        assert {name: metrics[name] for name in numbers} == pytest.approx(numbers, rel=1e-10, abs=1e-12)


def test_one_advantage_a_row_gives_the_bits_of_the_same_one_for_each_token() -> None:
    batch = batch_with_ref()
    rows = batch.select([key for key in batch.batch if key != "advantages"])
    rows.union(DataProto({"advantages": torch.tensor([1.0, 0.0, -2.0, 0.0, 0.0, -3.0], dtype=torch.float64)}))
    for terms in TERMS.values():
        loss, found = clipped(0.1, 0.1, **terms), []  # type: ignore[arg-type]
        for one in (batch, rows):
            engine = engine_of("llama", budget=16)
            found.append((engine.train_batch(one, loss).to_floats(), weights_of(engine)))
        assert found[0][0] == found[1][0]
        assert largest_difference(found[0][1], found[1][1]) == 0.0


def test_the_terms_are_all_at_work_in_that_batch() -> None:
    """Otherwise the test above would show nothing: each changes the update, but for dropping."""
    updates = {terms: plain_update(batch_with_ref(), clipped(0.1, 0.1, **TERMS[terms]), 0.8)[0] for terms in TERMS}  # type: ignore[arg-type]
    for terms, update in updates.items():
        difference = largest_difference(update, updates["plain"])
        assert (difference == 0.0) if terms in ("plain", "drop") else (difference > 1e-6), terms


def test_the_entropy_is_that_of_the_rows_in_their_order() -> None:
    """Rows of 5, 1, 4 and 2 tokens whose entropy is 0, ln 2, ln 3 and ln 4; only one row is kept at a time."""
    table = [[0.0 if column <= row else -1e9 for column in range(6)] for row in range(6)]
    batch = token_batch([[row] for row in range(4)], [[row] * length for row, length in enumerate((5, 1, 4, 2))])
    mask, offsets = parts(batch.batch["response_mask"])
    zeros = jagged(torch.zeros(len(mask), dtype=torch.float64), offsets)
    for row in range(4):
        kept = torch.zeros_like(mask)
        kept[offsets[row] : offsets[row + 1]] = 1
        columns = {"response_mask": jagged(kept, offsets), "old_log_probs": zeros, "advantages": zeros}
        one = batch.select(["input_ids", "responses"]).union(DataProto(columns))
        for layout in ("bucketed", "packed"):
            engine = engine_of(bigram(table), layout=layout, budget=6)  # type: ignore[arg-type]
            metrics = engine.train_batch(one, clipped(0.2, 0.2, calculate_entropy=True)).to_floats()
            assert metrics["entropy"] == pytest.approx(math.log(row + 1), abs=1e-12)


def test_reporting_the_entropy_changes_no_bit_of_the_update() -> None:
    found = []
    for loss in (LOSS, clipped(0.2, 0.3, calculate_entropy=True)):
        engine = engine_of(model_of("llama", torch.float32))
        engine.train_batch(batch_of(), loss)
        found.append(weights_of(engine))
    assert largest_difference(*found) == 0.0


def test_an_entropy_bonus_raises_the_entropy_and_a_kl_term_leads_back() -> None:
    def entropy(engine: FSDP2Engine) -> float:
        with torch.no_grad():
            entropies = plain_outputs(engine.model, batch_of())["entropies"]
        assert entropies is not None
        return float(entropies.mean())

    engine = engine_of("llama", lr=1e-3)
    before = entropy(engine)
    batch = batch_of(advantages=[0.0] * 6)
    for _ in range(5):
        engine.train_batch(batch, clipped(0.2, 0.3, entropy_coeff=1.0))
    assert entropy(engine) > before

    engine = engine_of("llama", lr=1e-3)
    reference = engine.infer_batch(batch).rename("log_probs", "ref_log_prob")
    engine.train_batch(batch_of(), LOSS)
    batch.union(reference)
    kl = [engine.train_batch(batch, clipped(0.2, 0.3, kl=KLTerm(1.0))).to_floats()["kl_loss"] for _ in range(10)]
    assert kl[0] > 2 * kl[-1] > 0


# -- forward only -----------------------------------------------------------------------------------------------------


def test_a_forward_only_engine_infers_and_neither_trains_nor_saves() -> None:
    engine = fsdp2(model_of("llama"), FSDP2Config(max_tokens_per_micro_batch=64))
    expected = engine_of("llama").infer_batch(batch_of()).batch["log_probs"]
    assert torch.equal(parts(engine.infer_batch(batch_of(LENGTHS)).batch["log_probs"])[0], parts(expected)[0])
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
    for use in (lambda: engine.train_batch(batch_of(), LOSS), engine.state):
        with pytest.raises(EngineError, match="a forward-only engine"):
            use()
    assert has_no_gradients(engine)
    assert engine.version == 0

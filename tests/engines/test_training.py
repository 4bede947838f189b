"""Optimizer steps: the same update for every budget and layout, nothing left behind, and updates that must not happen."""

from __future__ import annotations

import copy
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from podium.algorithms import Aggregation, Loss, LossSum, Outputs, SFTLoss
from podium.algorithms.aggregation import AggregationMode
from podium.engines.base import MAX_SKIPPED_UPDATES
from podium.engines.fsdp2 import FSDP2Engine
from podium.errors import DataError, EngineError
from podium.protocol import DataProto
from podium.protocol.jagged import jagged, parts
from tests.algorithms.builders import clipped, outputs
from tests.engines.builders import (
    LOSS,
    SIZES,
    Layout,
    Miscounting,
    Scaled,
    Shifted,
    Weighted,
    batch_of,
    bigram,
    engine_of,
    has_no_gradients,
    largest_difference,
    model_of,
    plain_log_probs,
    state_of,
    token_batch,
    weights_of,
)

CUTS: tuple[tuple[Layout, int], ...] = (
    ("bucketed", 8),
    ("bucketed", 20),
    ("bucketed", 64),
    ("packed", 8),
    ("packed", 64),
    ("shared", 8),
    ("shared", 64),
    ("auto", 16),
)
MODES: tuple[AggregationMode, ...] = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")
DROPPING = clipped(0.2, 0.3, drop_zero_advantage=True)


def trained(
    name: str, batch: DataProto, loss: Loss, *, steps: int = 1, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    engine = engine_of(name, **settings)
    for _ in range(steps):
        metrics = engine.train_batch(batch, loss)
    return weights_of(engine), metrics.to_floats()


def plain_update(name: str, batch: DataProto, loss: Loss, temperature: float = 1.0) -> tuple[dict[str, Tensor], float]:
    """Weights and gradient norm of one update, row by row, with torch's own loop and no micro-batches."""
    model = model_of(name).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, weight_decay=0.0)
    total = loss(outputs(torch.cat(plain_log_probs(model, batch, temperature))), batch).total / loss.count(batch)
    total.backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, norm


# -- however it is cut ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("loss", [SFTLoss(), *(clipped(0.2, 0.3, Aggregation(mode)) for mode in MODES)], ids=["sft", *MODES])
def test_the_update_is_that_of_a_plain_loop(name: str, loss: Loss) -> None:
    """G1, G2: loss, gradient norm and every parameter, for six ways to cut the mini-batch."""
    batch = batch_of()
    expected, norm = plain_update(name, batch, loss)
    with torch.no_grad():
        whole = loss(outputs(torch.cat(plain_log_probs(model_of(name).train(), batch))), batch)
    for layout, budget in CUTS:
        weights, metrics = trained(name, batch, loss, layout=layout, budget=budget)
        assert largest_difference({key: weights[key] for key in expected}, expected) <= 1e-10
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-10)
        for term, value in whole.terms.items():
            assert metrics[term] == pytest.approx(value / whole.count, rel=1e-10)
        for term, value in whole.metrics.to_floats().items():
            assert metrics[term] == pytest.approx(value, rel=1e-10, abs=1e-12)


def test_temperature_reaches_the_gradient() -> None:
    """The same as dividing the logits in a plain loop."""
    expected, norm = plain_update("llama", batch_of(), LOSS, temperature=0.7)
    for layout, budget in CUTS:
        engine = engine_of("llama", layout=layout, budget=budget)
        metrics = engine.train_batch(batch_of(), LOSS, temperature=0.7).to_floats()
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-10)
        assert largest_difference({key: weights_of(engine)[key] for key in expected}, expected) <= 1e-10


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 1.75), ("seq-mean-token-mean", 2.5), ("seq-mean-token-sum", 3.5)])
def test_the_numbers_of_the_report(mode: AggregationMode, expected: float) -> None:
    """G1, G2: token losses [4] and [1, 1, 1], here by advantages -4 and -1 at ratio 1, in one micro-batch or two."""
    batch = token_batch([[0], [0]], [[1], [1, 1, 1]])
    offsets = parts(batch.batch["responses"])[1]
    batch.union(DataProto({"advantages": jagged(torch.tensor([-4.0, -1.0, -1.0, -1.0], dtype=torch.float64), offsets)}))
    for budget in (8, 4):
        engine = engine_of(bigram([[0.0, 1.0], [1.0, 0.0]]), budget=budget, layout="bucketed")
        sample = batch.clone().union(engine.infer_batch(batch).rename("log_probs", "old_log_probs"))
        metrics = engine.train_batch(sample, clipped(0.2, 0.2, Aggregation(mode))).to_floats()
        assert metrics["pg_loss"] == pytest.approx(expected, abs=1e-12)


def test_a_step_makes_good_responses_likelier_and_bad_ones_less_likely() -> None:
    engine, batch = engine_of("llama", lr=1e-3), batch_of([(2, 3), (2, 3)], advantages=[1.0, -1.0])
    before = engine.infer_batch(batch)
    batch.pop(["old_log_probs"])
    engine.train_batch(batch.union(engine.infer_batch(batch).rename("log_probs", "old_log_probs")), LOSS)
    (good_before, bad_before), (good, bad) = (data.batch["log_probs"].unbind() for data in (before, engine.infer_batch(batch)))
    assert good.sum() > good_before.sum()
    assert bad.sum() < bad_before.sum()


# -- rows that need no computing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("advantages", [[1.0, 0.0, -2.0, 0.0, 0.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0, -1.0], [0.0] * 6])
def test_dropping_rows_of_zero_advantage_changes_no_update(advantages: list[float]) -> None:
    """Also where all are zero: the optimizer's moments decay and move the parameters, as with a gradient of zero."""
    first, second = batch_of(), batch_of(advantages=advantages, seed=1)
    found = []
    for loss in (LOSS, DROPPING):
        engine = engine_of("llama", weight_decay=0.1, budget=16)
        engine.train_batch(first, loss)
        metrics = engine.train_batch(second, loss).to_floats()
        tensors, numbers = state_of(engine)
        found.append((tensors, numbers, metrics["pg_loss"], metrics["grad_norm"], metrics["skipped_updates"]))
    assert largest_difference(found[0][0], found[1][0]) <= 1e-10
    assert found[0][1] == found[1][1] == {"version": 2, "skipped_in_a_row": 0}
    assert found[0][2:] == pytest.approx(found[1][2:], abs=1e-12)


def test_dropped_rows_are_not_computed() -> None:
    engine, seen = engine_of("llama", layout="bucketed"), []
    engine.model.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True)
    engine.train_batch(batch_of(advantages=[0.0, 1.0, 0.0, 0.0, 0.0, 1.0]), DROPPING)
    assert sum(seen) == 2


# -- nothing left behind ----------------------------------------------------------------------------------------------


class Watching(SFTLoss):
    """Keeps weak references to everything of a micro-batch that has a graph."""

    def __init__(self) -> None:
        object.__setattr__(self, "refs", [])

    def __call__(self, outputs: Outputs, batch: DataProto) -> LossSum:
        part = super().__call__(outputs, batch)
        self.refs.extend(map(weakref.ref, (outputs["log_probs"], part.total)))  # type: ignore[attr-defined]
        return part


def watch_logits(engine: FSDP2Engine, refs: list[weakref.ref[Tensor]]) -> RemovableHandle:
    return engine.model.register_forward_hook(lambda _, __, output: refs.append(weakref.ref(output.logits)))


@pytest.mark.parametrize("layout", ["bucketed", "packed", "shared"])
def test_no_graph_is_alive_when_the_next_micro_batch_starts(layout: Layout) -> None:
    """Eight micro-batches; at the start of each, logits, log-probs and losses of those before are gone."""
    engine, loss = engine_of("llama", layout=layout, budget=7), Watching()
    engine.infer_batch(batch_of([(3, 4)]))  # the trial of packing is over
    refs: list[weakref.ref[Tensor]] = loss.refs  # type: ignore[attr-defined]
    alive: list[int] = []
    engine.model.register_forward_pre_hook(lambda *_: alive.append(sum(ref() is not None for ref in refs)))
    watch_logits(engine, refs)
    engine.train_batch(batch_of([(3, 4)] * 8), loss)
    assert alive == [0] * 8
    assert len(refs) == 24
    assert not any(ref() is not None for ref in refs)


def test_gradients_are_gone_after_a_step_and_after_an_error() -> None:
    engine = engine_of("llama", budget=8)
    engine.train_batch(batch_of(), LOSS)
    assert has_no_gradients(engine)
    before = weights_of(engine)
    with pytest.raises(EngineError):
        engine.train_batch(batch_of(), Miscounting())
    assert has_no_gradients(engine)
    assert largest_difference(before, weights_of(engine)) == 0.0
    assert engine.version == 1


def test_gradients_of_an_update_that_failed_half_way_are_not_in_the_next_one() -> None:
    found = []
    for fails in (True, False):
        engine = engine_of("llama", budget=8)
        if fails:
            with pytest.raises(DataError, match="needs the column 'old_log_probs'"):
                engine.train_batch(batch_of().select(["input_ids", "responses", "response_mask", "advantages"]), LOSS)
        engine.train_batch(batch_of(), LOSS)
        found.append(weights_of(engine))
    assert largest_difference(*found) == 0.0


def test_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine_of(bigram([[0.0, 1.0], [1.0, 0.0]])).train_batch(token_batch([[0]], [[1, 1]]), SFTLoss())
    assert torch.equal(torch.rand(3), expected)


# -- counts -----------------------------------------------------------------------------------------------------------


def test_a_loss_that_miscounts_is_refused_with_both_numbers() -> None:
    batch = token_batch([[1, 2]], [[3, 4, 5]])
    with pytest.raises(EngineError, match=r"Miscounting\.count gives 3.0 .* add up to 4.0"):
        engine_of("llama").train_batch(batch, Miscounting())


@pytest.mark.parametrize("weight", [0.1, 0.01, 3.0])
def test_counts_may_be_fractions(weight: float) -> None:
    """Their sums depend on the order of adding, and a count below one divides like any other."""
    batch = batch_of([(2, 2)] * 7)
    found = [trained("llama", batch, Weighted(weight), budget=budget, layout="bucketed", clip_grad=1e9) for budget in (4, 12, 64)]
    assert all(largest_difference(found[0][0], weights) <= 1e-10 for weights, _ in found)
    model = model_of("llama")
    loss = SFTLoss()(outputs(torch.cat(plain_log_probs(model, batch))), batch).total / (weight * 7)
    loss.backward()
    norm = float(nn.utils.get_total_norm([parameter.grad for parameter in model.parameters() if parameter.grad is not None]))
    for _, metrics in found:
        assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-10)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-10)


# -- updates that must not happen -------------------------------------------------------------------------------------


def masked_out(batch: DataProto) -> DataProto:
    mask, offsets = parts(batch.batch["response_mask"])
    data = batch.select([key for key in batch.batch if key != "response_mask"])
    return data.union(DataProto({"response_mask": jagged(torch.zeros_like(mask), offsets)}))


@pytest.mark.parametrize("loss", [LOSS, DROPPING, SFTLoss(), clipped(0.2, 0.3, Aggregation("seq-mean-token-mean"))])
def test_a_mask_of_zeros_changes_nothing(loss: Loss) -> None:
    """No exception, no change of parameters or optimizer; also for no rows at all."""
    for empty in (masked_out(batch_of()), batch_of()[[]]):
        engine = engine_of("llama", weight_decay=0.1)
        engine.train_batch(batch_of(), LOSS)
        before, _ = state_of(engine)
        metrics = engine.train_batch(empty, loss).to_floats()
        assert largest_difference(before, state_of(engine)[0]) == 0.0
        assert metrics["skipped_updates"] == 1.0
        assert "grad_norm" not in metrics
        assert all(math.isfinite(value) for value in metrics.values())


def test_mini_batches_with_nothing_to_say_are_not_taken_for_a_broken_run() -> None:
    """They do not count as gradients that are not finite, and do not end a row of such gradients."""
    engine = engine_of(bigram([[0.0, 1.0], [1.0, 0.0]]))
    batch = token_batch([[0]], [[1]])
    for _ in range(MAX_SKIPPED_UPDATES + 1):
        engine.train_batch(masked_out(batch), SFTLoss())
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        engine.train_batch(batch, Scaled(math.nan))
    engine.train_batch(masked_out(batch), SFTLoss())
    with pytest.raises(EngineError, match=f"{MAX_SKIPPED_UPDATES} updates in a row the loss or the gradient was not finite"):
        engine.train_batch(batch, Scaled(math.nan))


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_and_the_next_step_is_fine(factor: float) -> None:
    """at step 2; parameters and optimizer as they were, counter 1, step 3 as if step 2 had not been."""
    engine, straight = engine_of("llama", budget=16), engine_of("llama", budget=16)
    for one in (engine, straight):
        one.train_batch(batch_of(), LOSS)
    before, _ = state_of(engine)
    metrics = engine.train_batch(batch_of(), Scaled(factor)).to_floats()
    tensors, numbers = state_of(engine)
    assert largest_difference(before, tensors) == 0.0
    assert (metrics["skipped_updates"], numbers) == (1.0, {"version": 2, "skipped_in_a_row": 1})
    assert has_no_gradients(engine)
    for one in (engine, straight):
        metrics = one.train_batch(batch_of(seed=1), LOSS).to_floats()
    assert metrics["skipped_updates"] == 0.0
    assert largest_difference(weights_of(engine), weights_of(straight)) == 0.0
    assert state_of(engine)[1] == {"version": 3, "skipped_in_a_row": 0}


def test_one_poisoned_micro_batch_of_several_is_enough_to_skip() -> None:
    """whichever comes first."""
    batch = batch_of()
    advantages, offsets = parts(batch.batch["advantages"])
    for token in (0, len(advantages) - 1):
        poisoned = batch.select([key for key in batch.batch if key != "advantages"])
        poisoned.union(DataProto({"advantages": jagged(advantages.index_fill(0, torch.tensor([token]), math.nan), offsets)}))
        poisoned.batch["response_mask"].values().fill_(1)
        engine = engine_of("llama", budget=8)
        before = weights_of(engine)
        assert engine.train_batch(poisoned, LOSS).to_floats()["skipped_updates"] == 1.0
        assert largest_difference(before, weights_of(engine)) == 0.0


def test_a_loss_that_is_not_finite_is_skipped_though_its_gradient_is_finite() -> None:
    engine = engine_of("llama", budget=8)
    before, _ = state_of(engine)
    metrics = engine.train_batch(batch_of(), Shifted(math.nan)).to_floats()
    assert metrics["skipped_updates"] == 1.0
    assert largest_difference(before, state_of(engine)[0]) == 0.0
    assert state_of(engine)[1] == {"version": 1, "skipped_in_a_row": 1}


def test_ten_in_a_row_end_the_run_with_the_parameters_of_before() -> None:
    """N in a row stop with a message; a good one in between starts the count again."""
    engine, batch = engine_of(bigram([[0.0, 1.0], [1.0, 0.0]])), token_batch([[0]], [[1]])
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        engine.train_batch(batch, Scaled(math.nan))
    engine.train_batch(batch, SFTLoss())
    before = weights_of(engine)
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        engine.train_batch(batch, Scaled(math.nan))
    with pytest.raises(EngineError, match=r"10 updates in a row the loss or the gradient was not finite \(norm nan\)"):
        engine.train_batch(batch, Scaled(math.nan))
    assert largest_difference(before, weights_of(engine)) == 0.0


# -- schedule, dropout, state -----------------------------------------------------------------------------------------


def test_the_learning_rate_follows_the_schedule_by_steps_asked_for() -> None:
    engine = engine_of(bigram([[0.0, 1.0], [1.0, 0.0]]), lr=0.5, schedule="linear", warmup_steps=2, total_steps=5)
    batch = token_batch([[0]], [[1]])
    losses = [SFTLoss(), Scaled(math.nan), SFTLoss(), SFTLoss(), SFTLoss(), SFTLoss()]
    assert [engine.train_batch(batch, loss).to_floats()["lr"] for loss in losses] == [0.25, 0.5, 0.5, 0.25, 0.0, 0.0]


def test_clipping_scales_the_gradient_to_the_given_norm() -> None:
    """The norm that is reported is the one before; a clip at twice the norm changes nothing."""
    batch = batch_of()
    free, norm = trained("llama", batch, SFTLoss(), clip_grad=1e9)
    loose, _ = trained("llama", batch, SFTLoss(), clip_grad=2 * norm["grad_norm"])
    tight, clipped = trained("llama", batch, SFTLoss(), clip_grad=1e-6)
    assert largest_difference(free, loose) == 0.0
    assert clipped["grad_norm"] == norm["grad_norm"]
    before = weights_of(engine_of("llama"))
    assert largest_difference(before, tight) < 1e-2 * largest_difference(before, free)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_updates_are_free_of_noise_unless_it_is_asked_for(dtype: torch.dtype) -> None:
    """GPT-2's usual dropout of 0.1 puts the first on-policy ratio off by 0.1 and more; without it the ratio is 1."""
    gaps = []
    for dropout in (False, True):
        engine, batch = engine_of(model_of("gpt2_dropout", dtype), dropout=dropout), batch_of()
        batch.pop(["old_log_probs"])
        batch.union(engine.infer_batch(batch).rename("log_probs", "old_log_probs"))
        gaps.append(engine.train_batch(batch, LOSS).to_floats()["log_ratio_abs_max"])
    assert gaps[0] < 1e-5
    assert gaps[1] > 0.1
    quiet = trained("gpt2_dropout", batch_of(), LOSS)[0]
    assert largest_difference(quiet, trained("gpt2", batch_of(), LOSS)[0]) == 0.0


def test_noise_of_every_kind_is_off_unless_it_is_asked_for() -> None:
    """Whole layers left out (OPT's layerdrop), and the jitter of a router (PhiMoE, Mixtral, Switch)."""
    sizes = SIZES | {"max_position_embeddings": 64}
    configs: list[tf.PretrainedConfig] = [
        tf.OPTConfig(**sizes, ffn_dim=24, word_embed_proj_dim=16, dropout=0.0, layerdrop=0.5, pad_token_id=0),
        tf.MixtralConfig(**sizes, intermediate_size=24, num_key_value_heads=2, num_local_experts=2, router_jitter_noise=0.5),
    ]
    for config in configs:
        torch.manual_seed(0)
        model = tf.AutoModelForCausalLM.from_config(config)
        losses = [
            [engine_of(copy.deepcopy(model), dropout=noisy, seed=seed).train_batch(batch_of(), SFTLoss()) for seed in (0, 1)]
            for noisy in (False, True)
        ]
        assert losses[0][0] == losses[0][1], type(config).__name__
        assert losses[1][0] != losses[1][1], type(config).__name__


def test_dropout_is_on_from_the_first_step_whatever_was_tried_before() -> None:
    """Trying whether the model can be packed runs it in eval mode; the step that it happens in must not notice."""
    found = []
    for tries_first in (True, False):
        engine = engine_of("gpt2_dropout", layout="packed", dropout=True)
        if tries_first:
            engine.infer_batch(batch_of())
        engine.train_batch(batch_of(), LOSS)
        found.append(weights_of(engine))
        assert engine.model.training
    assert largest_difference(*found) == 0.0
    assert largest_difference(found[0], trained("gpt2", batch_of(), LOSS, layout="packed")[0]) > 1e-4


def test_dropout_depends_on_seed_rank_and_step_only() -> None:
    batch = batch_of()
    same = [trained("gpt2_dropout", batch, LOSS, steps=2, seed=3, dropout=True)[0] for _ in range(2)]
    assert largest_difference(*same) == 0.0
    assert largest_difference(same[0], trained("gpt2_dropout", batch, LOSS, steps=2, seed=4, dropout=True)[0]) > 0.0


@pytest.mark.parametrize("seed", [20260923, 2**31, 2**63, -1])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert trained("gpt2_dropout", batch_of(), LOSS, seed=seed, dropout=True)[1]["skipped_updates"] == 0.0


def test_a_seed_of_numpy_is_the_seed_of_that_number() -> None:
    """Its product would overflow where Python's does not."""
    found = [trained("gpt2_dropout", batch_of(), LOSS, seed=seed, dropout=True)[0] for seed in (2**40, np.int64(2**40))]
    assert largest_difference(*found) == 0.0
    with pytest.raises(DataError, match=r"seed must be a whole number, got 1\.0"):
        engine_of("gpt2_dropout", seed=1.0)  # type: ignore[arg-type]

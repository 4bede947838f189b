"""Mixed precision on one rank: bfloat16 passes near float32's, and nothing that lasts in bfloat16. Ranks: test_precision_ranks.

What the tolerances are of: a number rounded to bfloat16 is off by at most 2^-9 = 0.2 % of itself. Measured for whole gradients
(norm of the difference over the norm): 0.5 % from float32's with transformers' usual initialisation, 1.6 % for GPT-2 with
weights 15 times as large; 0.1 % to 0.7 % between two ways to cut one mini-batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from podium.algorithms import PolicyLoss
from podium.checkpoint import load_state, save_state
from podium.config import FSDP2Config, ModelConfig
from podium.engines.fsdp2 import FSDP2Engine
from podium.errors import EngineError
from podium.models import load_model
from podium.protocol.jagged import parts
from podium.weights import copy_weights
from tests.algorithms.builders import clipped
from tests.engines.builders import (
    LOSS,
    Layout,
    Scaled,
    batch_of,
    engine_of,
    fsdp2,
    has_no_gradients,
    largest_difference,
    model_of,
    state_of,
    weights_of,
)
from tests.engines.seen import Seen

FROM_FLOAT32 = {"llama_usual": 1e-2, "gpt2": 3e-2}
BETWEEN_CUTS = 1.5e-2
CUTS: tuple[tuple[Layout, int], ...] = (("bucketed", 8), ("bucketed", 64), ("packed", 64), ("shared", 64), ("auto", 16))
UNCLIPPED = {"clip_grad": 1e9}


def mixed(name: str, **settings: Any) -> FSDP2Engine:
    return engine_of(model_of(name, torch.float32), **{"compute_dtype": "bfloat16", **settings})


def gradient(engine: FSDP2Engine, loss: PolicyLoss = LOSS) -> Tensor:
    """[all parameters] the gradient of a step, by what it leaves in AdamW: 1 - beta1 = 0.1 of it."""
    engine.train_batch(batch_of(), loss)
    return torch.cat([10 * tensor.flatten() for name, tensor in state_of(engine)[0].items() if name.endswith(".exp_avg")])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# -- near float32, however it is cut ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama_usual", "gpt2"])
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.05])
def test_gradients_are_near_those_of_float32_and_of_every_other_cut(name: str, entropy_coeff: float) -> None:
    loss = clipped(0.2, 0.3, entropy_coeff=entropy_coeff)
    expected = gradient(mixed(name, compute_dtype=None, **UNCLIPPED), loss)
    found = [gradient(mixed(name, layout=layout, budget=budget, **UNCLIPPED), loss) for layout, budget in CUTS]
    for cut, one in zip(CUTS, found, strict=True):
        assert 1e-3 < relative(one, expected) < FROM_FLOAT32[name], cut
        assert relative(one, found[0]) < BETWEEN_CUTS, cut


def test_the_gradient_of_a_mini_batch_is_added_up_in_float32() -> None:
    """256 equal micro-batches of one row, each 2^-8 of the whole: exact in float32; a sum in bfloat16 stops growing at half."""
    row = batch_of()[[2]]
    one, many = mixed("llama_usual", budget=5, **UNCLIPPED), mixed("llama_usual", budget=5, **UNCLIPPED)
    one.train_batch(row, LOSS)
    many.train_batch(row[[0] * 256], LOSS)
    alone, summed = (state_of(engine)[0]["optimizer.lm_head.weight.exp_avg"] for engine in (one, many))
    assert relative(summed, alone) < 1e-5


def test_log_probs_are_float32_and_near() -> None:
    expected = parts(engine_of(model_of("llama_usual", torch.float32)).infer_batch(batch_of()).batch["log_probs"])[0]
    engine = mixed("llama_usual")
    found = parts(engine.infer_batch(batch_of()).batch["log_probs"])[0]
    assert found.dtype == torch.float32
    assert 1e-6 < float((found - expected).abs().max()) < 1e-2
    assert not torch.equal(found, found.bfloat16().float())  # log-softmax of the logits was not in bfloat16


def test_the_first_update_on_policy_has_a_ratio_of_one() -> None:
    """F12, within what bfloat16 leaves of it when the two passes are cut alike."""
    batch, engine = batch_of(), mixed("llama_usual")
    batch.pop(["old_log_probs"])
    batch.union(engine.infer_batch(batch).rename("log_probs", "old_log_probs"))
    metrics = engine.train_batch(batch, LOSS).to_floats()
    assert metrics["log_ratio_abs_max"] == 0.0
    assert metrics["pg_clipfrac"] == 0.0


# -- nothing is lost --------------------------------------------------------------------------------------------------


def test_small_updates_reach_the_weights() -> None:
    """50 steps at 1e-6, where AdamW on bfloat16 weights keeps 2.6 % of the change."""
    engines = [mixed("llama_usual", compute_dtype=dtype, lr=1e-6, eps=1e-8, total_steps=50) for dtype in (None, "bfloat16")]
    before = flat(engines[0])
    for step in range(50):
        for engine in engines:
            engine.train_batch(batch_of(seed=step % 3), LOSS)
    expected, found = (flat(engine) - before for engine in engines)
    assert float(found.norm() / expected.norm()) == pytest.approx(1.0, abs=0.01)
    assert relative(found, expected) < 0.03
    assert float((found != 0).float().mean()) > 0.95


def flat(engine: FSDP2Engine) -> Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in engine.model.parameters()])


def test_everything_that_lasts_is_float32_and_every_activation_bfloat16() -> None:
    seen = Seen((engine := mixed("qwen2")).model)
    engine.train_batch(batch_of(), LOSS)
    assert seen.parameters == seen.outputs == seen.gradients == {torch.bfloat16}
    tensors, _ = state_of(engine)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert has_no_gradients(engine)
    engine.infer_batch(batch_of())
    assert {tensor.dtype for _, tensor in engine.named_weights()} == {torch.float32}


def test_the_masters_are_back_after_an_error_and_ties_are_kept() -> None:
    engine = mixed("qwen2")
    masters = list(engine.model.parameters())
    with engine._training():
        assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
        assert engine.model.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="of the loss"), engine._training():
        raise RuntimeError("of the loss")
    assert all(one is other for one, other in zip(engine.model.parameters(), masters, strict=True))
    assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    engine = mixed("llama")
    before = weights_of(engine)
    assert engine.train_batch(batch_of(), Scaled(float("nan"))).to_floats()["skipped_updates"] == 1.0
    assert largest_difference(weights_of(engine), before) == 0.0
    engine.train_batch(batch_of(), LOSS)
    assert largest_difference(weights_of(engine), before) > 0.0


# -- state and weights ------------------------------------------------------------------------------------------------


def test_masters_are_saved_and_sent_to_the_last_bit(tmp_path: Path) -> None:
    """The checkpoint's, the model folder's and a float32 rollout's equal the masters; a bfloat16 rollout's are rounded ones."""
    engine = mixed("qwen2")
    engine.train_batch(batch_of(), LOSS)
    masters = weights_of(engine)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    save_state(tmp_path / "engine", *engine.state())
    saved, _ = load_state(tmp_path / "engine")
    engine.save_hf(str(tmp_path / "hf"))
    published = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").named_parameters())
    rollouts = {dtype: model_of("qwen2", dtype) for dtype in (torch.float32, torch.bfloat16)}
    for dtype, rollout in rollouts.items():
        copy_weights(rollout, engine.named_weights())
        assert all(torch.equal(mine, masters[name].to(dtype)) for name, mine in rollout.named_parameters())
    for name in published:
        assert torch.equal(saved[f"model.{name}"], masters[name])
        assert torch.equal(published[name], masters[name])


def test_a_state_of_float32_goes_on_in_bfloat16_with_the_same_masters() -> None:
    source, target = mixed("llama", compute_dtype=None), mixed("llama")
    source.train_batch(batch_of(), LOSS)
    target.load_state(*source.state())
    assert largest_difference(state_of(source)[0], state_of(target)[0]) == 0.0


def test_a_reference_is_rounded_once_and_agrees_with_the_actor() -> None:
    reference = fsdp2(model_of("llama", torch.float32), FSDP2Config(compute_dtype="bfloat16"))
    assert {parameter.dtype for parameter in reference.model.parameters()} == {torch.bfloat16}
    found, expected = (parts(engine.infer_batch(batch_of()).batch["log_probs"])[0] for engine in (reference, mixed("llama")))
    assert torch.equal(found, expected)


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_a_bfloat16_checkpoint_is_trained_in_float32(tmp_path: Path) -> None:
    """Whatever the folder says of itself; and an engine takes no model that would lose its updates."""
    model_of("llama", torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    engine = engine_of(model, compute_dtype="bfloat16", lr=1e-6)
    engine.train_batch(batch_of(), LOSS)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights_of(engine).values())
    narrow = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"), seed=0)
    with pytest.raises(EngineError, match=r"must be float32 or float64 .* set model.dtype=float32"):
        engine_of(narrow)


class KeepsItsHead(LlamaForCausalLM):  # type: ignore[misc]
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["lm_head"]


def test_a_model_that_needs_float32_somewhere_is_refused() -> None:
    model: PreTrainedModel = KeepsItsHead(model_of("llama").config).float()
    with pytest.raises(EngineError, match=r"KeepsItsHead needs 1 of its parameters in float32 \(lm_head.weight, for one\)"):
        engine_of(model, compute_dtype="bfloat16")
    assert len(engine_of(model).infer_batch(batch_of())) == 6

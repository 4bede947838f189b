"""Log-probs: equal to a plain forward pass of each row, whatever the layout, the budget and the order."""

from __future__ import annotations

import math

import pytest
import torch

from podium.config import FSDP2Config
from podium.errors import DataError, EngineError
from podium.protocol.jagged import parts
from tests.engines.builders import (
    LENGTHS,
    LOSS,
    Layout,
    batch_of,
    bigram,
    engine_of,
    fsdp2,
    model_of,
    plain_log_probs,
    token_batch,
)

LAYOUTS: tuple[Layout, ...] = ("auto", "bucketed", "packed", "shared")
WITHOUT_MASKS = LAYOUTS[:3]
"""For `Bigram`, which takes no mask."""
TABLE = [[2.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 5.0, -2.0]]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equal_to_a_forward_pass_of_each_row_alone(name: str, temperature: float) -> None:
    model, batch = model_of(name), batch_of()
    with torch.no_grad():
        expected = torch.cat(plain_log_probs(model.eval(), batch, temperature))
    for layout in LAYOUTS:
        for budget in (8, 15, 64):
            found = engine_of(model, layout=layout, budget=budget).infer_batch(batch, temperature=temperature).batch["log_probs"]
            torch.testing.assert_close(parts(found)[0], expected, rtol=0, atol=1e-10)
            assert parts(found)[1] is parts(batch.batch["responses"])[1]


@pytest.mark.parametrize("layout", WITHOUT_MASKS)
def test_rows_come_back_in_their_order(layout: Layout) -> None:
    """Lengths 5, 1, 4, 2, of which each micro-batch takes what fits; row r's response is token r all along."""
    table = [[float(row == column) * (row + 1) for column in range(6)] for row in range(6)]
    batch = token_batch([[row] for row in range(4)], [[row] * length for row, length in enumerate((5, 1, 4, 2))])
    found = engine_of(bigram(table), layout=layout, budget=6).infer_batch(batch).batch["log_probs"]
    for row, values in enumerate(found.unbind()):
        expected = row + 1 - math.log(math.exp(row + 1) + 5)
        assert values.tolist() == pytest.approx([expected] * (5, 1, 4, 2)[row], abs=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_another_order_of_rows_gives_the_same_numbers(layout: Layout) -> None:
    """By a permutation of the rows."""
    engine, batch, order = engine_of("llama", layout=layout, budget=12), batch_of(), [4, 2, 0, 5, 1, 3]
    found, moved = engine.infer_batch(batch), engine.infer_batch(batch[order])
    torch.testing.assert_close(parts(moved.batch["log_probs"])[0], parts(found[order].batch["log_probs"])[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("layout", WITHOUT_MASKS)
def test_temperature_divides_the_logits_and_changes_none(layout: Layout) -> None:
    """Logits [2, 1, 0], T = 0.5, token 0: -0.1429, where T = 1 gives -0.4076; the model's own tensors stay."""
    model, batch = bigram(TABLE), token_batch([[0]], [[0]])
    engine = engine_of(model, layout=layout)
    for temperature, expected in ((0.5, -math.log(1 + math.exp(-2) + math.exp(-4))), (1.0, -0.40760596), (0.5, -0.1429316)):
        found = engine.infer_batch(batch, temperature=temperature).batch["log_probs"]
        assert parts(found)[0].tolist() == pytest.approx([expected], abs=1e-6)
    assert model.table.tolist() == TABLE


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_log_probs_are_float32_except_for_a_float64_model(dtype: torch.dtype) -> None:
    engine = fsdp2(model_of("llama", dtype), FSDP2Config())
    found = engine.infer_batch(batch_of()).batch["log_probs"]
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_the_first_update_on_policy_has_a_ratio_of_one(dtype: torch.dtype, tolerance: float, budget: int) -> None:
    """Old log-probs by another budget and layout than the update's; log ratio 0 within rounding, clip fraction 0."""
    for inferring, training in (
        ("bucketed", "bucketed"),
        ("packed", "bucketed"),
        ("bucketed", "packed"),
        ("shared", "bucketed"),
        ("packed", "shared"),
    ):
        batch = batch_of()
        batch.pop(["old_log_probs"])
        old = engine_of(model_of("llama_usual", dtype), layout=inferring, budget=64).infer_batch(batch)
        batch.union(old.rename("log_probs", "old_log_probs"))
        metrics = engine_of(model_of("llama_usual", dtype), layout=training, budget=budget).train_batch(batch, LOSS).to_floats()
        assert metrics["log_ratio_abs_max"] <= tolerance
        assert metrics["pg_clipfrac"] == 0.0


def test_no_rows_and_no_response_tokens() -> None:
    engine, batch = engine_of("llama"), batch_of()
    assert len(engine.infer_batch(batch[[]])) == 0
    only_empty = engine.infer_batch(batch[[4, 4]]).batch["log_probs"]
    assert (len(only_empty), len(parts(only_empty)[0])) == (2, 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_without_a_prompt_is_refused_by_number(layout: Layout) -> None:
    """Nothing predicts its first token; the last logits of the row before, or of the padding, would be taken for it."""
    engine = engine_of("llama", layout=layout)
    for batch in (token_batch([[3], []], [[4], [5, 6]]), token_batch([[3], []], [[4], []])):
        with pytest.raises(DataError, match=r"row 1 must have at least one prompt token .*, got 0"):
            engine.infer_batch(batch)
        with pytest.raises(DataError, match=r"row 1 must have at least one prompt token .*, got 0"):
            engine.train_batch(batch, LOSS)


def test_a_row_above_the_budget_is_refused() -> None:
    """The message has its number, its length and the cap."""
    with pytest.raises(DataError, match=r"row 5 has 8 tokens, more than a micro-batch holds .max_tokens_per_micro_batch=7"):
        engine_of("llama", budget=7).infer_batch(batch_of(LENGTHS))


# -- models that mix packed rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("leak", [1.0, 1e-4])
def test_a_model_that_mixes_packed_rows_is_refused_or_goes_side_by_side(leak: float) -> None:
    """However little it mixes: a leak of 1e-4 is below any tolerance that rounding to bfloat16 needs."""
    model, batch = (
        bigram([[0.3 * row - column for column in range(10)] for row in range(10)], leak),
        token_batch([[0], [2, 3]], [[1, 2], [4]]),
    )
    with pytest.raises(EngineError, match="Bigram mixes rows in the layout packed; use layout=bucketed"):
        engine_of(model, layout="packed").infer_batch(batch)
    with torch.no_grad():
        expected = torch.cat(plain_log_probs(model, batch))
    for layout in ("auto", "bucketed"):
        found = engine_of(model, layout=layout).infer_batch(batch).batch["log_probs"]
        torch.testing.assert_close(parts(found)[0], expected, rtol=0, atol=1e-12)


def test_rows_are_not_packed_for_a_recurrent_model() -> None:
    model, batch = model_of("mamba", torch.float32), batch_of()
    with pytest.raises(EngineError, match="MambaForCausalLM mixes rows"):
        engine_of(model, layout="packed").infer_batch(batch)
    with torch.no_grad():
        expected = torch.cat(plain_log_probs(model.eval(), batch))
    found = engine_of(model, layout="auto").infer_batch(batch).batch["log_probs"]
    torch.testing.assert_close(parts(found)[0], expected, rtol=0, atol=1e-5)


def test_a_model_with_few_tokens_can_be_tried_for_packing() -> None:
    batch = token_batch([[0], [2]], [[1], [0, 2]])
    found = engine_of(bigram(TABLE), layout="packed").infer_batch(batch).batch["log_probs"]
    assert [values.exp().sum().isfinite().item() for values in found.unbind()] == [True, True]


def test_inferring_leaves_the_mode_of_the_model_and_no_graph() -> None:
    for mode in (True, False):
        engine = engine_of("gpt2_dropout")
        engine.model.train(mode)
        found = engine.infer_batch(batch_of()).batch["log_probs"]
        assert engine.model.training is mode
        assert not found.requires_grad


# -- prompts computed once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("budget", [7, 12, 100])
def test_samples_behind_one_prompt_give_what_each_gives_alone(name: str, budget: int) -> None:
    """Rows of three prompts, mixed up, one of them without a response; a prompt that begins like another is not the same."""
    prompts = [[5, 6, 7], [5, 6], [5, 6, 7], [9], [5, 6, 7], [5, 6], [5, 6, 7]]
    batch = token_batch(prompts, [[3], [4, 8], [3, 3, 2], [7], [], [1], [8, 3]])
    model = model_of(name)
    with torch.no_grad():
        expected = torch.cat(plain_log_probs(model, batch))
    engine = engine_of(model, layout="shared", budget=budget)
    assert all(micro.layout == "shared" for micro in engine._plan(batch))
    found = engine.infer_batch(batch).batch["log_probs"]
    torch.testing.assert_close(parts(found)[0], expected, rtol=0, atol=1e-10)


def test_many_samples_of_a_prompt_share_it_when_nothing_is_said() -> None:
    prompt = list(range(3, 15))
    batch = token_batch([prompt] * 16, [[1, 2]] * 16)
    micros = engine_of("llama", layout="auto", budget=200)._plan(batch)
    assert {micro.layout for micro in micros} == {"shared"}
    assert sorted(row for micro in micros for row in micro.rows.tolist()) == list(range(16))

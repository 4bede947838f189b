"""State: what is loaded continues to the last bit as if nothing had happened; what does not fit is named and not loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from podium.checkpoint import load_state, save_state
from podium.config import FSDP2Config, OptimConfig
from podium.errors import EngineError
from tests.engines.builders import LOSS, Scaled, batch_of, engine_of, fsdp2, largest_difference, model_of, state_of, weights_of

SETTINGS = {"schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "total_steps": 8}


@pytest.mark.parametrize("name", ["gpt2_dropout", "qwen2"])
@pytest.mark.parametrize("layout", ["bucketed", "packed", "shared"])
@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_a_resumed_run_continues_to_the_last_bit(name: str, layout: str, compute_dtype: str | None, tmp_path: Path) -> None:
    """Through the files of a checkpoint, with dropout, a schedule, a skipped update and a model of other random weights."""
    settings = {**SETTINGS, "layout": layout, "seed": 3, "dropout": True, "compute_dtype": compute_dtype}
    straight = engine_of(model_of(name, torch.float32), **settings)
    for step in range(3):
        straight.train_batch(batch_of(seed=step), LOSS if step != 1 else Scaled(float("nan")))
    save_state(tmp_path / "engine", *straight.state())
    other = model_of(name, torch.float32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    resumed = engine_of(other, **settings)
    resumed.train_batch(batch_of(seed=9), LOSS)
    tensors, numbers = load_state(tmp_path / "engine")
    resumed.load_state(tensors, {key: float(value) for key, value in numbers.items() if isinstance(value, int | float)})
    for step in range(3, 6):
        first, second = (engine.train_batch(batch_of(seed=step), LOSS) for engine in (straight, resumed))
        assert first == second
    assert largest_difference(state_of(straight)[0], state_of(resumed)[0]) == 0.0
    assert state_of(straight)[1] == state_of(resumed)[1] == {"version": 6, "skipped_in_a_row": 0}


def test_a_state_before_the_first_step_forgets_the_optimizer() -> None:
    fresh, used = engine_of("llama"), engine_of("llama")
    used.train_batch(batch_of(), LOSS)
    used.load_state(*state_of(fresh))
    for engine in (fresh, used):
        engine.train_batch(batch_of(), LOSS)
    assert largest_difference(weights_of(fresh), weights_of(used)) == 0.0


def test_loading_copies() -> None:
    source, target = engine_of("llama"), engine_of("llama")
    source.train_batch(batch_of(), LOSS)
    tensors, numbers = source.state()
    target.load_state(tensors, numbers)
    before, _ = state_of(target)
    source.train_batch(batch_of(), LOSS)
    assert largest_difference(before, state_of(target)[0]) == 0.0


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name) if name in tensors else pytest.fail(f"no {name}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.lm_head.weight"), r"missing \['model.lm_head.weight'\], unknown \[\]"),
        (without("optimizer.lm_head.weight.exp_avg"), r"missing \['optimizer.lm_head.weight.exp_avg'\]"),
        (without("optimizer.lm_head.weight.step"), r"missing \['optimizer.lm_head.weight.step'\]"),
        (lambda tensors: tensors.update({"model.extra": torch.ones(1)}), r"missing \[\], unknown \['model.extra'\]"),
        (lambda tensors: tensors.update({"optimizer.extra.step": torch.ones(())}), r"unknown \['optimizer.extra.step'\]"),
        (
            lambda tensors: tensors.update({"model.lm_head.weight": torch.ones(2, 3)}),
            r"lm_head.weight was saved as \[2, 3\], this model has \[19, 16\]",
        ),
        (
            lambda tensors: tensors.update({"optimizer.lm_head.weight.exp_avg": torch.ones(1)}),
            r"optimizer.lm_head.weight.exp_avg was saved as \[1\], this model has \[19, 16\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_nothing_is_loaded(
    change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    source, target = engine_of("llama"), engine_of("llama")
    source.train_batch(batch_of(), LOSS)
    target.train_batch(batch_of(seed=1), LOSS)
    before, _ = state_of(target)
    tensors, numbers = state_of(source)
    change(tensors)
    with pytest.raises(EngineError, match=message):
        target.load_state(tensors, numbers)
    assert largest_difference(before, state_of(target)[0]) == 0.0


def test_missing_numbers_are_named() -> None:
    engine = engine_of("llama")
    with pytest.raises(EngineError, match=r"missing \['skipped_in_a_row', 'version'\]"):
        engine.load_state(engine.state()[0], {})


def test_the_model_is_written_as_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    engine = engine_of(model_of("qwen2", torch.float32))
    engine.train_batch(batch_of(), LOSS)
    engine.save_hf(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    theirs = dict(loaded.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in engine.model.named_parameters())


def test_each_rank_has_its_own_dropout_and_keeps_it_over_a_resume() -> None:
    """Two ranks never draw the same, and what a rank draws depends on the seed, the rank and the version alone."""

    def drawn(rank: int, version: int) -> list[float]:
        engine = fsdp2(model_of("llama"), FSDP2Config(), OptimConfig(lr=0.01), total_steps=10, seed=3, rank=rank)
        engine.version = version
        with engine._training():
            return torch.rand(4).tolist()

    assert drawn(0, 2) == drawn(0, 2)
    assert len({tuple(drawn(rank, version)) for rank in (0, 1) for version in (0, 1, 2)}) == 6

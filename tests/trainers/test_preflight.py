"""What is known of a model before anything starts: quantised weights, and a tokenizer that knows more tokens than the model."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from podium.cli import training
from podium.config import ModelConfig, resolve
from podium.errors import ConfigError, TaskError
from podium.models import check_model_path, load_model, load_model_config, load_tokenizer
from podium.trainers.preflight import prepare
from tests.tasks.builders import write_rows
from tests.trainers.builders import train

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


@pytest.fixture
def model(tmp_path):
    """A folder with a tiny model and its tokenizer."""
    folder = tmp_path / "model"
    load_model(ModelConfig(path="char_llama", override_config=TINY), seed=0).save_pretrained(folder)
    load_tokenizer(ModelConfig(path="char_llama")).save_pretrained(folder)
    return folder


def config_of(tmp_path, model, *overrides, prompt="{}\n", answer="b{}"):
    rows = [{"prompt": prompt.format(number), "answer": answer.format(number)} for number in range(40)]
    settings = {
        "name": "small",
        "run_root": str(tmp_path / "runs"),
        "model": str(model),
        "task": {"train_files": str(write_rows(tmp_path / "rows.jsonl", rows))},
        "actor": {"optim": {"lr": 1e-3}},
        "rollout": {"sampling": {"n": 2, "max_new_tokens": 4}},
        "trainer": {"total_steps": 1, "prompts_per_step": 2, "trackers": [], "curve": False},
    }
    return resolve(settings, overrides)


QUANTISED = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "zero_point": True},
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize("method", QUANTISED)
def test_a_quantised_model_is_refused_before_the_start(tmp_path, model, method):
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**content, "quantization_config": QUANTISED[method]}))
    with pytest.raises(ConfigError, match=rf"is quantised \(quantization_config in its config\.json: {method}\)"):
        training.start(config_of(tmp_path, model), dry_run=True)
    with pytest.raises(ConfigError, match="is quantised"):
        training.evaluate(model, config_of(tmp_path, "char_llama"))
    with pytest.raises(ConfigError, match=r"^ref\.model: .*is quantised"):
        prepare(config_of(tmp_path, "char_llama", f"ref.model={model}", "actor.use_kl_loss=true"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_packed_weights_are_found_also_without_a_word_in_the_config(model, dtype):
    weights = load_file(model / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(2, 2).to(dtype)
    weights["model.position_ids"] = torch.arange(3)  # a buffer that old models have
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"is quantised \(model\.layers\.0\.mlp\.up_proj\.qweight has dtype"):
        check_model_path(ModelConfig(path=str(model)))


def test_an_unquantised_model_passes(model):
    check_model_path(ModelConfig(path=str(model)))
    assert load_model_config(ModelConfig(path=str(model))).vocab_size == 99


@pytest.fixture
def larger(model):
    """The model with a tokenizer that knows a token, and a padding token, more than it."""
    tokenizer = load_tokenizer(ModelConfig(path=str(model)))
    tokenizer.add_tokens(["<extra>"])
    tokenizer.add_special_tokens({"pad_token": "<added pad>"})
    tokenizer.save_pretrained(model)
    assert (len(tokenizer), tokenizer.pad_token_id) == (101, 100)
    return model


def test_a_tokenizer_may_know_tokens_that_no_row_uses(tmp_path, larger):
    train(config_of(tmp_path, larger, "warmup.steps=1", "warmup.batch_rows=4"))  # prompts of one and two digits: padded


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"prompt": "<extra>{}\n"}, r"the token '<extra>' has id 99, but the model has rows for 99 .*rows\.jsonl row 1"),
        ({"answer": "<extra>{}"}, r"warm-up: the target \(answer\) of the prompt rows\.jsonl:\d+: the token '<extra>' has id 99"),
    ],
)
def test_a_row_that_uses_a_token_which_the_model_lacks_is_named(tmp_path, larger, rows, expected):
    with pytest.raises((ConfigError, TaskError), match=f"(?s){expected}"):
        prepare(config_of(tmp_path, larger, "warmup.steps=1", "warmup.batch_rows=4", **rows))


def test_a_model_without_a_row_for_the_end_of_sequence_is_refused(tmp_path, larger):
    tokenizer = load_tokenizer(ModelConfig(path=str(larger)))
    tokenizer.eos_token = "<extra>"
    tokenizer.save_pretrained(larger)
    with pytest.raises(ConfigError, match=r"the end-of-sequence token '<extra>' of the tokenizer of .* has id 99"):
        prepare(config_of(tmp_path, larger))

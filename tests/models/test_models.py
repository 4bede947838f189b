from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, BertLMHeadModel, LlamaConfig, LlamaForCausalLM

from podium.config import ModelConfig
from podium.errors import ConfigError
from podium.models import check_model_path, eos_token_ids, load_model, load_tokenizer, save_model

BUILT_IN = ModelConfig(path="char_llama")


def test_the_built_in_is_a_real_quarter_million_parameter_llama():
    model = load_model(BUILT_IN, seed=0)
    assert isinstance(model, LlamaForCausalLM)
    assert sum(parameter.numel() for parameter in model.parameters()) == 249_600
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_fresh_weights_depend_on_the_seed_only():
    torch.manual_seed(5)
    one = load_model(BUILT_IN, seed=3)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1)), "building a model must not move the global random state"
    other = load_model(BUILT_IN, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, load_model(BUILT_IN, seed=4).lm_head.weight)


def test_saved_model_and_tokenizer_load_equal(tmp_path):
    model, tokenizer = load_model(BUILT_IN, seed=0), load_tokenizer(BUILT_IN)
    save_model(model, str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    saved = ModelConfig(path=str(tmp_path))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    text = "Zebra ~ ab\nc"
    assert load_tokenizer(saved).encode(text) == tokenizer.encode(text)
    assert eos_token_ids(load_model(saved, seed=1), load_tokenizer(saved)) == (2,)


def test_tokens_are_characters_and_text_comes_back():
    tokenizer = load_tokenizer(BUILT_IN)
    text = "".join(map(chr, range(32, 127))) + "\n  two  spaces"
    ids = tokenizer.encode(text)
    assert len(ids) == 1 + len(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert len(tokenizer) == 99


def test_overrides_change_the_config_and_unknown_ones_are_refused():
    model = load_model(ModelConfig(path="char_llama", override_config={"num_hidden_layers": 1}), seed=0)
    assert len(model.model.layers) == 1
    with pytest.raises(ConfigError, match="no 'hiden_size'; did you mean 'hidden_size'"):
        load_model(ModelConfig(path="char_llama", override_config={"hiden_size": 1}), seed=0)


@pytest.mark.parametrize(
    ("path", "expected"), [("char_lama", "did you mean 'char_llama'"), ("/no/such", "no folder"), ("a/b/c", "no folder")]
)
def test_a_path_that_is_not_a_model_is_refused_early(path, expected):
    with pytest.raises(ConfigError, match=expected):
        check_model_path(ModelConfig(path=path))


def test_a_folder_without_a_model_is_refused_early(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        check_model_path(ModelConfig(path=str(tmp_path)))


def test_a_folder_that_lacks_weights_or_holds_garbage_is_refused(tmp_path):
    """What is missing would be random, and the run would end as if nothing had happened."""
    save_model(load_model(BUILT_IN, seed=0), str(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 weights, which would be random: model\.layers\.0\.mlp\.down_proj\.weight"):
        load_model(ModelConfig(path=str(tmp_path)), seed=0)
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(ModelConfig(path=str(tmp_path)), seed=0)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is not causal|lacks"):
        load_model(ModelConfig(path=str(tmp_path)), seed=0)
    BertLMHeadModel(BertConfig(**sizes, is_decoder=False)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is not causal"):
        load_model(ModelConfig(path=str(tmp_path)), seed=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_causal_model_of_ordinary_width_does_not_look_ahead(tmp_path, dtype):
    """Wide enough that two threads round the rows of one batch differently."""
    torch.set_num_threads(2)
    sizes = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 500}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=12, initializer_range=0.2)).save_pretrained(tmp_path)
    assert load_model(ModelConfig(path=str(tmp_path), dtype=dtype), seed=0).config.hidden_size == 576

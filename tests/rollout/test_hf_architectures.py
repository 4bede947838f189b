"""The same decode loop for every causal LM: equal to transformers' own `generate`, or refused in so many words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as tf

from podium.config.schema import SamplingConfig
from podium.errors import DataError, RolloutError
from tests.rollout.builders import EOS, RAGGED, batch_of, forward_shapes, hf_rollout, recomputed, rollout_of, rows_of

SIZES = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ROPE = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
SLIDING = ROPE | {"head_dim": 8, "sliding_window": 6}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": EOS}

CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**ROPE, **ENDS),
    "qwen2": lambda: tf.Qwen2Config(**ROPE, **ENDS),
    "mistral_sliding": lambda: tf.MistralConfig(**SLIDING, **ENDS),
    "gemma2_sliding": lambda: tf.Gemma2Config(**SLIDING, **ENDS),
    "gemma3_sliding": lambda: tf.Gemma3TextConfig(**SLIDING, layer_types=["sliding_attention", "full_attention"], **ENDS),
    "llama4_chunked": lambda: tf.Llama4TextConfig(
        **ROPE, head_dim=8, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=48, **ENDS
    ),
    "gpt2": lambda: tf.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, **ENDS),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**SIZES, intermediate_size=48, max_position_embeddings=64, **ENDS),
    "opt": lambda: tf.OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64, **ENDS),
    "bloom": lambda: tf.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=4, **ENDS),
    "falcon_alibi": lambda: tf.FalconConfig(**SIZES, alibi=True, **ENDS),
    "mixtral": lambda: tf.MixtralConfig(**ROPE, num_local_experts=2, **ENDS),
    "mamba": lambda: tf.MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=8, **ENDS),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **ROPE,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
        **ENDS,
    ),
}


def model_of(config: tf.PretrainedConfig) -> tf.PreTrainedModel:
    """Random weights four times the usual size, so that greedy choices are clear."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def greedy_by_transformers(model: tf.PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    input_ids = torch.tensor([prompt])
    tokens = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=max_new_tokens)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_generates_what_transformers_generates(name: str) -> None:
    model = model_of(CONFIGS[name]())
    rollout = rollout_of(model)
    greedy = rollout.generate(batch_of(), SamplingConfig(n=1, max_new_tokens=9, temperature=0.0), seed=0, step=0)
    assert rows_of(greedy, "responses") == [greedy_by_transformers(model, prompt, 9) for prompt in RAGGED]

    sampled = rollout.generate(batch_of(), SamplingConfig(max_new_tokens=9, n=3), seed=0, step=0)
    for mine, theirs in zip(sampled.batch["rollout_log_probs"].unbind(), recomputed(model, sampled, 1.0), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-4)


def test_a_model_without_a_cache_argument_is_refused() -> None:
    model = tf.AutoModelForCausalLM.from_config(tf.RwkvConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2))
    with pytest.raises(RolloutError, match="RwkvForCausalLM takes none of cache, past_key_values"):
        hf_rollout(model)


def test_a_model_with_its_state_elsewhere_is_refused() -> None:
    config = tf.RecurrentGemmaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, lru_width=32
    )
    with pytest.raises(RolloutError, match="RecurrentGemmaForCausalLM keeps its recurrent state outside"):
        rollout_of(model_of(config)).generate(batch_of(), SamplingConfig(n=1, max_new_tokens=3), seed=0, step=0)


def test_a_row_that_would_cross_into_another_rotation_is_refused() -> None:
    """Phi-3 rotates all tokens of a row in another way beyond the original context; those in the cache keep their rotation."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    model = model_of(tf.Phi3Config(**ROPE, rope_parameters=rope, original_max_position_embeddings=16, **ENDS))
    rollout = rollout_of(model)
    found = rollout.generate(batch_of([[3] * 7]), SamplingConfig(max_new_tokens=9, n=4), seed=0, step=0)
    for mine, theirs in zip(found.batch["rollout_log_probs"].unbind(), recomputed(model, found, 1.0), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-4)
    with pytest.raises(DataError, match="has 7 tokens; with 10 new ones that is more than the 16 tokens"):
        rollout.generate(batch_of([[3] * 7]), SamplingConfig(max_new_tokens=10, n=4), seed=0, step=0)


def test_recurrent_models_share_batches_by_length() -> None:
    """Padding would enter a recurrent state, so only prompts of one length are decoded together."""
    model = model_of(CONFIGS["mamba"]())
    rollout = rollout_of(model)
    with forward_shapes(model) as shapes:
        rollout.generate(batch_of([[3, 4], [5, 6, 7], [8, 9]]), SamplingConfig(max_new_tokens=1, n=5), seed=0, step=0)
    assert shapes == [(2, 2), (1, 3)]

"""The longest row of a model, from its config."""

from __future__ import annotations

import pytest
import transformers as tf

from podium.models import row_limit

FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40, **FACTORS}
PHI3 = {"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "tokens", "source"),
    [
        (tf.LlamaConfig(max_position_embeddings=256), 256, "max_position_embeddings"),
        (tf.GPT2Config(n_positions=64), 64, "max_position_embeddings"),
        (tf.MptConfig(max_seq_len=128), 128, "max_seq_len"),
        (tf.Phi3Config(**PHI3, rope_parameters=LONGROPE, original_max_position_embeddings=40), 40, "longrope rotates all tokens"),
        (
            tf.Phi3Config(**PHI3, rope_parameters=LONGROPE | {"long_factor": [1.0] * 4}, original_max_position_embeddings=40),
            64,
            "max_position_embeddings",
        ),
        (
            tf.LlamaConfig(
                max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
            ),
            64,
            "max_position_embeddings",
        ),
        (
            tf.LlamaConfig(
                max_position_embeddings=256,
                rope_parameters={
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            ),
            256,
            "max_position_embeddings",
        ),
    ],
)
def test_a_row_ends_with_the_positions_or_where_all_rotations_change(config, tokens, source):
    limit = row_limit(config)
    assert limit.tokens == tokens
    assert source in limit.reason


def test_each_type_of_layer_may_have_a_rotation_of_its_own():
    config = tf.Gemma3TextConfig(max_position_embeddings=64)
    config.rope_parameters = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert row_limit(config).tokens == 40


def test_a_model_without_positions_has_no_limit():
    assert row_limit(tf.MambaConfig()) is None

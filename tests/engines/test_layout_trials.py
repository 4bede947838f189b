"""What differs beyond a few tokens (windows, chunks, tables by position, states that run on) is found before a layout is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf

from podium.config import FSDP2Config
from podium.engines.fsdp2 import FSDP2Engine
from podium.engines.layout_trials import LayoutTrials, Reach, distances
from podium.engines.micro_batch import MicroBatch, Prompts, longest_sequence
from podium.errors import DataError, EngineError
from podium.protocol import DataProto
from podium.protocol.jagged import parts
from tests.engines.builders import ROPE, VOCAB, batch_of, engine_of, fsdp2, model_of, plain_log_probs, token_batch

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = TOKENS | {"initializer_range": 0.3}
BASE = ROPE | WIDE
HEADS = BASE | {"num_key_value_heads": 2, "head_dim": 8}
WINDOW = 12
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
FAMILIES: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "llama4": lambda: tf.Llama4TextConfig(
        **HEADS, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=24, attn_temperature_tuning=False
    ),
    "mistral": lambda: tf.MistralConfig(**HEADS, sliding_window=WINDOW),
    "gemma2": lambda: tf.Gemma2Config(**HEADS, sliding_window=WINDOW, **MIXED),
    "gemma3": lambda: tf.Gemma3TextConfig(**HEADS, sliding_window=WINDOW, **MIXED),
    "qwen2": lambda: tf.Qwen2Config(
        **BASE, num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "gpt2": lambda: tf.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, **WIDE),
    "gpt_neo": lambda: tf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        max_position_embeddings=64,
        **WIDE,
    ),
    "opt": lambda: tf.OPTConfig(**BASE, ffn_dim=24, word_embed_proj_dim=16),
    "gptj": lambda: tf.GPTJConfig(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, rotary_dim=4, **WIDE),
    "ctrl": lambda: tf.CTRLConfig(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=64, dff=24, **WIDE),
    "codegen": lambda: tf.CodeGenConfig(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, **WIDE),
    "bloom": lambda: tf.BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=2, n_head=2, **WIDE),
    "mpt": lambda: tf.MptConfig(vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=2, max_seq_len=64, initializer_range=0.3),
    "mamba": lambda: tf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4, **WIDE),
    "qwen3_next": lambda: tf.Qwen3NextConfig(**HEADS, **LINEAR, layer_types=["linear_attention", "full_attention"]),
    "recurrent_gemma": lambda: tf.RecurrentGemmaConfig(
        **(BASE | {"num_hidden_layers": 3}), lru_width=16, attention_window_size=WINDOW
    ),
    "lfm2": lambda: tf.Lfm2Config(**BASE, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
    "cohere2": lambda: tf.Cohere2Config(**HEADS, sliding_window=WINDOW, **MIXED),
    "gpt_oss": lambda: tf.GptOssConfig(**HEADS, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1),
    "modernbert_decoder": lambda: tf.ModernBertDecoderConfig(
        **(BASE | {"num_hidden_layers": 3}), local_attention=WINDOW, global_attn_every_n_layers=2
    ),
    "phi3_longrope": lambda: tf.Phi3Config(
        **BASE,
        num_key_value_heads=2,
        original_max_position_embeddings=40,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": 40,
        },
    ),
}
FAST = ("llama4", "mistral", "gemma3", "gpt_neo", "qwen3_next")


def family(name: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    model: tf.PreTrainedModel = tf.AutoModelForCausalLM.from_config(FAMILIES[name]())
    return model.eval()


def long_batch(longest: int = 40) -> DataProto:
    """Samples of three prompts: rows of up to `longest` tokens, which together are longer than any model's 64 positions."""
    rng = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, VOCAB, (length,), generator=rng).tolist() for length in (3, 9, 1)]
    lengths = [longest - 3, 8, longest - 9, longest - 12, (longest - 9) // 2, 5]
    responses = [torch.randint(3, VOCAB, (length,), generator=rng).tolist() for length in lengths]
    return token_batch([prompts[row] for row in (0, 0, 1, 1, 1, 2)], responses)


def largest_gap(model: tf.PreTrainedModel, batch: DataProto, layout: Any, budget: int = 300) -> float:
    engine = fsdp2(model, FSDP2Config(layout=layout, max_tokens_per_micro_batch=budget))
    with torch.no_grad():
        expected = torch.cat(plain_log_probs(model, batch))
    return float((parts(engine.infer_batch(batch).batch["log_probs"])[0] - expected).abs().max())


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_every_layout_gives_what_each_row_gives_alone_or_is_refused(name: str) -> None:
    model = family(name)
    for layout in ("auto", "bucketed"):
        assert largest_gap(model, long_batch(), layout) < 1e-4, layout
    for layout in ("packed", "shared"):
        try:
            gap = largest_gap(model, long_batch(), layout)
        except EngineError:
            continue
        assert gap < 1e-4, layout


@pytest.mark.parametrize("name", ["llama4", "mistral"])
def test_a_window_counts_from_the_first_row_that_is_longer(name: str) -> None:
    """The explicit mask of the layout shared has no window in it; rows within the window are exact, and longer ones refused."""
    engine = engine_of(family(name), layout="shared", budget=300)
    assert {micro.layout for micro in engine._plan(long_batch(longest=WINDOW))} == {"shared"}
    with pytest.raises(EngineError, match="mixes rows in the layout shared; use layout=bucketed"):
        engine._plan(long_batch(longest=WINDOW + 10))
    assert {micro.layout for micro in engine._plan(long_batch(longest=WINDOW))} == {"shared"}


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_a_shared_sequence_never_exceeds_the_positions_of_a_model_with_absolute_ones(layout: Any) -> None:
    """GPT-Neo reads its causal mask by the place in the sequence, up to its 64 positions; Llama has no table by position."""
    lengths, prompts = [38] * 10, Prompts([0] * 10, [30] * 10)
    for name, is_limited in (("gpt_neo", True), ("gpt2", True), ("mistral", False)):
        micros = engine_of(family(name), budget=300)._plan_in(layout, lengths, prompts)
        assert (longest_sequence(micros, layout, lengths, prompts) <= 64) is is_limited, name


def test_a_row_beyond_the_models_limit_is_refused_by_number() -> None:
    dynamic = tf.LlamaConfig(**BASE, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    for model, limit in ((family("phi3_longrope"), 40), (tf.LlamaForCausalLM(dynamic), 64), (family("gpt_neo"), 64)):
        engine = engine_of(model, budget=300)
        engine.infer_batch(token_batch([[3], [3] * 4], [[4], [5] * (limit - 4)]))
        with pytest.raises(DataError, match=rf"row 1 has {limit + 1} tokens, more than the .*{limit}"):
            engine.infer_batch(token_batch([[3], [3] * 4], [[4], [5] * (limit - 3)]))


# -- what is tried, and how often ---------------------------------------------------------------------------------------


def test_distances_are_all_whole_numbers_of_a_config_whatever_their_names() -> None:
    assert distances({"a": 3, "b": {"c": [7, 1.5, True, "9"]}, "d": None, "e": [[["x"], 2]], "f": 0}) == (2, 3, 7)


def test_a_verdict_holds_for_a_range_of_lengths() -> None:
    trials = LayoutTrials({"window": 4096, "hidden": 96}, num_tokens=VOCAB, max_tokens=16384, dtype=torch.float32)
    tried: list[Reach] = []

    def find(reach: Reach) -> bool:
        tried.append(reach)
        return reach.row <= 4096

    for row in (300, 400, 512, 260):
        assert trials.verdict("packed", Reach(row, 2000), find)
    assert tried == [Reach(512, 2512)], "a window of 4096 is out of reach for rows of 300"
    assert trials.verdict("packed", Reach(4096, 4096), find)
    assert not trials.verdict("packed", Reach(4097, 4097), find)
    assert trials.verdict("packed", Reach(300, 2000), find)
    assert tried[1:] == [Reach(4096, 8192), Reach(8192, 12289)]
    trials.verdict("packed", Reach(16000, 16384), find)
    assert tried[-1] == Reach(16381, 16384), "a trial keeps to max_tokens"


@contextmanager
def passes_of(engine: FSDP2Engine) -> Iterator[list[int]]:
    """Tokens of every forward pass."""
    seen: list[int] = []
    hook = engine.model.register_forward_pre_hook(lambda *call: seen.append(call[2]["input_ids"].numel()), with_kwargs=True)
    yield seen
    hook.remove()


def test_a_trial_is_three_passes_within_the_budget_and_made_once() -> None:
    engine = engine_of("llama_usual", layout="packed", budget=60)
    with passes_of(engine) as seen:
        engine._plan(batch_of())
        engine._plan(batch_of(seed=1))
    assert len(seen) == 3
    assert max(seen) <= 60


# -- a trial that fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_a_trial_that_runs_out_of_memory_ends_the_call(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("llama", layout="packed")

    def fail(rows: DataProto, micro: MicroBatch) -> torch.Tensor:
        raise error

    monkeypatch.setattr(engine, "_log_probs", fail)
    with pytest.raises(type(error)):
        engine._plan(batch_of())
    monkeypatch.undo()
    assert {micro.layout for micro in engine._plan(batch_of())} == {"packed"}


def test_a_pass_that_fails_otherwise_says_that_the_layout_is_not_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model_of("llama"), layout="packed")

    def fail(rows: DataProto, micro: MicroBatch) -> torch.Tensor:
        raise TypeError("forward() got an unexpected keyword argument 'position_ids'")

    monkeypatch.setattr(engine, "_log_probs", fail)
    with pytest.raises(EngineError, match="mixes rows in the layout packed"):
        engine._plan(batch_of())

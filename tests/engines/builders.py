"""Small models, batches and losses for the engine's tests, and the same mathematics written plainly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from podium.algorithms import LossSum, Outputs, SFTLoss
from podium.config import FSDP2Config, ModelConfig, OptimConfig
from podium.engines import EngineContext
from podium.engines.fsdp2 import FSDP2Engine
from podium.protocol import DataProto
from podium.protocol.jagged import interleave, jagged_from_rows, offsets_of, parts
from tests.algorithms.builders import clipped

VOCAB = 19
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ROPE = SIZES | {"intermediate_size": 24, "max_position_embeddings": 64}
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
CONFIGS: dict[str, Callable[[], tf.PretrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**ROPE, initializer_range=0.3),
    "llama_usual": lambda: tf.LlamaConfig(**ROPE),
    "qwen2": lambda: tf.Qwen2Config(**ROPE, initializer_range=0.3, num_key_value_heads=1, tie_word_embeddings=True),
    "gpt2": lambda: tf.GPT2Config(**GPT2, initializer_range=0.3, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    "gpt2_dropout": lambda: tf.GPT2Config(**GPT2, initializer_range=0.3),
    "mamba": lambda: tf.MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, state_size=4),
}
Layout = Literal["auto", "bucketed", "packed", "shared"]
LENGTHS = ((3, 4), (1, 1), (2, 3), (4, 1), (1, 0), (2, 6))
"""(prompt, response) tokens of each row; one has no response, one no more than one token of each."""
LOSS = clipped(0.2, 0.3)


def model_of(name: str, dtype: torch.dtype = torch.float64) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    model: tf.PreTrainedModel = tf.AutoModelForCausalLM.from_config(CONFIGS[name]())
    return model.to(dtype)


def engine_of(
    model: tf.PreTrainedModel | str,
    *,
    layout: Layout = "auto",
    budget: int = 64,
    seed: int = 0,
    dropout: bool = False,
    total_steps: int = 10,
    compute_dtype: Literal["bfloat16"] | None = None,
    **optim: Any,
) -> FSDP2Engine:
    """An engine with a learning rate that moves things, and an epsilon that does not blow rounding up."""
    return fsdp2(
        model_of(model) if isinstance(model, str) else model,
        FSDP2Config(max_tokens_per_micro_batch=budget, layout=layout, compute_dtype=compute_dtype),
        OptimConfig(**{"lr": 0.01, "eps": 1e-4, **optim}),
        total_steps=total_steps,
        seed=seed,
        dropout=dropout,
    )


def fsdp2(model: tf.PreTrainedModel, settings: FSDP2Config, optim: OptimConfig | None = None, **facts: Any) -> FSDP2Engine:
    """An engine over a finished model; forward only without `optim`."""
    facts = {"total_steps": 0, "seed": 0} | facts
    context = EngineContext(model=ModelConfig(path="of the test"), settings=settings, optim=optim, loader=lambda: model, **facts)
    return FSDP2Engine(context)


def batch_of(
    lengths: Sequence[tuple[int, int]] = LENGTHS, *, advantages: Sequence[float] | None = None, seed: int = 0
) -> DataProto:
    """Random tokens; masks with holes; old log-probs near those of a random model; one advantage a row."""
    rng = torch.Generator().manual_seed(seed)
    prompts, responses = (
        jagged_from_rows([torch.randint(2, VOCAB, (length,), generator=rng) for length in column])
        for column in zip(*lengths, strict=True)
    )
    values, offsets = parts(responses)
    row_advantages = torch.tensor(
        advantages if advantages is not None else [(-1.0) ** row * (row + 1) for row in range(len(lengths))]
    )
    columns = {
        "response_mask": (torch.arange(len(values)) % 4 != 3).long(),
        "old_log_probs": -math.log(VOCAB) + torch.rand(len(values), generator=rng, dtype=torch.float64) - 0.5,
        "advantages": row_advantages.double().repeat_interleave(offsets.diff()),
    }
    return DataProto(
        {
            "input_ids": interleave(prompts, responses),
            "responses": responses,
            **{name: torch.nested.nested_tensor_from_jagged(column, offsets) for name, column in columns.items()},
        }
    )


def plain_log_probs(model: tf.PreTrainedModel, batch: DataProto, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of each response by one forward pass of its row alone, with a graph if gradients are on."""
    found = []
    for input_ids, response in zip(batch.batch["input_ids"].unbind(), batch.batch["responses"].unbind(), strict=True):
        logits_TV = model(input_ids=input_ids[None], use_cache=False).logits[0]
        logits_TV = logits_TV[len(input_ids) - len(response) - 1 : -1]
        found.append((logits_TV / temperature).log_softmax(-1).gather(1, response[:, None])[:, 0])
    return found


def weights_of(engine: FSDP2Engine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def state_of(engine: FSDP2Engine) -> tuple[dict[str, Tensor], dict[str, float]]:
    tensors, numbers = engine.state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, dict(numbers)


def largest_difference(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def has_no_gradients(engine: FSDP2Engine) -> bool:
    return all(parameter.grad is None for parameter in engine.model.parameters())


# -- models whose numbers can be worked out by hand -------------------------------------------------------------------


class BigramConfig(tf.PretrainedConfig):  # type: ignore[misc]
    model_type = "podium_test_bigram"

    def __init__(self, table: list[list[float]] | None = None, leak: float = 0.0, **kwargs: Any) -> None:
        self.table, self.leak = table or [[0.0]], leak
        self.vocab_size, self.hidden_size = len(self.table), 8
        super().__init__(**kwargs)


class Bigram(tf.PreTrainedModel):
    """Logits are a row of a table, by the token before; with `leak`, plus a little of all tokens before, packed rows included.

    It knows no `logits_to_keep`.
    """

    config_class = BigramConfig

    def __init__(self, config: BigramConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.tensor(config.table, dtype=torch.float64))
        self.post_init()

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache: bool | None = None) -> CausalLMOutput:
        logits = self.table[input_ids]
        return CausalLMOutput(logits=logits + self.config.leak * logits.cumsum(1) if self.config.leak else logits)


def bigram(table: list[list[float]], leak: float = 0.0) -> Bigram:
    return Bigram(BigramConfig(table=table, leak=leak))


def token_batch(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> DataProto:
    prompt_ids, response_ids = (
        torch.nested.nested_tensor_from_jagged(
            torch.tensor([token for row in rows for token in row], dtype=torch.int64),
            offsets_of(torch.tensor([len(row) for row in rows])),
        )
        for rows in (prompts, responses)
    )
    values, offsets = parts(response_ids)
    mask = torch.nested.nested_tensor_from_jagged(torch.ones_like(values), offsets)
    return DataProto({"input_ids": interleave(prompt_ids, response_ids), "responses": response_ids, "response_mask": mask})


# -- losses -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled(SFTLoss):
    """SFT times a factor, which may be NaN."""

    factor: float = 1.0

    def __call__(self, outputs: Outputs, batch: DataProto) -> LossSum:
        part = super().__call__(outputs, batch)
        return LossSum(part.total * self.factor, part.count, part.terms, part.metrics)


@dataclass(frozen=True)
class Shifted(SFTLoss):
    """SFT plus a constant, which may be NaN: the gradient is the same."""

    constant: float = 0.0

    def __call__(self, outputs: Outputs, batch: DataProto) -> LossSum:
        part = super().__call__(outputs, batch)
        return LossSum(part.total + self.constant, part.count, part.terms, part.metrics)


@dataclass(frozen=True)
class Weighted(SFTLoss):
    """SFT whose rows count a fraction each."""

    weight: float = 0.1

    def count(self, batch: DataProto) -> float:
        return sum([self.weight] * len(batch))


@dataclass(frozen=True)
class Miscounting(SFTLoss):
    """Says one more than it counts."""

    def __call__(self, outputs: Outputs, batch: DataProto) -> LossSum:
        part = super().__call__(outputs, batch)
        return LossSum(part.total, part.count + 1, part.terms, part.metrics)

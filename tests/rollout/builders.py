"""Small random models and batches for the rollout tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from podium.config import HFRolloutConfig, ModelConfig
from podium.protocol import DataProto
from podium.protocol.jagged import jagged_from_rows
from podium.rollout import RolloutContext
from podium.rollout.hf import HFRollout
from podium.weights import named_weights

EOS = 2
RAGGED = ([5, 6, 7, 8, 9, 10, 11], [3], [4, 9, 4], [12, 13, 14, 15, 16, 17, 18, 19, 20, 21])


def llama(*, seed: int = 0, dtype: torch.dtype = torch.float32, vocab_size: int = 30, **settings: int | bool) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        initializer_range=0.5,  # distributions with a shape, where the default's are almost uniform
        pad_token_id=0,
        eos_token_id=EOS,
        **settings,
    )
    return LlamaForCausalLM(config).to(dtype)


class Tokenizer:
    """What a rollout asks of a tokenizer; the text of token n is "n "."""

    pad_token_id = 0

    def __init__(
        self, eos_token_id: int | None, detokenize: Callable[[Sequence[int]], str] | None, special_tokens: Mapping[str, int]
    ) -> None:
        self.eos_token_id = eos_token_id
        self.added_tokens_decoder = {number: AddedToken(name, special=True) for name, number in special_tokens.items()}
        self._detokenize = detokenize or (lambda tokens: "".join(f"{token} " for token in tokens))

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return self._detokenize(tokens)


def hf_rollout(
    model: PreTrainedModel,
    *,
    max_rows: int = 1000,
    eos_token_ids: tuple[int, ...] = (EOS,),
    detokenize: Callable[[Sequence[int]], str] | None = None,
    special_tokens: Mapping[str, int] | None = None,
) -> HFRollout:
    """A rollout over a finished model, without a version of weights."""
    model.generation_config.eos_token_id = list(eos_token_ids)  # type: ignore[union-attr]
    tokenizer: Any = Tokenizer(None, detokenize, special_tokens or {})
    settings = HFRolloutConfig(max_rows=max_rows)
    context = RolloutContext(ModelConfig(path="of the test"), settings, tokenizer, seed=0, loader=lambda: model)
    return HFRollout(context)


def rollout_of(model: PreTrainedModel, **settings: Any) -> HFRollout:
    """A rollout that holds the model's own weights as version 0."""
    rollout = hf_rollout(model, **settings)
    rollout.update_weights([(name, tensor.clone()) for name, tensor in named_weights(model)], version=0)
    return rollout


def batch_of(prompts: Sequence[Sequence[int]] = RAGGED, uids: Sequence[str] | None = None) -> DataProto:
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    uids = [f"uid-{row}" for row in range(len(rows))] if uids is None else uids
    return DataProto({"prompts": jagged_from_rows(rows)}, {"uid": list(uids)}, {"step": 7})


def rows_of(data: DataProto, column: str) -> list[list[int]]:
    return [row.tolist() for row in data.batch[column].unbind()]


def recomputed(model: PreTrainedModel, data: DataProto, temperature: float) -> list[Tensor]:
    """Log-probs of each response by one full forward pass of its row alone, without a cache."""
    found = []
    with torch.no_grad():
        for input_ids, response in zip(data.batch["input_ids"].unbind(), data.batch["responses"].unbind(), strict=True):
            logits_TV = model.eval()(input_ids=input_ids[None]).logits[0, -len(response) - 1 : -1]
            found.append((logits_TV / temperature).log_softmax(-1).gather(1, response[:, None])[:, 0])
    return found


@contextmanager
def forward_shapes(model: nn.Module) -> Iterator[list[tuple[int, int]]]:
    """The (rows, tokens) of every forward pass."""
    shapes: list[tuple[int, int]] = []

    def record(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        shapes.append((kwargs["input_ids"].shape[0], kwargs["input_ids"].shape[1]))

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    yield shapes
    handle.remove()

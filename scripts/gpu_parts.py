"""What the stages of gpu_check share: a stage's findings, models made from a configuration, batches, engines, clocks."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
import transformers as tf
from torch import Tensor

from podium.algorithms import Loss
from podium.config import FSDP2Config, HFRolloutConfig, ModelConfig, OptimConfig
from podium.engines import BaseEngine, EngineContext, pick_device
from podium.engines.fsdp2 import FSDP2Engine
from podium.protocol import DataProto, jagged_from_rows
from podium.rollout import BaseRollout, RolloutContext
from podium.rollout.hf import HFRollout
from podium.weights import named_weights

T = TypeVar("T")
Layout = Literal["auto", "bucketed", "packed", "shared"]
LAYOUTS: tuple[Layout, ...] = ("auto", "bucketed", "packed", "shared")
GIB = 2**30

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
HALF_BILLION = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
}
ONE_AND_A_HALF_BILLION = {
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
"""Of a model that computes in its own dtype throughout: others have a norm in float32, also in float64."""
SMALL_VOCABULARY, LARGE_VOCABULARY = 97, 151_936
NEEDS_CUDA = "needs cuda"


class Skip(Exception):  # noqa: N818 - not an error
    """The stage cannot run here; the message says why."""


class Check:
    """What a stage is given: the device, the size of things, and where its findings go, as soon as it has them."""

    def __init__(self, send: Callable[[tuple[str, Any]], None], *, is_quick: bool) -> None:
        self._send = send
        self.device = pick_device()
        self.is_cuda = self.device.type == "cuda"
        self.is_small = is_quick or not self.is_cuda

    def figures(self, **values: Any) -> None:
        """Numbers and short texts for the stage's line."""
        self._send(("figures", {name: rounded(value) for name, value in values.items()}))

    def require(self, holds: bool, otherwise: str) -> None:
        """The stage fails, and goes on, where this does not hold."""
        if not holds:
            self._send(("failed", otherwise))

    def within(self, limit: float, **gaps: float) -> None:
        """These differences are figures, and each must be at most `limit`; NaN is not."""
        self.figures(**gaps)
        for name, gap in gaps.items():
            self.require(gap <= limit, f"{name} is {gap:.3g}, more than {limit:g}")


def rounded(value: Any) -> Any:
    """Floats to six digits, also inside lists and dicts; one that JSON does not have as text."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


# -- models, engines, batches --------------------------------------------------------------------------------------------


def model_of(
    sizes: Mapping[str, int],
    *,
    vocabulary: int = SMALL_VOCABULARY,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tf.PreTrainedModel:
    """A Qwen2 with random weights: on one kind of device the same at every call."""
    config = tf.Qwen2Config(
        **sizes, vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=32_768, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    with torch.device(device):
        model: tf.PreTrainedModel = tf.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def float64_model() -> tf.PreTrainedModel:
    """A small GPT-2 in float64, without dropout, with distributions that have a shape."""
    torch.manual_seed(0)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = tf.GPT2Config(**GPT2, **dropout, **special, vocab_size=SMALL_VOCABULARY, initializer_range=0.2)
    model: tf.PreTrainedModel = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return model


def engine_of(
    model: tf.PreTrainedModel,
    device: torch.device | str,
    *,
    layout: Layout = "auto",
    max_tokens: int = 16_384,
    compute_dtype: Literal["bfloat16"] | None = None,
    lr: float = 1e-2,
) -> FSDP2Engine:
    """A training engine over a copy of the model, on that device. Its epsilon keeps rounding from being blown up."""
    context = EngineContext(
        model=ModelConfig(path="the caller's"),
        settings=FSDP2Config(max_tokens_per_micro_batch=max_tokens, layout=layout, compute_dtype=compute_dtype),
        optim=OptimConfig(lr=lr, eps=1e-4),
        total_steps=100,
        seed=0,
        device=torch.device(device),
        loader=lambda: copy.deepcopy(model),
    )
    return FSDP2Engine(context)


class _Tokenizer:
    """What the rollout asks of a tokenizer."""

    eos_token_id, pad_token_id, added_tokens_decoder = 2, 0, dict[int, object]()

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"{token} " for token in tokens)


def rollout_of(model: tf.PreTrainedModel, *, max_rows: int = 1024) -> BaseRollout:
    """A rollout over the model, which holds the model's weights as version 0. The text of token n is "n "."""
    model.generation_config.eos_token_id = 2  # type: ignore[union-attr]
    rollout = HFRollout(
        RolloutContext(
            model=ModelConfig(path="the caller's"),
            settings=HFRolloutConfig(max_rows=max_rows),
            tokenizer=_Tokenizer(),  # type: ignore[arg-type]
            seed=0,
            device=model.device,
            loader=lambda: model,
        )
    )
    rollout.update_weights(named_weights(model), version=0)
    return rollout


def rows_of(lengths: Iterable[tuple[int, int]], *, vocabulary: int = SMALL_VOCABULARY, seed: int = 0) -> DataProto:
    """Random rows of (prompt, response) tokens, each twice with one prompt, with all columns that a policy loss reads."""
    random = torch.Generator().manual_seed(seed)
    input_ids, responses = list[Tensor](), list[Tensor]()
    for prompt_length, response_length in lengths:
        prompt = torch.randint(3, vocabulary, (prompt_length,), generator=random)
        for _ in range(2):
            responses.append(torch.randint(3, vocabulary, (response_length,), generator=random))
            input_ids.append(torch.cat([prompt, responses[-1]]))

    def column(low: float, high: float) -> Tensor:
        parts = [torch.rand(len(row), generator=random, dtype=torch.float64) * (high - low) + low for row in responses]
        return jagged_from_rows(parts)

    usual = -math.log(vocabulary)
    return DataProto(
        {
            "input_ids": jagged_from_rows(input_ids),
            "responses": jagged_from_rows(responses),
            "response_mask": jagged_from_rows([torch.ones_like(row) for row in responses]),
            "old_log_probs": column(usual - 0.3, usual + 0.3),
            "ref_log_prob": column(usual - 0.3, usual + 0.3),
            "advantages": column(-1.0, 1.0),
        }
    )


def prompts_of(lengths: Sequence[int], *, vocabulary: int = SMALL_VOCABULARY) -> DataProto:
    """Random prompts of these lengths."""
    random = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, vocabulary, (length,), generator=random) for length in lengths]
    return DataProto({"prompts": jagged_from_rows(rows)}, {"uid": [f"uid-{row}" for row in range(len(rows))]})


def log_probs(engine: BaseEngine, batch: DataProto) -> Tensor:
    """Those of all response tokens, end to end, on the CPU."""
    return torch.cat(list(engine.infer_batch(batch).batch["log_probs"].unbind())).cpu()


def train(engine: BaseEngine, batch: DataProto, loss: Loss, steps: int) -> list[float]:
    """The gradient norm of each of so many steps."""
    return [engine.train_batch(batch, loss).to_floats()["grad_norm"] for _ in range(steps)]


def weights_of(engine: BaseEngine) -> dict[str, Tensor]:
    """The engine's weights, whole, on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in engine.named_weights()}


def largest_gap(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of any element, of two sets of the same tensors."""
    return max(float((mine[name].double() - theirs[name].double()).abs().max()) for name in mine.keys() | theirs.keys())


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    """A short name of exactly these bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# -- clocks and memory ----------------------------------------------------------------------------------------------------


def timed(check: Check, function: Callable[[], T]) -> tuple[float, T]:
    """How long a call takes, in seconds, with what it left to the GPU; and its result."""
    settle(check)
    began = time.perf_counter()
    result = function()
    settle(check)
    return time.perf_counter() - began, result


def settle(check: Check) -> None:
    """Wait until the GPU has done what it was given."""
    if check.is_cuda:
        torch.cuda.synchronize(check.device)


def forget_peak(check: Check) -> None:
    """Give unused memory back, and measure the peak anew."""
    if check.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(check.device)


def peak_gib(check: Check) -> float | str:
    """Most GPU memory in use at once since `forget_peak`."""
    return torch.cuda.max_memory_allocated(check.device) / GIB if check.is_cuda else NEEDS_CUDA

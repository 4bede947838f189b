"""A causal language model and its tokenizer from a path, a hub id or the name of a built-in architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from podium.config import ModelConfig
from podium.errors import ConfigError, nearest
from podium.models.char_llama import char_llama_config, char_tokenizer
from podium.models.hub import is_cached

T = TypeVar("T")

BUILT_IN: dict[str, tuple[Callable[[], PreTrainedConfig], Callable[[], PreTrainedTokenizerBase]]] = {
    "char_llama": (char_llama_config, char_tokenizer),
}


def load_model(config: ModelConfig, *, seed: int) -> PreTrainedModel:
    """The model on the CPU, in `config.dtype`. A built-in one has fresh weights drawn from `seed`.

    ConfigError when nothing is found under `path` or an override names no attribute of the model's config.
    """
    dtype: torch.dtype = getattr(torch, config.dtype)
    model_config = load_model_config(config)
    if config.path in BUILT_IN:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            fresh: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, dtype=dtype)
            return fresh
    with _no_progress_bars():
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                config.path,
                config=model_config,
                dtype=dtype,
                output_loading_info=True,
                **_how(config),
            )
        except (OSError, RuntimeError, ValueError, SafetensorError) as exc:
            raise ConfigError(f"model.path: the weights at {config.path} cannot be loaded: {exc}") from exc
    model: PreTrainedModel = found[0]
    if missing := sorted(found[1]["missing_keys"]):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise ConfigError(f"model.path: {config.path} lacks {len(missing)} weights, which would be random: {shown}")
    _check_causal(model, config.path)
    return model


def _check_causal(model: PreTrainedModel, path: str) -> None:
    """ConfigError for a model whose logits change with later tokens, as those of an encoder do; tried on three tokens.

    The two are passes of one shape, so that a causal model rounds alike in both.
    """
    num_tokens = model.config.get_text_config().vocab_size
    was_training = model.training
    model.eval()
    with torch.no_grad():
        first, second = (
            model(input_ids=torch.tensor([[1, 2, last]]) % num_tokens, use_cache=False).logits[0, :2].float() for last in (3, 4)
        )
    model.train(was_training)
    if float((first - second).abs().max()) > 1e-6 * float(first.abs().max()):
        raise ConfigError(
            f"model.path: {type(model).__name__} at {path} is not causal: its logits for a token change with later tokens. "
            "Take a causal language model"
        )


def load_model_config(config: ModelConfig) -> PreTrainedConfig:
    """The model's own config with the overrides in it; reads no weights. ConfigError as for `load_model`, and for a quantised
    model."""
    if config.path in BUILT_IN:
        return _overridden(BUILT_IN[config.path][0](), config)
    found: PreTrainedConfig = _found(config, lambda: AutoConfig.from_pretrained(config.path, **_how(config)))
    _check_not_quantised(found, config.path)
    return _overridden(found, config)


def _check_not_quantised(model_config: PreTrainedConfig, path: str) -> None:
    for part in (model_config, model_config.get_text_config()):
        quantisation: Any = getattr(part, "quantization_config", None)
        if quantisation is not None:
            settings = quantisation if isinstance(quantisation, dict) else vars(quantisation)
            method = settings.get("quant_method", "it names no method")
            raise ConfigError(quantised(path, f"quantization_config in its config.json: {method}"))


def quantised(path: object, sign: str) -> str:
    """The message for a model of packed weights."""
    return (
        f"model.path: {path} is quantised ({sign}); such weights can be neither trained nor computed with here. Take the "
        "model's original weights, or save a dequantised copy without quantization_config"
    )


def save_model(model: PreTrainedModel, path: str, weights: dict[str, Tensor] | None = None) -> None:
    """Write the model as a folder that `AutoModelForCausalLM.from_pretrained` loads.

    `weights` by name, tied ones once, replace the model's own, for a model whose own are not whole.
    """
    with _no_progress_bars():
        model.save_pretrained(path, state_dict=weights)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer. ConfigError when there is none, or when it has no end-of-sequence token."""
    if config.path in BUILT_IN:
        return BUILT_IN[config.path][1]()
    tokenizer: PreTrainedTokenizerBase = _found(config, lambda: AutoTokenizer.from_pretrained(config.path, **_how(config)))
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of {config.path} has no end-of-sequence token; set eos_token in its tokenizer_config.json"
        )
    return tokenizer


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's, and those of the model's generation config."""
    found = getattr(model.generation_config, "eos_token_id", None)
    more = found if isinstance(found, list) else [found]
    ids = [tokenizer.eos_token_id, *more]
    return tuple(dict.fromkeys(int(token) for token in ids if token is not None))


def pad_token_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """A token to pad with: the model does not have a row for a padding token that was added to the tokenizer alone."""
    pad, num_tokens = tokenizer.pad_token_id, model.config.get_text_config().vocab_size
    return int(pad if pad is not None and pad < num_tokens else tokenizer.eos_token_id)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """transformers' bars for loading and saving would break a progress display, and small models do not need them."""
    had_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            hf_logging.enable_progress_bar()


def _how(config: ModelConfig) -> dict[str, bool]:
    """Arguments for transformers: what is whole in the cache is read there, and the hub is not asked.

    Not of a model with code of its own, whose files only transformers knows.
    """
    may_be_hub_id = not config.trust_remote_code and not Path(config.path).expanduser().is_dir()
    return {"trust_remote_code": config.trust_remote_code, "local_files_only": may_be_hub_id and is_cached(config.path)}


def _found(config: ModelConfig, load: Callable[[], T]) -> T:
    try:
        return load()
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path: nothing that transformers can load at {config.path!r}: {exc}") from exc


def _overridden(model_config: PreTrainedConfig, config: ModelConfig) -> PreTrainedConfig:
    for key, value in config.override_config.items():
        if not hasattr(model_config, key):
            raise ConfigError(
                f"model.override_config: {type(model_config).__name__} has no {key!r}{nearest(key, vars(model_config))}"
            )
        setattr(model_config, key, value)
    return model_config

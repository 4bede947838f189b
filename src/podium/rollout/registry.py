"""Which rollout engines there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from torch import nn

from podium.errors import ConfigError, unknown_name
from podium.rollout.base import BaseRollout

ROLLOUTS = {"hf": "podium.rollout.hf:HFRollout"}
"""Name in `rollout.name` to "module:Class"; a module is imported when it is chosen."""


def build_rollout(
    name: str,
    model: nn.Module,
    *,
    eos_token_ids: tuple[int, ...],
    pad_token_id: int,
    max_rows: int,
    detokenize: Callable[[Sequence[int]], str] | None = None,
    special_tokens: Mapping[str, int] | None = None,
) -> BaseRollout:
    """The engine of that name over a model that is the rollout's own; it holds no weights version yet.

    Raises ConfigError for an unknown name.
    """
    if name not in ROLLOUTS:
        raise ConfigError(unknown_name("rollout", name, ROLLOUTS))
    module_name, class_name = ROLLOUTS[name].split(":")
    engine: Callable[..., BaseRollout] = getattr(import_module(module_name), class_name)
    return engine(
        model,
        eos_token_ids=eos_token_ids,
        pad_token_id=pad_token_id,
        max_rows=max_rows,
        detokenize=detokenize,
        special_tokens=special_tokens,
    )

"""The longest row that a model computes in the same way as any shorter one, read from its config.

A row has two limits. The first is the number of positions. The second is the context beyond which the rotary embedding of the
*whole* pass changes, earlier tokens included: a rollout that decodes token by token and a trainer that reads the whole row would
then disagree, and so would two rows of one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

POSITIONS = ("max_position_embeddings", "max_seq_len")
"""Attributes that hold the number of positions; transformers maps the other names (`n_positions`) to the first."""
BY_LENGTH = ("longrope", "su")
"""Rotations with other frequencies for long passes than for short ones. `dynamic` is another, but changes at the number of
positions, which limits rows anyway."""


@dataclass(frozen=True)
class RowLimit:
    """Most tokens of a row, prompt and response together, and where the number is from."""

    tokens: int
    reason: str
    """What the limit is, to be read after "more than"."""


def row_limit(config: PreTrainedConfig) -> RowLimit | None:
    """The smallest limit of the rows of a model; None for a model without positions.

    >>> from transformers import LlamaConfig
    >>> row_limit(LlamaConfig(max_position_embeddings=256))
    RowLimit(tokens=256, reason="the model's 256 positions (max_position_embeddings)")
    """
    text = config.get_text_config(decoder=True)
    return min(_limits(text), key=lambda limit: limit.tokens, default=None)


def _limits(config: PreTrainedConfig) -> Iterator[RowLimit]:
    for name in POSITIONS:
        positions = getattr(config, name, None)
        if isinstance(positions, int) and positions > 0:
            yield RowLimit(positions, f"the model's {positions} positions ({name})")
    for rope in _ropes(config):
        kind = rope.get("rope_type", rope.get("type"))
        border = rope.get("original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None))
        if kind in BY_LENGTH and isinstance(border, int) and _is_changed(rope):
            yield RowLimit(
                border,
                f"the {border} tokens (original_max_position_embeddings) beyond which {kind} rotates all tokens of a row in "
                "another way, so that rollout and trainer would disagree",
            )


def _ropes(config: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The config's rotations: one, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if isinstance(found, Mapping):
        yield found
        yield from (inner for inner in found.values() if isinstance(inner, Mapping))


def _is_changed(rope: Mapping[str, Any]) -> bool:
    short, long = rope.get("short_factor"), rope.get("long_factor")
    return short != long or rope.get("short_mscale") != rope.get("long_mscale")

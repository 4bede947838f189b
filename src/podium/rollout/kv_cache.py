"""Everything that Podium knows of transformers' cache: how to make one, hand it over, and pick its rows.

Its API moves between releases (the argument `past_key_values` is called `cache` from 5.24 on), so nothing else touches it.
Legend: R rows, L tokens given to one forward pass, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from podium.errors import RolloutError
from podium.models import row_limit

_CACHE_ARGUMENTS = ("cache", "past_key_values")


class CachedModel:
    """A causal LM of any architecture as a function of the next tokens, with memory of the earlier ones.

    `start` begins a batch, `step` continues it; `select_rows` repeats, drops and reorders its rows.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises RolloutError for a model whose forward takes no transformers cache."""
        self._model = model
        self._arguments = set(inspect.signature(model.forward).parameters)
        names = [name for name in _CACHE_ARGUMENTS if name in self._arguments]
        if not names:
            raise RolloutError(
                f"the forward of {type(model).__name__} takes none of {', '.join(_CACHE_ARGUMENTS)}; the hf rollout needs a "
                "causal LM that works with transformers' DynamicCache"
            )
        self._cache_argument = names[0]
        self.row_limit = row_limit(model.config)
        """Most tokens of a row, where the architecture has a limit."""
        self._cache = self._new_cache()
        self.can_pad = "attention_mask" in self._arguments and not any(map(_is_recurrent, self._cache.layers))
        """Whether rows of different lengths may share a batch: a recurrent state would take in the padding."""

    def start(self, tokens_RL: Tensor, mask_RL: Tensor | None) -> Tensor:
        """Forget the last batch, read prompts that are padded on the left, and return the logits [R, V] that follow.

        mask_RL: 1 at tokens, 0 at padding; None where there is no padding. Raises RolloutError for a model that leaves the
        cache empty, since its state could not follow the rows.
        """
        self._cache = self._new_cache()
        positions_RL = None if mask_RL is None else (mask_RL.cumsum(dim=-1) - 1).clamp(min=0)
        logits_RV = self._forward(tokens_RL, mask_RL, positions_RL)
        if any(_is_recurrent(layer) and _is_empty(layer) for layer in self._cache.layers):
            raise RolloutError(
                f"{type(self._model).__name__} keeps its recurrent state outside transformers' cache, where the rows of a batch "
                "cannot be shared and dropped; the hf rollout cannot generate with it"
            )
        return logits_RV

    def step(self, tokens_R: Tensor, mask_RL: Tensor | None) -> Tensor:
        """Read one more token per row; the mask covers all tokens so far, this one too. Returns logits [R, V]."""
        positions_R1 = None if mask_RL is None else mask_RL.sum(dim=-1, keepdim=True) - 1
        return self._forward(tokens_R[:, None], mask_RL, positions_R1)

    def select_rows(self, index: Tensor) -> None:
        """Make row r what row index[r] was; an index may come several times or not at all."""
        self._cache.reorder_cache(index)  # type: ignore[arg-type]  # any int64 tensor will do

    def release(self) -> None:
        """Drop the memory of the current batch."""
        self._cache = self._new_cache()

    def _new_cache(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _forward(self, tokens_RL: Tensor, mask_RL: Tensor | None, positions_RL: Tensor | None) -> Tensor:
        given: dict[str, Any] = {"attention_mask": mask_RL, "position_ids": positions_RL, "use_cache": True, "logits_to_keep": 1}
        known = {name: value for name, value in given.items() if name in self._arguments and value is not None}
        output = self._model(input_ids=tokens_RL, **known, **{self._cache_argument: self._cache})
        logits: Tensor = output.logits[:, -1]
        return logits


def _is_recurrent(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def _is_empty(layer: Any) -> bool:
    return all(state is None for state in (*layer.conv_states.values(), *layer.recurrent_states.values()))

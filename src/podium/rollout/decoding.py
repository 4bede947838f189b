"""The decode loop: one batch of rows from their prompts to their last tokens.

Legend: B prompts of a call; P distinct prompts of a batch, R its rows (samples), L its longest prompt, T most new tokens,
S = L + T, V vocabulary. What is not here: which rows go into a batch, and what becomes of the tokens (`hf`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from podium.protocol import jagged as jg
from podium.rollout.kv_cache import CachedModel

Draw = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(logits [R, V], uniform [R]) to (tokens [R], log-probs [R])."""

IsFinished = Callable[[Tensor], Tensor]
"""Responses so far [R, t], the newest token last, to bool [R]: which of them end here."""


@dataclass(frozen=True)
class Responses:
    """Where all rows of a call are written, each at its own number; row r holds `lengths[r]` tokens."""

    tokens: Tensor
    """[R, T] int64."""
    logprobs: Tensor
    """[R, T] float32 or float64."""
    lengths: Tensor
    """[R] int64."""
    is_stopped: Tensor
    """[R] bool: ended by itself rather than by the limit T."""

    @classmethod
    def empty(cls, num_rows: int, max_new_tokens: int, *, dtype: torch.dtype, device: torch.device) -> Responses:
        """Room for `num_rows` responses of up to `max_new_tokens`."""
        shape = (num_rows, max_new_tokens)
        return cls(
            torch.zeros(shape, dtype=torch.int64, device=device),
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.zeros(num_rows, dtype=torch.bool, device=device),
        )


@dataclass(frozen=True)
class Batch:
    """Rows that are decoded together, on the model's device."""

    tokens: Tensor
    """[P, L] int64: the distinct prompts, padded on the left."""
    mask: Tensor | None
    """[P, L] int64: 1 at tokens, 0 at padding; None where there is no padding."""
    prompt_of_row: Tensor
    """[R] int64: each row's prompt."""
    rows: Tensor
    """[R] int64: each row's number in the whole call."""

    @classmethod
    def gather(cls, prompts: Tensor, rows_R: Tensor, *, num_samples: int, pad_token_id: int, device: torch.device) -> Batch:
        """The batch of the given rows, where row r of the call is a sample of prompt r // num_samples (jagged [B, *])."""
        chosen_P, prompt_of_R = torch.unique(rows_R // num_samples, return_inverse=True)
        values, offsets = jg.parts(prompts)
        index, chosen_offsets = jg.gather_index(offsets, chosen_P.to(offsets.device))
        lengths_P = chosen_offsets.diff()
        longest = int(lengths_P.max())
        is_token_PL = torch.arange(longest, device=values.device) >= longest - lengths_P[:, None]
        tokens_PL = values.new_full(is_token_PL.shape, pad_token_id)
        tokens_PL[is_token_PL] = values[index]
        mask_PL = None if bool(is_token_PL.all()) else is_token_PL.to(device, torch.int64)
        return cls(tokens_PL.to(device), mask_PL, prompt_of_R.to(device), rows_R.to(device))


def decode(model: CachedModel, batch: Batch, uniform_RT: Tensor, into: Responses, *, draw: Draw, is_finished: IsFinished) -> None:
    """Prefill each prompt once, share it among its samples, and draw until every row has ended.

    Ended rows leave the batch at once: picking the others costs about what one step of the cache's growth does. uniform_RT
    float64 and `into` hold all rows of the call.
    """
    (_, prompt_length), max_new_tokens = batch.tokens.shape, uniform_RT.shape[1]
    rows_R, mask_RS = batch.rows, None
    if batch.mask is not None:
        mask_RS = torch.nn.functional.pad(batch.mask, (0, max_new_tokens), value=1)[batch.prompt_of_row]
    logits_RV = model.start(batch.tokens, batch.mask)[batch.prompt_of_row]
    model.select_rows(batch.prompt_of_row)
    for t in range(max_new_tokens):
        tokens_R, into.logprobs[rows_R, t] = draw(logits_RV, uniform_RT[rows_R, t])
        into.tokens[rows_R, t] = tokens_R
        is_last_R = is_finished(into.tokens[rows_R, : t + 1])
        into.lengths[rows_R] = t + 1
        into.is_stopped[rows_R] = is_last_R
        stay = (~is_last_R).nonzero().flatten()
        if t + 1 == max_new_tokens or not len(stay):
            break
        if len(stay) < len(rows_R):
            model.select_rows(stay)
            rows_R, tokens_R = rows_R[stay], tokens_R[stay]
            mask_RS = None if mask_RS is None else mask_RS[stay]
        logits_RV = model.step(tokens_R, None if mask_RS is None else mask_RS[:, : prompt_length + t + 1])
    model.release()

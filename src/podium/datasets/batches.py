"""Problems to batches: prompts for rollout, prompts with responses for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto
from podium.protocol.jagged import interleave, jagged, offsets_of, parts


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    eos_token_id: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def prompt_batch(prompts: Sequence[str], uids: Sequence[str], tokenizer: Tokenizer) -> DataProto:
    """Jagged `prompts` [B, *] int64 (special tokens as the tokenizer adds them) and `uid`. DataError for an empty prompt."""
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    for uid, row in zip(uids, rows, strict=True):
        if not row:
            raise DataError(f"the prompt of {uid} has no tokens")
    return DataProto({"prompts": _jagged_ids(rows)}, {"uid": list(uids)})


def supervised_batch(prompts: Sequence[str], responses: Sequence[str], tokenizer: Tokenizer) -> DataProto:
    """Jagged `input_ids`, `responses` (the end-of-sequence token included) and an all-ones `response_mask`."""
    prompt_ids = _jagged_ids([tokenizer.encode(prompt) for prompt in prompts])
    response_ids = _jagged_ids(
        [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in responses]
    )
    values, offsets = parts(response_ids)
    return DataProto(
        {
            "input_ids": interleave(prompt_ids, response_ids),
            "responses": response_ids,
            "response_mask": jagged(torch.ones_like(values), offsets),
        }
    )


def _jagged_ids(rows: Sequence[Sequence[int]]) -> Tensor:
    return jagged(
        torch.tensor([token for row in rows for token in row], dtype=torch.int64),
        offsets_of(torch.tensor([len(row) for row in rows])),
    )

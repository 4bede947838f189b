"""Problems to batches: prompts for rollout, prompts with responses for supervised training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto
from podium.protocol.jagged import interleave, jagged, offsets_of, parts

PromptInput: TypeAlias = str | Sequence[tuple[str, str]]
"""Plain text, or messages as pairs of role and content."""
ChatTemplate: TypeAlias = Literal["auto", "always", "never"]
"""When text goes through the tokenizer's chat template, as in `task.chat_template`."""


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer; `chat_template` and `apply_chat_template` too, where it has a template."""

    eos_token_id: int

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def prompt_tokens(prompt: PromptInput, tokenizer: Tokenizer, *, chat_template: ChatTemplate = "auto") -> list[int]:
    """The tokens that a policy answers, with special tokens as the tokenizer or its template adds them.

    Two of them are left out: a second token of the beginning, where the text has it already, and the end of sequence that some
    tokenizers put behind a text, for nothing is left to answer after it.

    Messages go through the chat template, which also opens the answer (`add_generation_prompt`). Text goes through it as one
    user message if there is one; without one, or with `never`, it is encoded as it is. With `never` messages are text too:
    their contents, an empty line between them. DataError for a prompt without tokens, one that the template refuses, and for
    messages (or with `always`, any prompt) where the tokenizer has no template.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat_template == "never" or (chat_template == "auto" and isinstance(prompt, str) and not has_template):
        tokens = _open_tokens(prompt if isinstance(prompt, str) else "\n\n".join(content for _, content in prompt), tokenizer)
    elif has_template:
        tokens = _templated([("user", prompt)] if isinstance(prompt, str) else prompt, tokenizer)
    else:
        kind = "task.chat_template=always" if isinstance(prompt, str) else "a prompt of messages"
        raise DataError(
            f"{kind} needs a chat template, which the model's tokenizer lacks: take a model that has one, "
            "or task.chat_template=never for plain text"
        )
    beginning = getattr(tokenizer, "bos_token_id", None)
    if beginning is not None and tokens[:2] == [beginning, beginning]:
        tokens = tokens[1:]
    if not tokens:
        raise DataError("the prompt has no tokens")
    return tokens


def appends_end(tokenizer: Tokenizer, text: str) -> bool:
    """Whether the tokenizer puts an end of sequence behind this text."""
    end = tokenizer.eos_token_id
    tokens = tokenizer.encode(text)
    if not tokens or tokens[-1] != end:
        return False
    own = tokenizer.encode(text, add_special_tokens=False)
    return own[-1:] != [end] or tokens[-2:] == [end, end]


def _open_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a plain text that the model continues."""
    tokens = tokenizer.encode(text)
    return tokens[:-1] if appends_end(tokenizer, text) else tokens


def _templated(messages: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[int]:
    conversation = [{"role": role, "content": content} for role, content in messages]
    apply = tokenizer.apply_chat_template  # type: ignore[attr-defined]  # transformers' own, beyond the protocol
    try:
        tokens: list[int] = apply(conversation, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as exc:  # a template is a program that came with the model: whatever it raises concerns this prompt
        raise DataError(f"the chat template refuses the prompt: {type(exc).__name__}: {exc}") from exc
    return tokens


def prompt_batch(
    prompts: Sequence[PromptInput], uids: Sequence[str], tokenizer: Tokenizer, *, chat_template: ChatTemplate = "auto"
) -> DataProto:
    """Jagged `prompts` [B, *] int64 (see `prompt_tokens`) and `uid`. DataError names the prompt that cannot be encoded."""
    rows = []
    for uid, prompt in zip(uids, prompts, strict=True):
        try:
            rows.append(prompt_tokens(prompt, tokenizer, chat_template=chat_template))
        except DataError as exc:
            raise DataError(f"prompt {uid}: {exc}") from exc
    return DataProto({"prompts": _jagged_ids(rows)}, {"uid": list(uids)})


def supervised_batch(
    prompts: Sequence[PromptInput], responses: Sequence[str], tokenizer: Tokenizer, *, chat_template: ChatTemplate = "auto"
) -> DataProto:
    """Jagged `input_ids`, `responses` (the end-of-sequence token included) and an all-ones `response_mask`."""
    prompt_ids = _jagged_ids([prompt_tokens(prompt, tokenizer, chat_template=chat_template) for prompt in prompts])
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

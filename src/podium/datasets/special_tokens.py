"""What there is to remark about prompts and a tokenizer's special tokens: text that spells them, and an end behind a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from podium.datasets.batches import ChatTemplate, PromptInput, appends_end


def special_token_remarks(
    prompts: Iterable[tuple[str, PromptInput]], tokenizer: PreTrainedTokenizerBase, *, chat_template: ChatTemplate = "auto"
) -> list[str]:
    """Warnings about prompts, each of which comes with the name of its row; the first row is named.

    Text such as `<s>` becomes the special token, so a prompt that spells some was probably rendered with a chat template before.
    """
    pattern = _pattern(tokenizer)
    named = [(uid, [prompt] if isinstance(prompt, str) else [content for _, content in prompt]) for uid, prompt in prompts]
    found = [(uid, match[0]) for uid, texts in named if pattern and (match := pattern.search("\n".join(texts)))]
    remarks = []
    if found:
        uid, token = found[0]
        is_rendered = tokenizer.chat_template is not None and chat_template != "never"
        remarks.append(
            f"{len(found)} of {len(named)} prompts spell special tokens of the tokenizer, which the policy reads as such "
            f"(the first: {uid}, {token!r})"
            + (f"; a second {tokenizer.bos_token!r} at the beginning is left out" if token == tokenizer.bos_token else "")
            + ("; if they were rendered with a chat template before, set task.chat_template=never" if is_rendered else "")
        )
    is_plain = tokenizer.chat_template is None or chat_template == "never"
    if is_plain and named and appends_end(tokenizer, "\n\n".join(named[0][1])):
        remarks.append(
            f"the tokenizer puts {tokenizer.eos_token!r} behind a text; it is left off every prompt (the first: {named[0][0]})"
        )
    return remarks


def _pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Finds the text of a special token; None for a tokenizer without any."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    texts = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None

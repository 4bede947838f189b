"""Sorting two words by their letters, in the order that the prompt asks for."""

from __future__ import annotations

from podium.config import RunConfig, TaskConfig
from podium.recipes.char_llama import char_llama_run


def word_sorting() -> RunConfig:
    """Two words of three to five letters, ascending (a) or descending (d)."""
    return char_llama_run(
        "word_sorting",
        "GRPO lifts it from about 20 % to over 85 % of two words sorted as asked, ascending or descending; 4 minutes",
        TaskConfig(
            name="word_sorting",
            params={"min_words": 2, "max_words": 2, "min_word_length": 3, "max_word_length": 5},
            prompt_pattern=r"in ([ad])\w+ order .* list: (.+)\n",
            num_train=8192,
            num_validation=128,
            num_held_out=256,
        ),
        warmup_steps=1500,
        answer_share=0.4,
        max_new_tokens=14,
        total_steps=120,
    )

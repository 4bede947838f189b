"""The recipe to begin with: a character-level Llama learns to spell words backward, on a laptop's CPU."""

from __future__ import annotations

from podium.config import RunConfig, TaskConfig
from podium.recipes.char_llama import char_llama_run


def spell_backward() -> RunConfig:
    """Words of three to seven letters."""
    return char_llama_run(
        "spell_backward",
        "GRPO lifts a 0.25 M character Llama from 10-30 % to over 90 % of words spelled backward; 2 minutes on a CPU",
        TaskConfig(
            name="spell_backward",
            params={"min_word_len": 3, "max_word_len": 7},
            prompt_pattern=r": (\w+)$",
            num_train=8192,
            num_validation=128,
            num_held_out=256,
        ),
        warmup_steps=900,
        answer_share=0.4,
        max_new_tokens=10,
        total_steps=80,
    )

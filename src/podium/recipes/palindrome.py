"""Making a palindrome of given letters: several answers are right, and the verifier knows them all."""

from __future__ import annotations

from podium.config import RunConfig, TaskConfig
from podium.recipes.char_llama import char_llama_run


def palindrome() -> RunConfig:
    """Three to six letters, all of which the answer must use."""
    return char_llama_run(
        "palindrome",
        "GRPO lifts it from under 10 % to over 90 % of palindromes made of given letters (several are right); 3 minutes",
        TaskConfig(
            name="palindrome_generation",
            params={"min_length": 3, "max_length": 6},
            prompt_pattern=r": ([a-z, ]+)\n?$",
            num_train=4096,
            num_validation=128,
            num_held_out=256,
        ),
        warmup_steps=900,
        answer_share=0.4,
        max_new_tokens=10,
        total_steps=80,
    )

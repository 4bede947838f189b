from __future__ import annotations

import pytest

from podium.config import ModelConfig
from podium.datasets import StepSampler, prompt_batch, supervised_batch
from podium.errors import DataError
from podium.models import load_tokenizer
from podium.protocol.jagged import lengths_of


def test_every_epoch_holds_every_problem_once():
    sampler = StepSampler(num_problems=10, batch_size=4, seed=3)
    drawn = [row for step in range(10) for row in sampler.rows(step)]
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_step_depends_on_seed_and_step_only():
    one, other = (StepSampler(num_problems=10, batch_size=4, seed=3) for _ in range(2))
    backwards = {step: one.rows(step) for step in reversed(range(8))}
    assert all(other.rows(step) == backwards[step] for step in range(8))
    assert StepSampler(num_problems=10, batch_size=4, seed=4).rows(0) != one.rows(0)


def test_a_supervised_row_is_prompt_response_and_end():
    tokenizer = load_tokenizer(ModelConfig(path="char_llama"))
    batch = supervised_batch(["ab\n", "c\n"], ["ba", "c"], tokenizer)
    bos, eos, newline = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.encode("\n", add_special_tokens=False)[0]
    a, b, c = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abc")
    assert batch.batch["input_ids"].values().tolist() == [bos, a, b, newline, b, a, eos, bos, c, newline, c, eos]
    assert batch.batch["responses"].values().tolist() == [b, a, eos, c, eos]
    assert batch.batch["response_mask"].values().tolist() == [1] * 5
    assert lengths_of(batch.batch["input_ids"]).tolist() == [7, 5]


def test_prompts_carry_their_uid_and_an_empty_one_is_refused():
    tokenizer = load_tokenizer(ModelConfig(path="char_llama"))
    batch = prompt_batch(["ab", "c"], ["u0", "u1"], tokenizer)
    assert lengths_of(batch.batch["prompts"]).tolist() == [3, 2]
    assert batch.non_tensor_batch["uid"].tolist() == ["u0", "u1"]

    class Silent:
        eos_token_id = 0

        def encode(self, text, *, add_special_tokens=True):
            return []

    with pytest.raises(DataError, match="u0"):
        prompt_batch(["ab"], ["u0"], Silent())

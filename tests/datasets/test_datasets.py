from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from podium.config import ModelConfig
from podium.datasets import StepSampler, prompt_batch, prompt_tokens, special_token_remarks, supervised_batch
from podium.errors import DataError
from podium.models import load_tokenizer
from podium.protocol.jagged import lengths_of
from podium.tasks import Message


def test_every_epoch_holds_every_problem_once():
    sampler = StepSampler(num_problems=10, batch_size=4, seed=3)
    drawn = [row for step in range(10) for row in sampler.rows(step)]
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 3))
def test_no_step_holds_a_problem_twice_and_no_epoch_leaves_one_out(num_problems, batch_size, seed):
    if batch_size > num_problems:
        with pytest.raises(DataError, match="cannot be drawn"):
            StepSampler(num_problems=num_problems, batch_size=batch_size, seed=seed)
        return
    sampler = StepSampler(num_problems=num_problems, batch_size=batch_size, seed=seed)
    steps = [sampler.rows(step) for step in range(4 * num_problems // batch_size)]
    assert all(len(set(rows)) == batch_size for rows in steps)
    drawn = [row for rows in steps for row in rows]
    for start in range(0, len(drawn) - num_problems + 1, num_problems):
        assert sorted(drawn[start : start + num_problems]) == list(range(num_problems))
    late = StepSampler(num_problems=num_problems, batch_size=batch_size, seed=seed)
    assert [late.rows(step) for step in reversed(range(len(steps)))] == steps[::-1]


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


# -- chat templates -----------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
MESSAGES = (Message("system", "Be brief."), Message("user", "1+1?"))


@pytest.fixture
def tokenizers():
    """The same tokenizer without and with a chat template."""
    plain, chat = (load_tokenizer(ModelConfig(path="char_llama")) for _ in range(2))
    chat.chat_template = TEMPLATE
    return plain, chat


@pytest.mark.parametrize(
    ("prompt", "chat_template", "has_template", "expected"),
    [
        (MESSAGES, "auto", True, "[system] Be brief.\n[user] 1+1?\n[assistant] "),
        (MESSAGES, "always", True, "[system] Be brief.\n[user] 1+1?\n[assistant] "),
        ("1+1?", "auto", True, "[user] 1+1?\n[assistant] "),
        ("1+1?", "always", True, "[user] 1+1?\n[assistant] "),
        ("1+1?", "auto", False, "<bos>1+1?"),
        ("1+1?", "never", True, "<bos>1+1?"),
        (MESSAGES, "never", False, "<bos>Be brief.\n\n1+1?"),
    ],
)
def test_what_the_policy_sees_of_a_prompt(tokenizers, prompt, chat_template, has_template, expected):
    tokenizer = tokenizers[has_template]
    tokens = prompt_tokens(prompt, tokenizer, chat_template=chat_template)
    assert all(isinstance(token, int) for token in tokens)  # transformers 5 gives a BatchEncoding by default
    assert tokenizer.decode(tokens) == expected
    batch = prompt_batch([prompt], ["u0"], tokenizer, chat_template=chat_template)
    assert batch.batch["prompts"].values().tolist() == tokens


@pytest.mark.parametrize(("prompt", "chat_template"), [(MESSAGES, "auto"), (MESSAGES, "always"), ("1+1?", "always")])
def test_a_template_that_is_needed_and_not_there(tokenizers, prompt, chat_template):
    with pytest.raises(DataError, match=r"prompt u0: .* needs a chat template, .*task\.chat_template=never"):
        prompt_batch([prompt], ["u0"], tokenizers[0], chat_template=chat_template)


def test_a_prompt_that_the_template_refuses(tokenizers):
    with pytest.raises(DataError, match="the chat template refuses the prompt: TemplateError: no tools here"):
        prompt_tokens((Message("tool", "x"),), tokenizers[1])


def test_a_supervised_row_of_a_conversation_is_template_response_and_end(tokenizers):
    batch = supervised_batch([MESSAGES], ["2"], tokenizers[1])
    assert tokenizers[1].decode(batch.batch["input_ids"].values()) == "[system] Be brief.\n[user] 1+1?\n[assistant] 2<eos>"
    assert tokenizers[1].decode(batch.batch["responses"].values()) == "2<eos>"


# -- special tokens -------------------------------------------------------------------------------------------------------

WORDS = ("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "hi", "there", "user", ":")


def word_tokenizer(around: str, *, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, with a post-processor as Llama's: `around` is its template, such as `<s> $A`."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 0), ("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=["[INST]", "[/INST]"]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


RENDERED = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


@pytest.mark.parametrize(
    ("around", "template", "prompt", "expected"),
    [
        ("<s> $A", None, "hi there", "<s> hi there"),
        ("<s> $A", None, "<s> hi", "<s> hi"),  # rendered before
        ("<s> $A </s>", None, "hi there", "<s> hi there"),
        ("<s> $A </s>", None, "<s> hi </s>", "<s> hi </s>"),  # the end is the user's own
        ("$A </s>", None, "<s> hi", "<s> hi"),
        ("$A", None, "hi", "hi"),
        ("<s> $A </s>", RENDERED, "hi", "<s> [INST] hi [/INST]"),  # a template's text gets no further tokens
        ("<s> $A </s>", "{{ bos_token }}{{ messages[0].content }}", "<s> hi", "<s> hi"),
    ],
)
def test_a_prompt_begins_once_and_does_not_end(around, template, prompt, expected):
    tokenizer = word_tokenizer(around, chat_template=template)
    assert tokenizer.decode(prompt_tokens(prompt, tokenizer)) == expected
    row = supervised_batch([prompt], ["there"], tokenizer)
    assert tokenizer.decode(row.batch["input_ids"].values()) == f"{expected} there</s>".replace("there</s>", "there </s>")


def test_special_tokens_in_prompts_or_appended_by_the_tokenizer_give_a_remark():
    prompts = [("a.jsonl:1", "hi"), ("a.jsonl:2", "<s> hi"), ("a.jsonl:3", (Message("user", "[INST] hi"),))]
    assert special_token_remarks(prompts[:1], word_tokenizer("<s> $A")) == []
    spelt, ends = special_token_remarks(prompts, word_tokenizer("<s> $A </s>"))
    assert spelt == (
        "2 of 3 prompts spell special tokens of the tokenizer, which the policy reads as such (the first: a.jsonl:2, '<s>'); "
        "a second '<s>' at the beginning is left out"
    )
    assert ends == "the tokenizer puts '</s>' behind a text; it is left off every prompt (the first: a.jsonl:1)"
    (spelt,) = special_token_remarks(prompts[2:], word_tokenizer("<s> $A </s>", chat_template=RENDERED))
    assert "(the first: a.jsonl:3, '[INST]')" in spelt
    assert spelt.endswith("if they were rendered with a chat template before, set task.chat_template=never")
    (spelt,) = special_token_remarks(prompts[2:], word_tokenizer("<s> $A", chat_template=RENDERED), chat_template="never")
    assert "rendered" not in spelt


def test_a_run_that_stops_at_the_end_of_an_epoch_goes_on_with_the_next():
    """J2: 10 rows, batches of 2, stopped after step 5; a new sampler draws steps 6 to 10 as the old one would."""
    whole = [StepSampler(num_problems=10, batch_size=2, seed=1).rows(step) for step in range(10)]
    resumed = StepSampler(num_problems=10, batch_size=2, seed=1)
    assert [resumed.rows(step) for step in range(5, 10)] == whole[5:]
    assert sorted(row for step in whole[5:] for row in step) == list(range(10))

"""The hf rollout: its columns, its randomness, who is in a batch when, weights and versions, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from podium.config.schema import SamplingConfig
from podium.errors import DataError, RolloutError, StaleWeightsError
from podium.protocol import DataProto, pad_dataproto_to_divisor, without_padding
from podium.protocol.jagged import parts
from podium.weights import named_weights
from tests.rollout.builders import EOS, RAGGED, batch_of, forward_shapes, hf_rollout, llama, recomputed, rollout_of, rows_of

SAMPLED = SamplingConfig(max_new_tokens=8, n=4)
GREEDY = SamplingConfig(n=1, max_new_tokens=8, temperature=0.0)


def samples(data: DataProto) -> dict[tuple[str, int], tuple[int, ...]]:
    keys = zip(data.non_tensor_batch["uid"].tolist(), data.batch["sample_index"].tolist(), strict=True)
    return dict(zip(keys, map(tuple, rows_of(data, "responses")), strict=True))


# -- columns --------------------------------------------------------------------------------------------------------------


def test_columns_fit_together() -> None:
    out = rollout_of(llama()).generate(batch_of(), SAMPLED, seed=0, step=0)
    assert len(out) == 16
    assert out.meta_info == {"step": 7}
    assert out.non_tensor_batch["uid"].tolist() == [f"uid-{row}" for row in range(4) for _ in range(4)]
    assert out.batch["sample_index"].tolist() == [0, 1, 2, 3] * 4
    assert out.batch["weight_version"].tolist() == [0] * 16
    assert rows_of(out, "prompts") == [prompt for prompt in RAGGED for _ in range(4)]
    joined = zip(rows_of(out, "prompts"), rows_of(out, "responses"), strict=True)
    assert rows_of(out, "input_ids") == [prompt + response for prompt, response in joined]
    assert rows_of(out, "response_mask") == [[1] * len(response) for response in rows_of(out, "responses")]
    assert out.batch["rollout_log_probs"].dtype == torch.float32
    offsets = {id(parts(out.batch[name])[1]) for name in ("responses", "response_mask", "rollout_log_probs")}
    assert len(offsets) == 1
    assert (out.batch["rollout_log_probs"] * out.batch["response_mask"]).values().max() <= 0


def test_the_end_token_belongs_to_the_response_and_gives_the_reason() -> None:
    out = rollout_of(llama()).generate(batch_of(), SamplingConfig(max_new_tokens=8, n=16), seed=0, step=0)
    reasons = out.non_tensor_batch["finish_reason"].tolist()
    assert set(reasons) == {"stop", "length"}
    for response, reason in zip(rows_of(out, "responses"), reasons, strict=True):
        assert EOS not in response[:-1]
        assert (response[-1] == EOS) == (reason == "stop")
        assert len(response) == 8 or reason == "stop"


def test_no_prompts_give_no_rows_but_every_column() -> None:
    rollout = rollout_of(llama())
    some = rollout.generate(batch_of(), SAMPLED, seed=0, step=0)
    none = rollout.generate(batch_of()[:0], SAMPLED, seed=0, step=0)
    assert len(none) == 0
    assert {name: column.dtype for name, column in none.batch.items()} == {n: c.dtype for n, c in some.batch.items()}
    assert none.non_tensor_batch.keys() == some.non_tensor_batch.keys()
    assert len(DataProto.concat([none, some])) == 16


# -- log-probs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_log_probs_are_those_of_a_full_forward_pass(dtype: torch.dtype, tolerance: float, temperature: float) -> None:
    model = llama(dtype=dtype)
    sampling = SamplingConfig(max_new_tokens=12, n=3, temperature=temperature, top_p=0.9, top_k=20)
    out = rollout_of(model).generate(batch_of(), sampling, seed=0, step=0)
    for mine, theirs in zip(out.batch["rollout_log_probs"].unbind(), recomputed(model, out, temperature), strict=True):
        assert mine.dtype == dtype
        assert torch.allclose(mine, theirs, rtol=0, atol=tolerance)


def test_bfloat16_log_probs_are_float32_and_near() -> None:
    model = llama(dtype=torch.bfloat16)
    out = rollout_of(model).generate(batch_of(), SAMPLED, seed=0, step=0)
    assert out.batch["rollout_log_probs"].dtype == torch.float32
    model.float()
    for mine, theirs in zip(out.batch["rollout_log_probs"].unbind(), recomputed(model, out, 1.0), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=0.3)


def test_results_can_enter_a_gradient() -> None:
    out = rollout_of(llama()).generate(batch_of(), SAMPLED, seed=0, step=0)
    weight = torch.ones((), requires_grad=True)
    (weight * out.batch["rollout_log_probs"].values()).sum().backward()
    assert weight.grad is not None


# -- randomness -----------------------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_differ_and_come_again() -> None:
    rollout = rollout_of(llama())
    first = samples(rollout.generate(batch_of(), SAMPLED, seed=5, step=1))
    assert all(len({first[f"uid-{row}", index] for index in range(4)}) == 4 for row in range(4))
    assert samples(rollout.generate(batch_of(), SAMPLED, seed=5, step=1)) == first
    assert samples(rollout.generate(batch_of(), SAMPLED, seed=6, step=1)) != first
    assert samples(rollout.generate(batch_of(), SAMPLED, seed=5, step=2)) != first


@pytest.mark.parametrize("max_rows", [1, 3, 7, 16])
def test_samples_do_not_depend_on_max_rows(max_rows: int) -> None:
    whole = rollout_of(llama()).generate(batch_of(), SAMPLED, seed=0, step=0)
    parted = rollout_of(llama(), max_rows=max_rows).generate(batch_of(), SAMPLED, seed=0, step=0)
    assert samples(parted) == samples(whole)


def test_samples_do_not_depend_on_order_or_company() -> None:
    rollout, batch = rollout_of(llama()), batch_of()
    whole = samples(rollout.generate(batch, SAMPLED, seed=0, step=0))
    assert samples(rollout.generate(batch.select_idxs([2, 0, 3, 1]), SAMPLED, seed=0, step=0)) == whole
    for rows in ([0, 2], [1], [3, 1]):
        part = samples(rollout.generate(batch.select_idxs(rows), SAMPLED, seed=0, step=0))
        assert part == {key: tokens for key, tokens in whole.items() if int(key[0][-1]) in rows}
    fewer = samples(rollout.generate(batch, SAMPLED.model_copy(update={"n": 2}), seed=0, step=0))
    assert fewer == {key: tokens for key, tokens in whole.items() if key[1] < 2}


def test_first_tokens_fit_the_models_distribution() -> None:
    """Chi-square over the 6 tokens of a tiny vocabulary; with 5 degrees of freedom 20.5 is passed once in a thousand seeds."""
    model = llama(vocab_size=6)
    out = rollout_of(model).generate(batch_of([[3, 4]]), SamplingConfig(max_new_tokens=1, n=3000), seed=0, step=0)
    counts = torch.bincount(out.batch["responses"].values(), minlength=6)
    expected = model(input_ids=torch.tensor([[3, 4]])).logits[0, -1].softmax(-1).detach() * 3000
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


# -- batches --------------------------------------------------------------------------------------------------------------


def test_a_prompt_is_prefilled_once_and_ended_rows_leave() -> None:
    model = llama()
    rollout = rollout_of(model)
    with forward_shapes(model) as shapes:
        out = rollout.generate(batch_of(), SamplingConfig(max_new_tokens=20, n=16), seed=0, step=0)
    lengths = torch.tensor([len(response) for response in rows_of(out, "responses")])
    alive = [int((lengths > t).sum()) for t in range(1, int(lengths.max()))]
    assert shapes == [(4, 10), *((rows, 1) for rows in alive)]
    assert alive[-1] < 64


def test_max_rows_bounds_a_batch() -> None:
    model = llama()
    rollout = rollout_of(model, max_rows=6)
    with forward_shapes(model) as shapes:
        rollout.generate(batch_of(), SAMPLED, seed=0, step=0)
    assert max(rows for rows, _ in shapes) <= 6
    assert sum(tokens > 1 for _, tokens in shapes) <= 3  # 16 rows in three nearly equal batches


# -- keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uids", [[7, 8], np.array([7, 8]), np.array([7, 8], dtype=np.uint8), ["7", "8"]])
def test_integers_of_every_type_draw_the_same_tokens(uids: Any) -> None:
    rollout, prompts = rollout_of(llama()), batch_of([[3, 4], [5]], uids=["7", "8"])
    expected = rollout.generate(prompts, SAMPLED, seed=1, step=4)
    other = DataProto({"prompts": prompts.batch["prompts"]}, {"uid": list(uids)})
    found = rollout.generate(other, SAMPLED, seed=np.int64(1), step=np.int32(4))
    assert rows_of(found, "responses") == rows_of(expected, "responses")


@pytest.mark.parametrize("uid", [None, 7.0, np.float64(7), True, np.True_])
def test_a_uid_that_cannot_name_a_prompt_is_refused(uid: Any) -> None:
    with pytest.raises(DataError, match="uid of row 1"):
        rollout_of(llama()).generate(batch_of([[3], [4]], uids=["a", uid]), SAMPLED, seed=0, step=0)


# -- padding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_prompts", [3, 1])
def test_padding_rows_are_not_answered(num_prompts: int) -> None:
    """Five prompts filled up to eight: the copies have the uid of the fifth, and every response is that of real rows alone."""
    rollout, prompts = rollout_of(llama()), batch_of(RAGGED[:num_prompts])
    expected = rollout.generate(prompts, SAMPLED, seed=0, step=0)
    padded = pad_dataproto_to_divisor(prompts, 4)[0]
    for rows in (padded, padded[::-1], padded[num_prompts:]):
        with forward_shapes(rollout._model) as shapes:
            found = rollout.generate(rows, SAMPLED, seed=0, step=0)
        assert found.padding_mask.tolist() == rows.padding_mask.repeat_interleave(SAMPLED.n).tolist()
        assert rows_of(found[found.padding_mask], "responses") == [[]] * (int(rows.padding_mask.sum()) * SAMPLED.n)
        real, order = without_padding(found), without_padding(rows).non_tensor_batch["uid"].tolist()
        assert real.non_tensor_batch["uid"].tolist() == [uid for uid in order for _ in range(SAMPLED.n)]
        if not order:
            assert not shapes
            assert {key: column.dtype for key, column in found.batch.items()} == {
                key: column.dtype for key, column in expected.batch.items()
            }
        elif rows is padded:
            assert real.batch.keys() == expected.batch.keys()
            for key, column in expected.batch.items():
                assert torch.equal(*(parts(one)[0] if one.is_nested else one for one in (real.batch[key], column))), key
            assert real.non_tensor_batch["finish_reason"].tolist() == expected.non_tensor_batch["finish_reason"].tolist()


# -- stop strings ---------------------------------------------------------------------------------------------------------


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in tokens)


def test_a_stop_string_ends_the_response_across_tokens_and_stays_in_it() -> None:
    rollout = rollout_of(llama(vocab_size=8), eos_token_ids=(), detokenize=letters)
    free = rollout.generate(batch_of([[3, 4]]), SamplingConfig(max_new_tokens=12, n=20), seed=0, step=0)
    stopped = rollout.generate(batch_of([[3, 4]]), SamplingConfig(max_new_tokens=12, n=20, stop=("ab", "cc")), seed=0, step=0)
    reasons = stopped.non_tensor_batch["finish_reason"].tolist()
    assert set(reasons) == {"stop", "length"}
    for whole, cut, reason in zip(rows_of(free, "responses"), rows_of(stopped, "responses"), reasons, strict=True):
        ends = [end for end in range(1, 13) if letters(whole[:end]).endswith(("ab", "cc"))]
        assert cut == whole[: min(ends, default=12)]
        assert reason == ("stop" if ends else "length")


def test_a_stop_string_that_names_a_special_token_ends_the_response_at_it() -> None:
    """Token 3 is <mark>; the text leaves it out, so "<" alone never stops there."""

    def text(tokens: Sequence[int]) -> str:
        return letters([token for token in tokens if token != 3])

    rollout = rollout_of(llama(vocab_size=8), eos_token_ids=(), detokenize=text, special_tokens={"<mark>": 3})
    free, part, whole = (
        rollout.generate(batch_of([[3, 4]]), SamplingConfig(max_new_tokens=12, n=20, stop=stop), seed=0, step=0)
        for stop in ((), ("<", "mark"), ("<mark>",))
    )
    assert rows_of(part, "responses") == rows_of(free, "responses")
    for response, ended in zip(rows_of(free, "responses"), rows_of(whole, "responses"), strict=True):
        assert ended == response[: response.index(3) + 1 if 3 in response else 12]
    reasons = ["stop" if 3 in response else "length" for response in rows_of(free, "responses")]
    assert whole.non_tensor_batch["finish_reason"].tolist() == reasons
    assert "stop" in reasons


def test_text_is_made_only_for_stop_strings() -> None:
    def refuse(tokens: Sequence[int]) -> str:
        raise AssertionError(tokens)

    rollout_of(llama(), detokenize=refuse).generate(batch_of(), SAMPLED, seed=0, step=0)


# -- weights and versions -------------------------------------------------------------------------------------------------


def test_new_weights_and_buffers_are_used_and_old_ones_are_not() -> None:
    trainer, rollout = llama(seed=1), rollout_of(llama(seed=0))
    rollout.update_weights(named_weights(trainer), version=1)
    before = rollout.generate(batch_of(), GREEDY, seed=0, step=0)
    assert rows_of(before, "responses") == rows_of(
        rollout_of(llama(seed=1)).generate(batch_of(), GREEDY, seed=0, step=0), "responses"
    )

    trainer.model.rotary_emb.inv_freq.mul_(5)  # not in state_dict
    assert rows_of(rollout.generate(batch_of(), GREEDY, seed=0, step=0), "responses") == rows_of(before, "responses")
    rollout.update_weights(named_weights(trainer), version=2)
    after = rollout.generate(batch_of(), GREEDY, seed=0, step=0)
    assert rows_of(after, "responses") != rows_of(before, "responses")
    assert after.batch["weight_version"].tolist() == [2] * 4
    for mine, theirs in zip(after.batch["rollout_log_probs"].unbind(), recomputed(trainer, after, 1.0), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5)


def test_training_the_source_changes_nothing_until_the_next_update() -> None:
    trainer, rollout = llama(seed=1, tie_word_embeddings=True), rollout_of(llama(seed=0, tie_word_embeddings=True))
    rollout.update_weights(named_weights(trainer), version=1)
    before = rollout.generate(batch_of(), SAMPLED, seed=0, step=0)
    with torch.no_grad():
        trainer.lm_head.weight.add_(torch.randn_like(trainer.lm_head.weight))
    assert samples(rollout.generate(batch_of(), SAMPLED, seed=0, step=0)) == samples(before)
    rollout.update_weights(named_weights(trainer), version=2)
    after = rollout.generate(batch_of(), SAMPLED, seed=0, step=0)
    for mine, theirs in zip(after.batch["rollout_log_probs"].unbind(), recomputed(trainer, after, 1.0), strict=True):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-5)


def test_versions_are_required() -> None:
    rollout = hf_rollout(llama())
    with pytest.raises(StaleWeightsError, match=r"no weights yet.*call update_weights\(\)"):
        rollout.generate(batch_of(), GREEDY, seed=0, step=0)
    rollout.update_weights(named_weights(llama()), version=3)
    assert rollout.require_version(3) == rollout.require_version() == 3
    with pytest.raises(StaleWeightsError, match=r"version 3, expected 4; call update_weights\(\)"):
        rollout.require_version(4)


def test_after_half_a_copy_no_version_is_held() -> None:
    rollout = rollout_of(llama())
    with pytest.raises(RolloutError, match="ended without"):
        rollout.update_weights(list(named_weights(llama(seed=1)))[:3], version=1)
    assert rollout.version is None
    with pytest.raises(StaleWeightsError):
        rollout.generate(batch_of(), GREEDY, seed=0, step=0)


def test_a_buffer_that_a_forward_pass_replaces_can_be_synced_again() -> None:
    """Some rotary embeddings put a new buffer in place as rows grow; made under inference_mode it could not be written."""

    def replace(rotary: nn.Module, _: object) -> None:
        rotary.register_buffer("inv_freq", rotary.inv_freq * 1.0, persistent=False)

    model = llama()
    model.model.rotary_emb.register_forward_pre_hook(replace)
    rollout = rollout_of(model)
    rollout.generate(batch_of(), GREEDY, seed=0, step=0)
    rollout.update_weights(named_weights(llama(seed=1)), version=1)
    assert rollout.version == 1


def test_dropout_is_off_and_every_module_keeps_its_mode() -> None:
    model = llama(attention_dropout=0.9).train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    rollout = rollout_of(model)
    first = rollout.generate(batch_of(), SAMPLED, seed=0, step=0)
    assert samples(rollout.generate(batch_of(), SAMPLED, seed=0, step=0)) == samples(first)
    assert [module.training for module in model.modules()] == modes


# -- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of([[3], []], ["x", "y"]), "prompt of row 'y' is empty"),
        (batch_of([[3] * 57]), "'uid-0' has 57 tokens; with 8 new ones that is more than the model's 64 positions"),
        (batch_of([[3], [4]], ["x", "x"]), "uid 'x' is on 2 prompts"),
        (DataProto({"input_ids": torch.ones(1, 2)}, {"uid": ["a"]}), "tensor column 'prompts'"),
        (DataProto({"prompts": batch_of([[3]]).batch["prompts"]}), "object column 'uid'"),
    ],
)
def test_prompts_that_cannot_be_answered_are_named(batch: DataProto, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rollout_of(llama()).generate(batch, GREEDY, seed=0, step=0)


def test_a_prompt_that_just_fits_is_answered() -> None:
    assert len(rollout_of(llama()).generate(batch_of([[3] * 56]), GREEDY, seed=0, step=0)) == 1


def test_nan_weights_are_named() -> None:
    model = llama()
    rollout = rollout_of(model)
    with torch.no_grad():
        model.lm_head.weight[5, 0] = float("nan")
    for sampling in (SAMPLED, GREEDY, SamplingConfig(max_new_tokens=8, top_k=3)):
        with pytest.raises(RolloutError, match=r"not finite, first in sample 0 of prompt 'uid-0'"):
            rollout.generate(batch_of(), sampling, seed=0, step=0)

"""The workers through their group, as a driver uses them."""

from __future__ import annotations

import pytest
import torch

from podium.algorithms import SFTLoss
from podium.config import (
    ActorConfig,
    FSDP2Config,
    HFRolloutConfig,
    ModelConfig,
    OptimConfig,
    SamplingConfig,
)
from podium.datasets import prompt_batch, supervised_batch
from podium.errors import ConfigError, WorkerError
from podium.models import load_tokenizer
from podium.protocol import DataProto, jagged_from_rows
from podium.protocol.jagged import jagged, offsets_of, parts
from podium.single_controller import Init, ResourcePool, WorkerGroup
from podium.workers import ActorRolloutRefWorker, PolicySpec, TrainingSpec, TrainingWorker

MODEL = ModelConfig(path="char_llama", override_config={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1})
OPTIM = OptimConfig(lr=1e-2)
TOKENIZER = load_tokenizer(MODEL)


@pytest.fixture
def policy():
    spec = PolicySpec(
        model=MODEL,
        actor=ActorConfig(optim=OPTIM, mini_batch_prompts=1),
        rollout=HFRolloutConfig(sampling=SamplingConfig(max_new_tokens=4, n=2)),
        total_optimizer_steps=10,
        seed=0,
    )
    with WorkerGroup(ResourcePool([1]), Init(ActorRolloutRefWorker, spec), runtime="inline", threads_per_rank=1) as group:
        yield group.call


@pytest.fixture
def trainer():
    spec = TrainingSpec(MODEL, FSDP2Config(), OPTIM, total_steps=10, seed=0)
    with WorkerGroup(ResourcePool([1]), Init(TrainingWorker, spec), runtime="inline", threads_per_rank=1) as group:
        yield group.call


def prompts(step: int = 1) -> DataProto:
    batch = prompt_batch(["ab\n", "xyz\n"], ["u0", "u1"], TOKENIZER)
    batch.meta_info["step"] = step
    return batch


def to_learn(rollouts: DataProto) -> DataProto:
    """Rows with made-up advantages, in two mini-batches and one epoch."""
    offsets = parts(rollouts.batch["responses"])[1]
    advantages = torch.linspace(-1, 1, int(offsets[-1]))
    batch = rollouts.select(["input_ids", "responses", "response_mask"], [], [])
    columns = {"old_log_probs": rollouts.batch["rollout_log_probs"], "advantages": jagged(advantages, offsets)}
    columns["mini_batch"] = torch.tensor([[0], [0], [1], [1]])
    return batch.union(DataProto(columns, meta_info={"num_mini_batches": 2}))


def test_generating_is_refused_until_the_weights_are_in_step(policy):
    with pytest.raises(WorkerError, match="StaleWeightsError"):
        policy.generate_sequences(prompts())
    assert policy.update_weights() == [0]
    rollouts = policy.generate_sequences(prompts())
    assert len(rollouts) == 4
    policy.update_actor(to_learn(rollouts.get()))
    with pytest.raises(WorkerError, match=r"version 0, expected 2; call update_weights"):
        policy.generate_sequences(prompts())
    assert policy.update_weights() == [2]
    assert policy.generate_sequences(prompts()).get().batch["weight_version"].tolist() == [2, 2, 2, 2]


def test_the_rollouts_log_probs_are_the_trainers(policy):
    policy.update_weights()
    rollouts = policy.generate_sequences(prompts())
    recomputed = policy.compute_log_prob(rollouts.select(["input_ids", "responses"], [], [])).get()
    drawn = rollouts.get(keys=["rollout_log_probs"])
    assert torch.allclose(parts(recomputed.batch["old_log_probs"])[0], parts(drawn.batch["rollout_log_probs"])[0], atol=1e-5)
    assert "log_prob_metrics" not in recomputed.meta_info


def test_the_workers_report_what_they_alone_have_the_tokens_for(policy):
    policy.update_weights()
    batch = policy.generate_sequences(prompts())
    drawn = parts(batch.get(keys=["rollout_log_probs"]).batch["rollout_log_probs"])[0]
    reported = batch.meta_info["rollout_metrics"].to_floats()
    assert reported == {"rollout/neg_log_prob": pytest.approx(-float(drawn.double().mean()))}

    shifted = parts(batch.get(keys=["rollout_log_probs"]).batch["rollout_log_probs"])[0]
    shifted[1] += 0.5
    off = DataProto({"rollout_log_probs": jagged(shifted, offsets_of(batch.lengths("responses")))})
    compared = policy.compute_log_prob(batch.select(["input_ids", "responses"], [], []).union(off))
    assert compared.column_names() == {"old_log_probs"}
    metrics = compared.meta_info["log_prob_metrics"].to_floats()
    assert metrics.pop("rollout/log_prob_gap_max") == pytest.approx(0.5, abs=1e-4)
    assert metrics.keys() == {"perf/layout/bucketed", "perf/layout/packed", "perf/layout/shared"}
    assert sum(metrics.values()) == pytest.approx(1.0), "shares of the rows, over all ranks"


def test_a_response_is_the_text_of_its_tokens_without_special_ones(policy):
    policy.update_weights()
    rows = policy.generate_sequences(prompts()).get(keys=["responses", "response"])
    tokens = [row.tolist() for row in rows.batch["responses"].unbind()]
    assert rows.non_tensor_batch["response"].tolist() == TOKENIZER.batch_decode(tokens, skip_special_tokens=True)
    ended = DataProto({"responses": jagged_from_rows([torch.tensor([*TOKENIZER("ab").input_ids, TOKENIZER.eos_token_id])])})
    assert policy._group.workers[0]._texts(ended) == ["ab"]


def test_a_stop_string_is_matched_in_the_text_without_special_tokens(policy):
    """The samples draw <bos> and <pad> by chance, whose names hold a "<"; the character itself ends a response."""
    policy.update_weights()

    def drawn(*stop: str) -> list[list[int]]:
        batch = prompts()
        batch.meta_info["sampling"] = SamplingConfig(max_new_tokens=24, n=40, stop=stop)
        return [row.tolist() for row in policy.generate_sequences(batch).get(keys=["responses"]).batch["responses"].unbind()]

    def cut(tokens: list[int]) -> list[int]:
        texts = [TOKENIZER.decode(tokens[:end], skip_special_tokens=True) for end in range(1, len(tokens) + 1)]
        return tokens[: next((end for end, text in enumerate(texts, 1) if "<" in text), len(tokens))]

    free, stopped = drawn(), drawn("<")
    assert stopped == [cut(tokens) for tokens in free]
    assert stopped != free
    assert any({TOKENIZER.bos_token_id, TOKENIZER.pad_token_id} & set(tokens[:-1]) for tokens in stopped)
    assert {
        tokens.index(TOKENIZER.bos_token_id) + 1 == len(tokens) for tokens in drawn("<bos>") if TOKENIZER.bos_token_id in tokens
    } == {True}


def test_an_update_reports_every_mini_batch_and_keeps_its_input(policy):
    policy.update_weights()
    batch = to_learn(policy.generate_sequences(prompts()).get())
    metrics = policy.update_actor(batch).meta_info["metrics"].to_floats()
    assert {"pg_loss", "pg_clipfrac", "ppo_kl", "grad_norm", "lr", "skipped_updates"} <= metrics.keys()
    assert "mini_batch" in batch.batch


def test_save_and_load_continue_bit_for_bit(policy, tmp_path):
    policy.update_weights()
    batch = to_learn(policy.generate_sequences(prompts()).get())
    (listed,) = policy.save_checkpoint(str(tmp_path))
    assert set(listed.files) == {path.name for path in tmp_path.iterdir()} == {"train.safetensors", "train.json"}
    first = policy.update_actor(batch).meta_info["metrics"].to_floats()
    policy.load_checkpoint(str(tmp_path))
    assert policy.update_actor(batch).meta_info["metrics"].to_floats() == first


@pytest.mark.parametrize("method", ["save_checkpoint", "save_hf"])
def test_a_folder_that_a_rank_does_not_see_is_an_error_and_is_not_made(trainer, tmp_path, method):
    """Rank 0 of another node made the folder on its own disk."""
    with pytest.raises(WorkerError, match=r"rank 0 on .* does not see the folder .*/gone, into which it should write"):
        getattr(trainer, method)(str(tmp_path / "gone"))
    assert not (tmp_path / "gone").exists()


def test_training_without_a_loss_says_so(trainer):
    batch = supervised_batch(["a\n"], ["a"], TOKENIZER)
    with pytest.raises(WorkerError, match="call set_loss_fn"):
        trainer.train_batch(batch)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"responses": torch.zeros(1, 2).long()}, r"column 'responses' is int64\[1, 2\], it should be int64 \[B, \*\]"),
        (
            {"input_ids": jagged(torch.ones(4), torch.tensor([0, 4]))},
            r"column 'input_ids' is float32\[1, \*\], it should be int64",
        ),
    ],
)
@pytest.mark.parametrize("method", ["train_batch", "train_mini_batch", "infer_batch"])
def test_columns_of_another_kind_are_refused_by_name(trainer, method, changed, reason):
    trainer.set_loss_fn(SFTLoss())
    batch = supervised_batch(["a\n"], ["a"], TOKENIZER)
    batch.batch |= {"mini_batch": torch.zeros(1, 1).long(), **changed}
    batch.meta_info["num_mini_batches"] = 1
    with pytest.raises(WorkerError, match=reason):
        getattr(trainer, method)(batch)


def test_mini_batches_are_numbered_per_epoch(trainer):
    batch = supervised_batch(["a\n"], ["a"], TOKENIZER)
    batch.batch["mini_batch"] = torch.zeros(1).long()
    with pytest.raises(WorkerError, match=r"column 'mini_batch' is int64\[1\], it should be int64 \[B, epochs\]"):
        trainer.train_mini_batch(batch)


def test_supervised_training_lowers_the_loss(trainer):
    trainer.set_loss_fn(SFTLoss())
    batch = supervised_batch(["ab\n", "cd\n"], ["ba", "dc"], TOKENIZER)
    losses = [trainer.train_batch(batch).meta_info["metrics"]["loss"].value for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("temperature", [0, -1.0, "hot"])
def test_a_temperature_that_is_not_a_positive_number_is_refused(trainer, temperature):
    batch = supervised_batch(["a\n"], ["a"], TOKENIZER)
    batch.meta_info["temperature"] = temperature
    with pytest.raises(WorkerError, match="temperature"):
        trainer.infer_batch(batch)


def test_an_unknown_role_is_refused():
    with pytest.raises(ConfigError, match=r"unknown role 'critic'.* Known: actor, actor_rollout"):
        ActorRolloutRefWorker(None, role="critic")  # type: ignore[arg-type]

"""GRPO's terms through whole runs and the trainer's steps: KL in loss and reward, entropy, epochs, rows without a score."""

from __future__ import annotations

import pytest
import torch

from podium.config import RunConfig, optimizer_steps_per_step
from podium.errors import DataError
from podium.protocol import DataProto, object_column, pad_dataproto_to_divisor
from podium.protocol.jagged import jagged, parts
from podium.single_controller import DataProtoFuture
from podium.trainers import PPOTrainer, RunDirectory
from podium.trainers.steps import advantage_estimator, with_advantages
from tests.trainers.builders import from_base, rows, small_config, train, weights

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")
TERMS = (
    "actor.use_kl_loss=true",
    "actor.kl_loss_coef=0.1",
    "actor.entropy_coeff=0.01",
    "actor.loss.clip_c=3",
    "actor.epochs=2",
    "actor.recompute_old_log_probs=true",
    "algorithm.use_kl_in_reward=true",
    "algorithm.adv_estimator.norm_by_std=false",
    "actor.loss_agg_mode=seq-mean-token-sum-norm",
    "actor.loss_scale_factor=10",
    "trainer.total_steps=3",
    "trainer.save_freq=1",
)


@pytest.fixture(scope="module")
def whole_run(base, tmp_path_factory):
    """All terms at once: the rows of the metrics, the weights, and the batches as they went into the updates."""
    batches: list[DataProto] = []
    update = PPOTrainer.update

    def recording(self: PPOTrainer, batch: DataProtoFuture):
        batches.append(batch.get())
        return update(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PPOTrainer, "update", recording)
        directory = train(from_base(tmp_path_factory.mktemp("whole"), base, *TERMS))
    return directory, batches


def test_a_run_with_every_term_reports_each(whole_run):
    steps = rows(whole_run[0])[1:]
    names = ("pg_loss", "kl_loss", "entropy_loss", "entropy", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "kl_clipfrac")
    for step in steps:
        assert {f"actor/{name}" for name in (*names, "reward_kl_penalty")} <= step.keys()
        assert step["actor/entropy"] > 0
    assert steps[0]["actor/reward_kl_penalty"] == 0.0  # the policy is still the reference
    assert steps[-1]["actor/reward_kl_penalty"] != 0.0
    assert 0 < steps[0]["actor/kl_loss"] < steps[-1]["actor/kl_loss"]


def test_a_resumed_run_equals_it_with_the_same_reference(whole_run, base, tmp_path, monkeypatch):
    """The reference is in no checkpoint: it is the start model again."""
    config, update = from_base(tmp_path, base, *TERMS), PPOTrainer.update

    def failing(self: PPOTrainer, batch: DataProtoFuture):
        if batch.meta_info["step"] == 2:
            raise KeyboardInterrupt
        return update(self, batch)

    monkeypatch.setattr(PPOTrainer, "update", failing)
    directory = RunDirectory.create(config)
    with pytest.raises(KeyboardInterrupt):
        train(config, directory)
    monkeypatch.undo()
    assert [row["step"] for row in rows(directory)] == [0, 1]
    train(config, directory)
    assert rows(directory) == rows(whole_run[0])
    assert weights(directory) == weights(whole_run[0])


def test_two_ranks_equal_one_within_rounding(base, tmp_path, ray_cluster):
    """Every term, epoch and mini-batch, with actor and reference sharded over two actors.

    float64 keeps rounding out of sight, and a larger epsilon keeps Adam from blowing it up where a gradient is tiny.
    """
    overrides = (*TERMS, "model.dtype=float64", "trainer.total_steps=2", "rollout.sampling.n=3", "actor.optim.eps=1e-4")
    one = train(from_base(tmp_path / "one", base, *overrides))
    two = train(from_base(tmp_path / "two", base, *overrides, "num_workers=2"))
    assert rows(one)[2]["actor/kl_loss"] > 0
    for expected, found in zip(rows(one), rows(two), strict=True):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_each_epoch_takes_every_prompt_once_and_later_ones_in_another_order(whole_run, base, tmp_path):
    """Two epochs of two mini-batches of four prompts: four optimizer steps, as the arithmetic says; whole prompts each."""
    config = from_base(tmp_path, base, *TERMS)
    assert optimizer_steps_per_step(config) == 4
    for step, batch in enumerate(whole_run[1]):
        assert batch.batch["weight_version"].unique().tolist() == [4 * step]
        assignments, uids = batch.batch["mini_batch"], batch.non_tensor_batch["uid"]
        assert assignments.shape == (8 * 4, 2)
        for epoch in range(2):
            members = [set(uids[(assignments[:, epoch] == number).numpy()]) for number in range(2)]
            assert [len(prompts) for prompts in members] == [4, 4]
            assert not members[0] & members[1]
    first, second = whole_run[1][0].batch["mini_batch"].T
    assert not torch.equal(first, second)
    assert not torch.equal(second, whole_run[1][1].batch["mini_batch"][:, 1])


def test_old_log_probs_are_the_references_as_long_as_nothing_was_learned(whole_run):
    first, last = whole_run[1][0], whole_run[1][-1]
    assert torch.equal(parts(first.batch["old_log_probs"])[0], parts(first.batch["ref_log_prob"])[0])
    assert not torch.equal(parts(last.batch["old_log_probs"])[0], parts(last.batch["ref_log_prob"])[0])


def test_without_terms_nothing_of_them_is_there(base, tmp_path):
    directory = train(from_base(tmp_path, base, "trainer.total_steps=1"))
    assert not any("kl_loss" in name or "entropy" in name or "reward_kl" in name for name in rows(directory)[1])


def test_a_straight_recipe_takes_a_kl_loss_with_one_setting(base, tmp_path):
    """The recipe drops rows of zero advantage; they are computed all the same where the KL term moves them."""
    metrics = rows(train(from_base(tmp_path, base, "actor.use_kl_loss=true", "trainer.total_steps=1")))[1]
    other = rows(
        train(from_base(tmp_path, base, "actor.use_kl_loss=true", "trainer.total_steps=1", "actor.drop_zero_advantage=false"))
    )[1]
    assert metrics == other
    assert metrics["actor/kl_loss"] >= 0


# -- the advantage step alone -----------------------------------------------------------------------------------------


def advantages(config: RunConfig, batch: DataProto) -> DataProto:
    estimator = advantage_estimator(config.algorithm)
    return with_advantages(DataProtoFuture.of(batch), config.algorithm, estimator).get()


def scored_batch() -> DataProto:
    """Prompts a and b in turn, two tokens a row."""
    offsets = torch.arange(0, 13, 2)
    columns = {name: jagged(torch.ones(12, dtype=torch.int64), offsets) for name in ("responses", "response_mask")}
    rewards = torch.tensor([1.0, 0.0, 3.0, 4.0, float("nan"), 2.0])
    columns |= {"rewards": rewards, "is_scored": torch.ones(6, dtype=torch.bool)}
    return DataProto(columns, {"uid": object_column(["a", "b"] * 3)})


def test_rows_without_a_score_are_in_no_baseline_and_no_loss(tmp_path):
    """Row 4 failed: prompt a has the rewards 1 and 3, mean 2."""
    config = small_config(tmp_path, "algorithm.adv_estimator.norm_by_std=false")
    batch = scored_batch()
    batch.batch["is_scored"][4] = False
    found = advantages(config, batch)
    assert found.batch["advantages"].tolist() == [-1.0, -2.0, 1.0, 2.0, 0.0, 0.0]
    assert parts(found.batch["response_mask"])[0].tolist() == [1] * 8 + [0, 0, 1, 1]
    assert found.batch["response_mask"].dtype == torch.int64


@pytest.mark.parametrize("kl", [False, True])
def test_rows_that_cannot_learn_are_in_no_baseline(tmp_path, kl):
    """Row 4 has a mask of zeros, row 5 no response and row 6 is padding: prompt a has the rewards 1 and 3, prompt b 0 and 4."""
    settings = ("algorithm.use_kl_in_reward=true", "algorithm.kl_coef=0.5") if kl else ()
    config = small_config(tmp_path, "algorithm.adv_estimator.norm_by_std=false", *settings)
    batch, offsets = scored_batch(), torch.tensor([0, 2, 4, 6, 8, 10, 10])
    mask = torch.tensor([1] * 8 + [0, 0])
    for name, values in {"responses": torch.ones(10, dtype=torch.int64), "response_mask": mask}.items():
        batch.batch[name] = jagged(values, offsets)
    batch.batch["rewards"] = torch.tensor([1.0, 0.0, 3.0, 4.0, 100.0, 200.0])
    if kl:
        batch.union(DataProto({name: jagged(torch.ones(10), offsets) for name in ("old_log_probs", "ref_log_prob")}))
    for one in (batch, pad_dataproto_to_divisor(batch, 7)[0]):
        found = advantages(config, one)
        assert found.batch["advantages"].tolist() == [-1.0, -2.0, 1.0, 2.0] + [0.0] * (len(one) - 4)
        if kl:
            assert found.meta_info["kl_metrics"]["actor/reward_kl_penalty"].weight == 8.0  # tokens of real rows
    padding = pad_dataproto_to_divisor(batch[:4], 5)[0]  # a copy of row 3, whose reward would count twice
    assert advantages(config, padding).batch["advantages"].tolist() == [-1.0, -2.0, 1.0, 2.0, 0.0]


def test_a_reward_of_nan_without_the_mark_is_an_error(tmp_path):
    with pytest.raises(DataError, match="the reward of row 4 is nan"):
        advantages(small_config(tmp_path), scored_batch())


def test_the_penalty_is_taken_from_the_reward_before_the_baseline(tmp_path):
    """k1 with coefficient 0.5: row r has old - ref = r / 10 at each of two tokens, so 0.1 r is taken from its reward."""
    config = small_config(
        tmp_path, "algorithm.adv_estimator.norm_by_std=false", "algorithm.use_kl_in_reward=true", "algorithm.kl_coef=0.5"
    )
    batch = scored_batch()
    batch.batch["rewards"] = torch.zeros(6)
    offsets = parts(batch.batch["responses"])[1]
    old = torch.arange(6).repeat_interleave(2) / 10
    batch.union(DataProto({"old_log_probs": jagged(old, offsets), "ref_log_prob": jagged(torch.zeros(12), offsets)}))
    found = advantages(config, batch)
    assert found.batch["reward_kl"].tolist() == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert found.batch["advantages"].tolist() == pytest.approx([0.2, 0.2, 0.0, 0.0, -0.2, -0.2], abs=1e-7)
    assert found.batch["rewards"].tolist() == [0.0] * 6


def test_rows_without_a_uid_are_an_error(tmp_path):
    """Never grouped by their text or their place."""
    batch = scored_batch()
    batch.pop(non_tensor_batch_keys=["uid"])
    with pytest.raises(DataError, match="the step 'advantages' reads the column 'uid', which the rows do not have"):
        advantages(small_config(tmp_path), batch)

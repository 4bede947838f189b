"""The roles of the policy's worker, its reference model, and several epochs on the same rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.config import ActorConfig, HFRolloutConfig, ModelConfig, SamplingConfig
from podium.errors import ConfigError, WorkerError
from podium.models import load_model
from podium.protocol import DataProto
from podium.protocol.jagged import jagged, parts
from podium.single_controller import DataProtoFuture, Init, ResourcePool, WorkerGroup
from podium.workers import ActorRolloutRefWorker, PolicySpec, Role
from podium.workers.actor_rollout_ref import ROLES
from tests.workers.test_workers import MODEL, OPTIM, prompts


def spec_of(ref_model: ModelConfig | None = None, **actor: Any) -> PolicySpec:
    return PolicySpec(
        model=MODEL,
        actor=ActorConfig(optim=OPTIM, mini_batch_prompts=1, **actor),
        rollout=HFRolloutConfig(sampling=SamplingConfig(max_new_tokens=4, n=2)),
        total_optimizer_steps=10,
        seed=0,
        ref_model=ref_model,
    )


@contextmanager
def policy_of(role: Role = "actor_rollout_ref", ref_model: ModelConfig | None = None, **actor: Any) -> Iterator[Any]:
    init = Init(ActorRolloutRefWorker, spec_of(ref_model, **actor), role)
    with WorkerGroup(ResourcePool([1]), init, runtime="inline", threads_per_rank=1) as group:
        yield group.call


def values(batch: DataProto | DataProtoFuture, key: str) -> torch.Tensor:
    rows = batch.get(keys=[key]) if isinstance(batch, DataProtoFuture) else batch
    return parts(rows.batch[key])[0]


def sequences(batch: DataProto) -> DataProto:
    return batch.select(["input_ids", "responses"], [], [])


def rollouts(policy: Any) -> DataProto:
    """Four rows with old and reference log-probs, no advantages, and one mini-batch."""
    policy.update_weights()
    batch = policy.generate_sequences(prompts()).select(["input_ids", "responses", "response_mask"], [], []).get()
    batch.union(policy.compute_log_prob(sequences(batch)).get())
    zeros = jagged(torch.zeros(len(values(batch, "responses"))), parts(batch.batch["responses"])[1])
    columns = {"advantages": zeros, "mini_batch": torch.zeros(4, 1, dtype=torch.int64)}
    return batch.union(DataProto(columns, meta_info={"num_mini_batches": 1}))


# -- the reference ----------------------------------------------------------------------------------------------------


def test_the_kl_starts_at_zero_grows_with_updates_and_falls_when_it_is_the_loss():
    with policy_of(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k3") as policy:
        batch = rollouts(policy)
        batch.union(policy.compute_ref_log_prob(sequences(batch)).get())
        assert torch.equal(values(batch, "ref_log_prob"), values(batch, "old_log_probs"))
        assert policy.update_actor(batch.clone()).meta_info["metrics"]["kl_loss"].value == 0.0

        away = batch.clone()
        values(away, "advantages").copy_(torch.linspace(-50, 50, len(values(away, "advantages"))))
        for _ in range(3):
            policy.update_actor(away)
        assert torch.equal(values(policy.compute_ref_log_prob(sequences(batch)), "ref_log_prob"), values(batch, "ref_log_prob"))
        kl = [policy.update_actor(batch).meta_info["metrics"]["kl_loss"].value for _ in range(20)]
        assert kl[0] > 1e-3
        assert kl[-1] < 0.2 * kl[0]
        gap = values(policy.compute_log_prob(sequences(batch)), "old_log_probs") - values(batch, "ref_log_prob")
        assert gap.abs().mean() < 0.2


def test_the_reference_has_no_optimizer_and_is_in_no_checkpoint(tmp_path):
    """A resumed run builds it from the same model again, whatever the actor has become."""
    with policy_of(use_kl_loss=True) as policy:
        batch = rollouts(policy)
        before = policy.compute_ref_log_prob(sequences(batch))
        policy.update_actor(batch.union(before.get()))
        policy.save_checkpoint(str(tmp_path))
    saved = {path.name for path in tmp_path.iterdir()}
    assert saved
    assert not any("ref" in name for name in saved)
    with policy_of(use_kl_loss=True) as resumed:
        resumed.load_checkpoint(str(tmp_path))
        after = resumed.compute_ref_log_prob(sequences(batch))
    assert torch.equal(values(before, "ref_log_prob"), values(after, "ref_log_prob"))
    worker = ActorRolloutRefWorker(spec_of(), "actor_rollout_ref")
    assert worker.ref.spec.optim is None
    assert not any(parameter.requires_grad for parameter in worker.ref.engine.model.parameters())  # type: ignore[attr-defined]
    assert {worker.ref.engine.version, worker.actor.engine.version} == {0}


def test_the_reference_may_be_another_model(tmp_path):
    other = load_model(MODEL, seed=5)
    other.save_pretrained(tmp_path)
    with policy_of(ref_model=ModelConfig(path=str(tmp_path))) as policy:
        batch = rollouts(policy)
        found = values(policy.compute_ref_log_prob(sequences(batch)), "ref_log_prob")
        assert not torch.allclose(found, values(batch, "old_log_probs"), atol=1e-3)
    worker = ActorRolloutRefWorker(spec_of(ModelConfig(path=str(tmp_path))), "ref")
    found = dict(worker.ref.engine.named_weights())["model.embed_tokens.weight"]
    assert torch.equal(found, other.get_input_embeddings().weight)


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    config = MODEL.model_copy(update={"override_config": {**MODEL.override_config, "vocab_size": 50}})
    load_model(config, seed=0).save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 50
    with pytest.raises(ConfigError, match=r"ref\.model has 50 tokens, the policy 99"):
        ActorRolloutRefWorker(spec_of(ModelConfig(path=str(tmp_path))), "actor_rollout_ref")


# -- roles ------------------------------------------------------------------------------------------------------------

CALLS = {
    "actor": lambda policy, batch: policy.compute_log_prob(batch),
    "rollout": lambda policy, _: policy.generate_sequences(prompts()),
    "ref": lambda policy, batch: policy.compute_ref_log_prob(batch),
}


@pytest.mark.parametrize("role", ROLES)
def test_a_role_builds_its_parts_and_says_which_it_has_not(role):
    with policy_of() as policy:
        batch = sequences(rollouts(policy))
    with policy_of(role) as policy:
        if {"actor", "rollout"} <= set(ROLES[role]):
            policy.update_weights()
        for part, call in CALLS.items():
            if part in ROLES[role]:
                assert len(call(policy, batch)) == 4
            else:
                with pytest.raises(WorkerError, match=f"a worker of role '{role}' has no {part}; roles that have one: .*{part}"):
                    call(policy, batch)


def test_a_rollout_alone_generates_with_the_start_model():
    with policy_of("rollout") as alone, policy_of("actor_rollout") as both:
        both.update_weights()
        mine, theirs = (policy.generate_sequences(prompts()) for policy in (alone, both))
        assert torch.equal(values(mine, "responses"), values(theirs, "responses"))
        assert mine.get().batch["weight_version"].tolist() == [0] * 4
        with pytest.raises(WorkerError, match="a worker of role 'rollout' has no actor"):
            alone.update_weights()


def test_the_roles_are_verls():
    assert set(ROLES) == {"actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref"}
    order = {part: number for number, part in enumerate(("ref", "actor", "rollout"))}
    assert all(sorted(built, key=order.__getitem__) == list(built) for built in ROLES.values())
    with pytest.raises(ConfigError, match="unknown role 'actor_rolout'; did you mean 'actor_rollout'"):
        ActorRolloutRefWorker(spec_of(), "actor_rolout")  # type: ignore[arg-type]


# -- several epochs ---------------------------------------------------------------------------------------------------


def test_old_log_probs_stay_those_of_before_the_update_in_later_epochs():
    """Epoch 1 sees a ratio of 1; epoch 2 compares the policy after one optimizer step with the same old log-probs."""
    with policy_of("actor_rollout") as policy:
        batch = rollouts(policy)
        values(batch, "advantages").copy_(torch.linspace(-1, 1, len(values(batch, "advantages"))))
        policy.update_actor(batch)
        after = values(policy.compute_log_prob(sequences(batch)), "old_log_probs")
    kl_of_epoch_2 = float((values(batch, "old_log_probs") - after).mean())
    assert abs(kl_of_epoch_2) > 1e-5
    with policy_of("actor_rollout") as policy:
        again = rollouts(policy)
        values(again, "advantages").copy_(values(batch, "advantages"))
        again.pop(["mini_batch"])
        again.union(DataProto({"mini_batch": torch.zeros(4, 2, dtype=torch.int64)}))
        metrics = policy.update_actor(again).meta_info["metrics"]
        assert policy.update_weights() == [2]
    assert metrics["ppo_kl"].value == pytest.approx(kl_of_epoch_2 / 2, rel=1e-3, abs=1e-7)
    assert torch.equal(values(again, "old_log_probs"), values(batch, "old_log_probs"))

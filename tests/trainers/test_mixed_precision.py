"""A run in mixed precision, from its warm-up to the model folder: it learns in float32, and a resumed one equals it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.checkpoint import load_state
from tests.trainers.builders import WARM_UP, from_base, rows, small_config, train, weights

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")

MIXED = ("actor.engine.compute_dtype=bfloat16", "runtime=inline")
SMALL_STEPS = (
    *("trainer.total_steps=3", "trainer.save_freq=1", "actor.optim.lr=1e-6"),
    *("actor.use_kl_loss=true", "actor.recompute_old_log_probs=true"),
)


@pytest.fixture(scope="module")
def warmed_up(tmp_path_factory):
    return train(small_config(tmp_path_factory.mktemp("warm"), *WARM_UP, *MIXED, "warmup.steps=70"))


@pytest.fixture(scope="module")
def base(warmed_up):
    return warmed_up.warmup.hf


@pytest.fixture(scope="module")
def whole_run(base, tmp_path_factory):
    return train(from_base(tmp_path_factory.mktemp("whole"), base, *MIXED, *SMALL_STEPS))


def test_the_warm_up_learns(warmed_up):
    losses = [row["warmup/loss"] for row in rows(warmed_up.warmup)]
    assert losses[-1] < losses[0] / 2


def test_small_updates_reach_the_model_folder_and_the_rollout(whole_run, base):
    before, after = (dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()) for path in (base, whole_run.hf))
    changes = torch.cat([(after[name] - before[name]).detach().flatten() for name in before])
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}
    assert float((changes != 0).double().mean()) > 0.9
    assert 1e-6 < float(changes.abs().max()) < 2e-5  # six optimizer steps of about 1e-6 each
    samples = [json.loads(line) for line in (whole_run.path / "samples.jsonl").read_text().splitlines()]
    assert {sample["weight_version"] for sample in samples} == {0, 2, 4}


def test_the_actor_is_near_the_rollout_and_begins_as_the_reference(whole_run):
    """The rollout generates in float32; the reference rounds the same weights as the actor, which made no step of note yet."""
    first = rows(whole_run)[1]
    assert 1e-5 < first["rollout/log_prob_gap_max"] < 0.1
    assert abs(first["actor/kl_loss"]) < 1e-4


def test_a_resumed_run_equals_an_uninterrupted_one(whole_run, base, tmp_path):
    """From the masters and moments of step 2, for step 3's checkpoint is damaged; they are float32 in the file."""
    config = from_base(tmp_path, base, *MIXED, *SMALL_STEPS)
    directory = train(config)
    saved, _ = load_state(directory.checkpoints / "step-2" / "actor" / "train")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    newest = directory.checkpoints / "step-3" / "actor" / "train.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    train(config, directory)
    assert (rows(directory), weights(directory)) == (rows(whole_run), weights(whole_run))

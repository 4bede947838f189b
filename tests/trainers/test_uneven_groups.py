"""Groups of unequal size, as rollouts of several turns give them: what a mini-batch counts is prompts, whatever their rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from podium.config import ModelConfig, RunConfig, resolve
from podium.models import load_tokenizer
from podium.observability import Metrics, Spans
from podium.protocol import DataProto
from podium.protocol.jagged import jagged, offsets_of
from podium.single_controller import DataProtoFuture, Init, ResourcePool, WorkerGroup
from podium.trainers import PPOTrainer
from podium.trainers.launch import policy_spec
from podium.workers import ActorRolloutRefWorker
from tests.tasks.builders import Rows

SETTINGS = {
    "name": "uneven",
    "model": {"path": "char_llama", "override_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}},
    "task": {"name": "spell_backward"},
    "actor": {"optim": {"lr": 1e-3, "schedule": "linear"}, "mini_batch_prompts": 2},
    "rollout": {"sampling": {"n": 2, "max_new_tokens": 4}},
    "trainer": {"total_steps": 2, "prompts_per_step": 4},
}
SIZES = {"a": 1, "b": 5, "c": 2, "d": 4}
"""Rows of each prompt."""


def rows(mask: list[int]) -> DataProto:
    """The rows of a step as they are after scoring: prompts in turn, three tokens of a prompt, responses under this mask."""
    uids = [uid for turn in range(5) for uid, size in SIZES.items() if turn < size]
    lengths = torch.full((len(uids),), len(mask))
    offsets, prompts = offsets_of(lengths), offsets_of(lengths + 3)
    generator = torch.Generator().manual_seed(0)
    columns = {
        "input_ids": jagged(torch.randint(3, 90, (int(prompts[-1]),), generator=generator), prompts),
        "responses": jagged(torch.randint(3, 90, (int(offsets[-1]),), generator=generator), offsets),
        "response_mask": jagged(torch.tensor(mask * len(uids)), offsets),
        "old_log_probs": jagged(torch.full((int(offsets[-1]),), -4.6), offsets),
    }
    columns |= {"rewards": torch.arange(float(len(uids))), "is_scored": torch.ones(len(uids), dtype=torch.bool)}
    return DataProto(columns, {"uid": uids}, {"step": 1})


def updated(config: RunConfig, scored: DataProto) -> tuple[DataProto, Metrics, list[list[str]]]:
    """The batch with its advantages, the metrics of its update, and the uids that each optimizer step saw."""
    seen: list[list[str]] = []
    session = SimpleNamespace(spans=Spans(), updating=lambda: None)
    with WorkerGroup(ResourcePool([1]), Init(ActorRolloutRefWorker, policy_spec(config, config.model), "actor")) as group:
        trainer = PPOTrainer(config, group, Rows(4), None, load_tokenizer(ModelConfig(path="char_llama")), session)
        future = trainer.advantages(DataProtoFuture.of(scored), 1)
        batch = future.get()
        for number in range(2):
            seen.append(sorted(batch.non_tensor_batch["uid"][(batch.batch["mini_batch"][:, 0] == number).numpy()]))
        return batch, trainer.update(future), seen


def test_a_mini_batch_is_whole_prompts_however_many_rows_they_have():
    """Field report G11: four prompts of 1, 5, 2 and 4 rows, two a mini-batch: two optimizer steps, and the schedule with them."""
    config = resolve(SETTINGS)
    batch, metrics, seen = updated(config, rows([1, 1]))
    assert len(batch) == 12
    assert seen == [["a"] + ["b"] * 5, ["c"] * 2 + ["d"] * 4]
    floats = metrics.to_floats()
    assert floats["actor/lr"] == pytest.approx(1e-3 * (1 - 1 / 3))  # the second of four optimizer steps
    assert floats["actor/skipped_updates"] == 0.0


def test_every_row_of_a_trajectory_has_its_advantage_whatever_its_mask():
    """Field report H9: a mask of zeros at a row's start, or between the stretches that the policy wrote, takes nothing away.

    One advantage a row, which the loss takes for each of its tokens.
    """
    config = resolve(SETTINGS)
    whole, masked = (updated(config, rows(mask))[0].batch["advantages"] for mask in ([1, 1, 1, 1], [0, 1, 0, 1]))
    assert torch.equal(whole, masked)
    assert masked.shape == (12,)
    assert masked[0] == 0.0  # prompt a, a group of one
    assert (masked[1:] != 0).all()

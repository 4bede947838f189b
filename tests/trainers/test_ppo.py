"""`PPOTrainer`: mini-batches are whole prompts, however many rows a prompt has, and every row has its advantage."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from podium.config import RunConfig, resolve
from podium.observability import Spans
from podium.protocol import DataProto
from podium.protocol.jagged import jagged, offsets_of
from podium.single_controller import DataProtoFuture, Init, ResourcePool, WorkerGroup
from podium.trainers import PPOTrainer, TrainerContext, steps
from podium.trainers.ppo import policy_spec
from podium.trainers.roles import Groups
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


def prepared(config: RunConfig, scored: DataProto) -> DataProtoFuture:
    """The batch with its advantages and mini-batches."""
    batch = steps.with_advantages(DataProtoFuture.of(scored), config.algorithm, steps.advantage_estimator(config.algorithm))
    return steps.mini_batches.on(batch, num_prompts=4, size=2, epochs=1, seed=0, step=1)


def test_a_mini_batch_is_whole_prompts_however_many_rows_they_have():
    """Four prompts of 1, 5, 2 and 4 rows, two a mini-batch: two optimizer steps, and the schedule with them."""
    config = resolve(SETTINGS)
    future, session = prepared(config, rows([1, 1])), SimpleNamespace(spans=Spans(), updating=lambda: None)
    batch = future.get()
    uids, mini_batches = batch.non_tensor_batch["uid"], batch.batch["mini_batch"][:, 0]
    assert len(batch) == 12
    assert [sorted(uids[(mini_batches == number).numpy()]) for number in range(2)] == [["a"] + ["b"] * 5, ["c"] * 2 + ["d"] * 4]
    with WorkerGroup(ResourcePool([1]), Init(ActorRolloutRefWorker, policy_spec(config, config.model), "actor")) as group:
        context: Any = (config, Groups({"actor": group, "rollout": group}), Rows(4), None, None, session)
        floats = PPOTrainer(TrainerContext(*context)).update(future).to_floats()
    assert floats["actor/lr"] == pytest.approx(1e-3 * (1 - 1 / 3))  # the second of four optimizer steps
    assert floats["actor/skipped_updates"] == 0.0


def test_every_row_of_a_trajectory_has_its_advantage_whatever_its_mask():
    """A mask of zeros at a row's start, or between the stretches that the policy wrote, takes nothing away.

    One advantage a row, which the loss takes for each of its tokens.
    """
    config = resolve(SETTINGS)
    whole, masked = (prepared(config, rows(mask)).get().batch["advantages"] for mask in ([1, 1, 1, 1], [0, 1, 0, 1]))
    assert torch.equal(whole, masked)
    assert masked.shape == (12,)
    assert masked[0] == 0.0  # prompt a, a group of one
    assert (masked[1:] != 0).all()

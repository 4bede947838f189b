"""A step of RL on prompts that were filled up with padding: what it gives is what the real prompts give alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from podium.config import ActorConfig, HFRolloutConfig, ModelConfig, SamplingConfig
from podium.datasets import prompt_batch
from podium.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto, without_padding
from podium.protocol.jagged import parts
from podium.single_controller import DataProtoFuture, Init, ResourcePool, WorkerGroup
from podium.workers import ActorRolloutRefWorker, PolicySpec
from tests.workers.test_workers import MODEL, OPTIM, TOKENIZER

FLOAT64 = ModelConfig(path=MODEL.path, override_config=MODEL.override_config, dtype="float64")
EXACT, ROUNDED = 0.0, 1e-9


@contextmanager
def policy_of(num_workers: int = 1, **settings: Any) -> Iterator[Any]:
    spec = PolicySpec(
        model=FLOAT64,
        actor=ActorConfig(optim=OPTIM, mini_batch_prompts=1, calculate_entropy=True),
        rollout=HFRolloutConfig(sampling=SamplingConfig(max_new_tokens=4, n=2)),
        total_optimizer_steps=10,
        seed=0,
    )
    runtime = "inline" if num_workers == 1 else "ray"
    pool, init = ResourcePool([num_workers]), Init(ActorRolloutRefWorker, spec)
    with WorkerGroup(pool, init, runtime=runtime, threads_per_rank=1, **settings) as group:
        group.call.update_weights()
        yield group.call


def prompts() -> DataProto:
    rows = prompt_batch([f"{'abcde'[: row + 1]}\n" for row in range(5)], [f"u{row}" for row in range(5)], TOKENIZER)
    rows.meta_info["step"] = 1
    return rows


def a_step(policy: Any, given: DataProto) -> tuple[DataProto, dict[str, float]]:
    """All rows of a step, padding included, and the metrics of its calls. The first sample of a prompt is the better one."""
    batch: DataProtoFuture = policy.generate_sequences(given)
    tokens = batch.select(["input_ids", "responses", "rollout_log_probs"], [], [])
    batch = batch.union(policy.compute_log_prob(tokens).select(meta_info_keys=["log_prob_metrics"]))
    rows = batch.get()
    columns = {"advantages": 1.0 - rows.batch["sample_index"], "mini_batch": torch.arange(len(rows))[:, None] % 2}
    columns["advantages"] = columns["advantages"].float()
    batch = batch.union(DataProto(columns, meta_info={"num_mini_batches": 2}))
    kept = ["input_ids", "responses", "response_mask", "old_log_probs", "advantages", "mini_batch"]
    metrics = policy.update_actor(batch.select(kept, [], ["num_mini_batches"])).meta_info["metrics"].to_floats()
    for name in ("rollout_metrics", "log_prob_metrics"):
        metrics |= rows.meta_info[name].to_floats()
    return rows, metrics


@pytest.fixture(scope="module")
def alone() -> tuple[DataProto, dict[str, float]]:
    with policy_of() as policy:
        return a_step(policy, prompts())


def check_same(found: tuple[DataProto, dict[str, float]], expected: tuple[DataProto, dict[str, float]], rounding: float) -> None:
    rows, theirs = without_padding(found[0]), expected[0]
    assert rows.batch.keys() == theirs.batch.keys()
    for key, column in theirs.batch.items():
        one, two = (parts(part)[0] if part.is_nested else part for part in (rows.batch[key], column))
        torch.testing.assert_close(one, two, rtol=0, atol=rounding, msg=key)
    for key, objects in theirs.non_tensor_batch.items():
        assert rows.non_tensor_batch[key].tolist() == objects.tolist(), key
    ours, expected_metrics = (
        {name: value for name, value in metrics.items() if not name.startswith("perf/")} for _, metrics in (found, expected)
    )  # which layout costs least depends on a rank's rows
    assert ours == pytest.approx(expected_metrics, rel=rounding, abs=rounding)


def test_five_prompts_filled_up_to_eight_give_the_step_of_five(alone):
    with policy_of() as policy:
        found = a_step(policy, pad_dataproto_to_divisor(prompts(), 8)[0])
    assert found[0].padding_mask.tolist() == [False] * 10 + [True] * 6
    assert found[0].non_tensor_batch["response"][10:].tolist() == [""] * 6
    check_same(found, alone, EXACT)
    assert not unpad_dataproto(found[0], 6).padding_mask.any()


@pytest.mark.slow
def test_two_ranks_that_pad_give_the_step_of_one_rank_without(alone, ray_cluster):
    """The group's own padding, and the driver's to eight, with which rank 1 has one real prompt of four."""
    with policy_of(2, auto_padding=True) as policy:
        found = a_step(policy, prompts())
        assert len(found[0]) == 10
        check_same(found, alone, ROUNDED)
    with policy_of(2) as policy:
        check_same(a_step(policy, pad_dataproto_to_divisor(prompts(), 8)[0]), alone, ROUNDED)

"""What a step and a run report: metrics of a batch, samples worth keeping, held-out scores and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from podium.observability import RESPONSE_LENGTH, REWARD, Max, Mean, Metrics, Min, Sample, Sum
from podium.protocol import DataProto
from podium.protocol.jagged import lengths_of, parts
from podium.tasks import Problem
from podium.trainers.evaluation import Evaluation

NUM_ANSWERS = 8
"""Held-out answers kept in `report.json`."""


def batch_metrics(batch: DataProto) -> Metrics:
    """Rewards of the rows that have one, lengths, and how far the rollout's log-probs are from the trainer's."""
    is_scored_B, lengths_B = batch.batch["is_scored"], lengths_of(batch.batch["responses"]).float()
    rewards_B = batch.batch["rewards"][is_scored_B]
    uids = batch.non_tensor_batch["uid"]
    rollout_N, old_N = parts(batch.batch["rollout_log_probs"])[0], parts(batch.batch["old_log_probs"])[0]
    advantages_N = parts(batch.batch["advantages"])[0]
    penalty = {}
    if "reward_kl" in batch.batch:
        penalty["actor/reward_kl_penalty"] = Mean(
            float(batch.batch["reward_kl"].sum()), float(parts(batch.batch["response_mask"])[0].sum())
        )
    cut_off = [reason == "length" for reason in batch.non_tensor_batch["finish_reason"]]
    return Metrics(
        {
            REWARD: _mean(rewards_B),
            "critic/rewards/max": Max(float(rewards_B.max())),
            "critic/rewards/min": Min(float(rewards_B.min())),
            "critic/advantages/zero_frac": _mean((advantages_N == 0).float()),
            RESPONSE_LENGTH: _mean(lengths_B),
            "response_length/max": Max(float(lengths_B.max())),
            "response_length/clip_ratio": Mean.of(cut_off),
            **penalty,
            **batch.meta_info["reward_metrics"],
            "reward/incomplete_groups": Sum(len(set(uids[~is_scored_B.numpy()].tolist()))),
            "rollout/neg_log_prob": _mean(-rollout_N),
            "rollout/log_prob_gap_max": Max(float((rollout_N - old_N).abs().max())),
        }
    )


def samples(batch: DataProto, count: int) -> list[Sample]:
    """The first sample of each of the first `count` prompts."""
    firsts = (batch.batch["sample_index"] == 0).nonzero().flatten().tolist()[:count]
    return [_sample(batch, row) for row in firsts]


def _sample(batch: DataProto, row: int) -> Sample:
    problem: Problem = batch.non_tensor_batch["problem"][row]
    return Sample(
        uid=problem.uid,
        sample_index=int(batch.batch["sample_index"][row]),
        weight_version=int(batch.batch["weight_version"][row]),
        prompt=problem.prompt_text,
        response=batch.non_tensor_batch["response"][row],
        answer=problem.answer,
        reward=float(batch.batch["rewards"][row]) if batch.batch["is_scored"][row] else None,
    )


def held_out(problems: Sequence[Problem], exact: Evaluation, sampled: Evaluation) -> dict[str, Any]:
    """Scores as `podium eval --json` prints them, how many responses had none, and the first few greedy answers."""
    rewards = exact.rewards
    values = [value if is_scored else None for value, is_scored in zip(rewards.values, rewards.is_scored, strict=True)]
    rows = zip(problems[:NUM_ANSWERS], exact.responses, values, strict=False)
    answers = [{"prompt": p.prompt_text, "answer": p.answer, "response": text, "score": value} for p, text, value in rows]
    failed = exact.num_failed + sampled.num_failed
    scores = {"greedy_exact": exact.mean, "sampled_exact": sampled.mean, "n": len(problems)}
    return {**scores, "failed": failed, "answers": answers}


def _mean(values: Tensor) -> Mean:
    return Mean(float(values.sum(dtype=torch.float64)), float(len(values)))

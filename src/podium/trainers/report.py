"""What a step and a run report: metrics of a batch, samples worth keeping, held-out scores and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from podium.observability import RESPONSE_LENGTH, REWARD, Max, Mean, Metrics, Min, Sample
from podium.protocol import DataProto
from podium.protocol.jagged import lengths_of, parts
from podium.tasks import Problem
from podium.trainers.evaluation import Evaluation

NUM_ANSWERS = 8
"""Held-out answers kept in `report.json`."""


def batch_metrics(batch: DataProto) -> Metrics:
    """Rewards, lengths, and how far the rollout's log-probs are from the trainer's."""
    rewards_B, lengths_B = batch.batch["rewards"], lengths_of(batch.batch["responses"]).float()
    rollout_N, old_N = parts(batch.batch["rollout_log_probs"])[0], parts(batch.batch["old_log_probs"])[0]
    advantages_N = parts(batch.batch["advantages"])[0]
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
        prompt=problem.prompt,
        response=batch.non_tensor_batch["response"][row],
        answer=problem.answer,
        reward=float(batch.batch["rewards"][row]),
    )


def held_out(problems: Sequence[Problem], exact: Evaluation, sampled: Evaluation) -> dict[str, Any]:
    """Scores as `podium eval --json` prints them, and the first few greedy answers."""
    rows = zip(problems[:NUM_ANSWERS], exact.responses, exact.scores, strict=False)
    answers = [{"prompt": p.prompt, "answer": p.answer, "response": response, "score": value} for p, response, value in rows]
    return {"greedy_exact": exact.mean, "sampled_exact": sampled.mean, "n": len(problems), "answers": answers}


def _mean(values: Tensor) -> Mean:
    return Mean(float(values.sum(dtype=torch.float64)), float(len(values)))

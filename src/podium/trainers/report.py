"""What a step and a run report: metrics of a batch, samples worth keeping, held-out scores and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from podium.observability import RESPONSE_LENGTH, REWARD, Max, Mean, Metrics, Min, Sample, Sum
from podium.protocol import DataProto
from podium.protocol.jagged import is_jagged, parts
from podium.tasks import Problem
from podium.trainers.evaluation import Evaluation

NUM_ANSWERS = 8
"""Held-out answers kept in `report.json`."""


class Answer(BaseModel):
    """A held-out problem and the greedy response to it; no score where it could not be scored."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompt: str
    answer: str
    response: str
    score: float | None


class HeldOut(BaseModel):
    """What `report.json` holds under `before` and `after`: the mean scores of the held-out split, greedy and sampled.

    A score is what the reward gives: the share of exact matches where that is 0 or 1, or the mean of a user's own reward.
    """

    model_config = ConfigDict(strict=True, extra="forbid")

    greedy_score: float
    sampled_score: float
    n: int
    """Problems."""
    failed: int
    """Responses, greedy and sampled, that could not be scored."""
    answers: list[Answer]
    """The first few."""


def check_report(report: Mapping[str, Any]) -> None:
    """ValueError with the place and the reason when an entry is not what `held_out` makes."""
    for when, entry in report.items():
        try:
            HeldOut.model_validate(entry)
        except ValidationError as exc:
            first = exc.errors()[0]
            raise ValueError(f"{'.'.join(map(str, (when, *first['loc'])))}: {first['msg']}") from exc


LOGGED_COLUMNS = (
    *("uid", "problem", "response", "sample_index", "weight_version", "finish_reason"),
    *("rewards", "is_scored", "advantages"),
)
"""What is read of a step to report it."""


def batch_metrics(batch: DataProto, lengths_B: Tensor) -> Metrics:
    """Rewards of the rows that have one, of responses of these lengths, and the metrics that came with the rows.

    Real rows only: the caller has taken padding out. The batch has `LOGGED_COLUMNS`; each value of its meta that is `Metrics`
    is reported too.
    """
    is_scored_B, lengths_B = batch.batch["is_scored"], lengths_B.float()
    rewards_B = batch.batch["rewards"][is_scored_B]
    uids = batch.non_tensor_batch["uid"]
    of_rows = Metrics().merge([value for value in batch.meta_info.values() if isinstance(value, Metrics)])
    cut_off = [reason == "length" for reason in batch.non_tensor_batch["finish_reason"]]
    return Metrics(
        {
            REWARD: _mean(rewards_B),
            "critic/rewards/max": Max(float(rewards_B.max())),
            "critic/rewards/min": Min(float(rewards_B.min())),
            "critic/advantages/zero_frac": _zero_tokens(batch.batch["advantages"], lengths_B),
            RESPONSE_LENGTH: _mean(lengths_B),
            "response_length/max": Max(float(lengths_B.max())),
            "response_length/clip_ratio": Mean.of(cut_off),
            **of_rows,
            "reward/incomplete_groups": Sum(len(set(uids[~is_scored_B.numpy()].tolist()))),
        }
    )


def _zero_tokens(advantages: Tensor, lengths_B: Tensor) -> Mean:
    """The fraction of tokens whose advantage is 0; advantages are [B] or jagged [B, *]."""
    if is_jagged(advantages):
        return Mean.of((parts(advantages)[0] == 0).tolist())
    return Mean(float(lengths_B[advantages == 0].sum()), float(lengths_B.sum()))


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
        reward=rounded(float(batch.batch["rewards"][row])) if batch.batch["is_scored"][row] else None,
    )


def held_out(problems: Sequence[Problem], likeliest: Evaluation, sampled: Evaluation) -> dict[str, Any]:
    """A `HeldOut` as plain values."""
    rewards = likeliest.rewards
    values = [value if is_scored else None for value, is_scored in zip(rewards.values, rewards.is_scored, strict=True)]
    rows = zip(problems[:NUM_ANSWERS], likeliest.responses, values, strict=False)
    answers = [Answer(prompt=p.prompt_text, answer=p.answer, response=text, score=value) for p, text, value in rows]
    failed = likeliest.num_failed + sampled.num_failed
    return HeldOut(
        greedy_score=rounded(likeliest.mean), sampled_score=rounded(sampled.mean), n=len(problems), failed=failed, answers=answers
    ).model_dump()


def rounded(value: float) -> float:
    """A score as it is written and printed: a float32 of 0.7 is 0.7, not 0.699999988."""
    return round(value, 6)


def _mean(values: Tensor) -> Mean:
    return Mean(float(values.sum(dtype=torch.float64)), float(len(values)))

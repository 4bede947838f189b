"""Scoring a policy on problems it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from podium.config import SamplingConfig
from podium.datasets import prompt_batch
from podium.protocol import DataProto
from podium.protocol.jagged import parts
from podium.tasks import Problem, Task, score


class Generator(Protocol):
    """A group call that answers prompts."""

    def __call__(self, prompts: DataProto, /) -> DataProto: ...


@dataclass(frozen=True)
class Evaluation:
    """One response a problem, with its score."""

    responses: list[str]
    scores: list[float]

    @property
    def mean(self) -> float:
        """The fraction of problems solved, where scores are 0 or 1."""
        return sum(self.scores) / len(self.scores)


def response_texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of each row's `responses`, special tokens left out."""
    values, offsets = parts(batch.batch["responses"])
    tokens, ends = values.tolist(), offsets.tolist()
    rows = [tokens[start:stop] for start, stop in pairwise(ends)]
    texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True)
    return texts


def evaluate(
    generate: Generator,
    task: Task,
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingConfig,
    *,
    step: int,
) -> Evaluation:
    """One response to each problem, scored by the task's verifier; the same (seed, step) gives the same responses."""
    prompts = prompt_batch([problem.prompt for problem in problems], [problem.uid for problem in problems], tokenizer)
    prompts.meta_info |= {"step": step, "sampling": sampling.model_copy(update={"n": 1})}
    responses = response_texts(generate(prompts), tokenizer)
    return Evaluation(responses, score(task, problems, responses))


def greedy(sampling: SamplingConfig) -> SamplingConfig:
    """The same limits and stops, always the likeliest token."""
    return sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0})

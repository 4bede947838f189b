"""Scoring a policy on problems it does not learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from podium.config import SamplingConfig
from podium.datasets import prompt_batch
from podium.protocol import DataProto
from podium.single_controller import DataProtoFuture
from podium.tasks import Problem, Rewards, Scorer


class Generator(Protocol):
    """A group call that answers prompts."""

    def __call__(self, prompts: DataProto, /) -> DataProtoFuture: ...


@dataclass(frozen=True)
class Evaluation:
    """One response a problem, with its score; a response that could not be scored is NaN (`reward.on_failure: drop`)."""

    responses: list[str]
    rewards: Rewards

    @property
    def mean(self) -> float:
        """The mean score of the responses that have one: the fraction of problems solved, where scores are 0 or 1."""
        scored = self.rewards.scored
        return sum(scored) / len(scored)

    @property
    def num_failed(self) -> int:
        """Responses that could not be scored, whatever value the policy gave them."""
        return round(self.rewards.metrics["reward/failed"].value)


def evaluate(
    generate: Generator,
    scorer: Scorer,
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingConfig,
    *,
    step: int,
    chat_template: Literal["auto", "always", "never"],
) -> Evaluation:
    """One response to each problem, scored; the same (seed, step) gives the same responses."""
    uids = [problem.uid for problem in problems]
    prompts = prompt_batch([problem.prompt for problem in problems], uids, tokenizer, chat_template=chat_template)
    prompts.meta_info |= {"step": step, "sampling": sampling.model_copy(update={"n": 1})}
    responses: list[str] = generate(prompts).get(keys=["response"]).non_tensor_batch["response"].tolist()
    return Evaluation(responses, scorer(problems, responses))


def greedy(sampling: SamplingConfig) -> SamplingConfig:
    """The same limits and stops, always the likeliest token."""
    return sampling.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": 0})

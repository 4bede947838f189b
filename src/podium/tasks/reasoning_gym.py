"""Tasks of the reasoning-gym library, by name, with that library's own verifier as an exact 0/1 reward."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pydantic import JsonValue

from podium.config import TaskConfig
from podium.errors import TaskError
from podium.tasks.base import Problem, RewardInputs, Task
from podium.tasks.context import TaskContext
from podium.tasks.library_problems import create_dataset, draw, draw_in_a_process, is_solved
from podium.tasks.reward_process import FunctionSpec

VERIFIER_MODULE = "podium.tasks.library_verifier"
"""Named, not imported: it belongs into a process of the pool."""
RUNS_IN_THE_DRIVER = frozenset({"spell_backward", "word_sorting", "palindrome_generation", "chain_sum", "caesar_cipher"})
"""Datasets whose code was read: it draws quickly, the same under every hash seed, and its `score_answer` only compares text in a
time that grows with its length, without evaluating any."""


class ReasoningGymTask(Task):
    """Problems of one reasoning-gym dataset: no question occurs twice, and no answer is in two splits where there are enough."""

    def __init__(self, context: TaskContext[TaskConfig]) -> None:
        """With `exact_match` the library's verifier scores. TaskError for an unfit setting."""
        config, exact_match = context.settings, context.exact_match
        self._config, self._name = config, config.name
        runs_in_the_driver = config.name in RUNS_IN_THE_DRIVER
        drawn = draw(config) if runs_in_the_driver else draw_in_a_process(config)
        if exact_match and drawn.accepts_nonsense:
            raise TaskError(f"the library's verifier of {config.name} accepts any text as right: set reward.function to score it")
        if not runs_in_the_driver:
            self.isolated_verifier = library_verifier(config)
        self.train, self.validation, self.held_out = (drawn.splits[split] for split in ("train", "validation", "held_out"))
        self._entries, self.disjoint_by = drawn.entries, drawn.disjoint_by
        if drawn.disjoint_by == "prompt":
            self.remarks = (
                f"{self._name} has too few distinct answers for splits without a common one: its splits differ by prompt, and an "
                "answer may be in several",
            )

    @cached_property
    def _verifier(self) -> Any:
        return create_dataset(self._config, seed=0, size=1)

    def verify(self, problem: Problem, response: str) -> float:
        """1.0 when the library scores the stripped response as a full solution, else 0.0.

        Without limits, and some of its verifiers evaluate the response: a `Scorer` calls `isolated_verifier` where there is one.
        """
        return is_solved(self._verifier, response, self._entries[problem.key])

    def reward_inputs(self, problem: Problem) -> RewardInputs:
        """The dataset's name, the answer (None where the library does not give one), and its metadata of the entry."""
        return RewardInputs(self._name, problem.answer or None, self._entries[problem.key]["metadata"])

    def verifier_inputs(self, problem: Problem) -> RewardInputs:
        """As `reward_inputs`, but with the library's whole entry, as its verifiers take it."""
        return RewardInputs(self._name, problem.answer, {"entry": self._entries[problem.key]})


def library_verifier(config: TaskConfig) -> FunctionSpec:
    """The library's verifier of a dataset for processes of their own, each of which builds the dataset once."""
    kwargs: dict[str, JsonValue] = {"name": config.name, "params": {**config.params}}
    return FunctionSpec(f"{VERIFIER_MODULE}.verify", kwargs, prepare="prepare")

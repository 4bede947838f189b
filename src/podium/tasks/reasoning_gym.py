"""Tasks of the reasoning-gym library, by name, with that library's own verifier as an exact 0/1 reward."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from pydantic import JsonValue

from podium.config import TaskConfig
from podium.errors import MissingExtraError, TaskError, nearest
from podium.tasks.base import Problem, RewardInputs, Split, Task, normalised
from podium.tasks.reward_process import FunctionSpec

VERIFIER_MODULE = "podium.tasks.library_verifier"
"""Named, not imported: it belongs into a process of the pool."""
BLOCK = 4096
"""Problems drawn at a time."""
SEED_STRIDE = 100_000_000
"""reasoning-gym makes problem i of seed s from s + i: seeds of the splits stand further apart than any split is long."""
MAX_DRAWS_PER_PROBLEM = 200
"""Draws per wanted problem, after which the dataset is taken to have no more distinct answers."""
SOLVED = 1.0
"""The score of a right answer, compared exactly: partial credit adds up to 0.9999999999999998 for some wrong ones."""
VERIFIED_IN_THE_DRIVER = frozenset({"spell_backward", "word_sorting", "palindrome_generation", "chain_sum", "caesar_cipher"})
"""Datasets whose `score_answer` was read and only compares text: in a time that grows with its length, without evaluating any."""

SIZES: dict[Split, int] = {"train": 4096, "validation": 128, "held_out": 256}
"""Problems of the splits unless the config says how many."""


class ReasoningGymTask(Task):
    """Problems of one reasoning-gym dataset: no question comes twice, and no answer is in two splits."""

    def __init__(self, config: TaskConfig) -> None:
        if config.name is None:
            raise TaskError("task.name is not set: it names a dataset of reasoning-gym")
        self._config, self._name = config, config.name
        self._library = _library()
        self._verifier = self._dataset(seed=0, size=1)
        if config.name not in VERIFIED_IN_THE_DRIVER:
            self.isolated_verifier = library_verifier(config)
        self._entries: list[dict[str, Any]] = []
        self._questions: set[str] = set()
        self._answers: dict[str, str] = {}
        self._examples = ""
        if config.few_shot:
            shown = self._draw("few_shot", 3, config.few_shot)
            self._examples = "".join(f"{problem.prompt} {problem.answer}\n" for problem in shown)
        self.held_out = self._draw("held_out", 0, config.num_held_out or SIZES["held_out"])
        self.validation = self._draw("validation", 1, config.num_validation or SIZES["validation"])
        self.train = self._draw("train", 2, config.num_train or SIZES["train"])

    def verify(self, problem: Problem, response: str) -> float:
        """1.0 when the library scores the stripped response as a full solution, else 0.0.

        Without limits, and some of its verifiers evaluate the response: a `Scorer` calls `isolated_verifier` where there is one.
        """
        return is_solved(self._verifier, response, self._entries[problem.key])

    def reward_inputs(self, problem: Problem) -> RewardInputs:
        """The dataset's name, the answer, and the library's metadata of the entry."""
        return RewardInputs(self._name, problem.answer, self._entries[problem.key]["metadata"])

    def verifier_inputs(self, problem: Problem) -> RewardInputs:
        """As `reward_inputs`, but with the library's whole entry, as its verifiers take it."""
        return RewardInputs(self._name, problem.answer, {"entry": self._entries[problem.key]})

    def _draw(self, split: str, number: int, wanted: int) -> tuple[Problem, ...]:
        """`wanted` new questions, none with an answer of an earlier split."""
        problems: list[Problem] = []
        limit = wanted * MAX_DRAWS_PER_PROBLEM
        first_seed = (self._config.seed * 4 + number) * SEED_STRIDE
        for entry in self._stream(first_seed, limit=limit):
            prompt, answer = self._prompt(entry["question"]), normalised(entry["answer"])
            if normalised(prompt) in self._questions or self._answers.setdefault(answer, split) != split:
                continue
            self._questions.add(normalised(prompt))
            problems.append(Problem(f"{split}-{len(problems)}", prompt, entry["answer"], len(self._entries)))
            self._entries.append(entry)
            if len(problems) == wanted:
                return tuple(problems)
        raise TaskError(
            f"{self._name} gave {len(problems)} new {split} questions, whose answers are in no other split, in {limit} draws; "
            f"task.{'few_shot' if split == 'few_shot' else f'num_{split}'} asks for {wanted}: lower it or widen task.params"
        )

    def _stream(self, first_seed: int, *, limit: int) -> Iterator[dict[str, Any]]:
        for start in range(0, limit, BLOCK):
            yield from self._dataset(seed=first_seed + start, size=min(BLOCK, limit - start))

    def _dataset(self, *, seed: int, size: int) -> Any:
        try:
            return self._library.create_dataset(self._name, seed=seed, size=size, **self._config.params)
        except ValueError as exc:
            raise TaskError(f"{exc}{nearest(self._name, known_names())}") from exc
        except (TypeError, AssertionError) as exc:
            raise TaskError(f"task.params {self._config.params} do not fit {self._name}: {exc}") from exc

    def _prompt(self, question: str) -> str:
        if self._config.prompt_pattern is not None:
            found = re.search(self._config.prompt_pattern, question)
            if found is None:
                raise TaskError(f"task.prompt_pattern {self._config.prompt_pattern!r} finds nothing in {question!r}")
            question = " ".join(group for group in found.groups() if group is not None)
        return self._examples + question if self._config.few_shot else question + "\n"


def library_verifier(config: TaskConfig) -> FunctionSpec:
    """The library's verifier of a dataset for processes of their own, each of which builds the dataset once."""
    kwargs: dict[str, JsonValue] = {"name": config.name, "params": {**config.params}}
    return FunctionSpec(f"{VERIFIER_MODULE}.verify", kwargs, prepare="prepare")


def is_solved(dataset: Any, response: str, entry: dict[str, Any]) -> float:
    """1.0 when the dataset scores the stripped response as a full solution of the entry, else 0.0."""
    return float(dataset.score_answer(answer=response.strip(), entry=entry) == SOLVED)


def known_names() -> Collection[str]:
    """Names of the library's datasets."""
    from reasoning_gym.factory import DATASETS

    names: Collection[str] = DATASETS.keys()
    return names


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as exc:
        raise MissingExtraError("reasoning-gym", "tasks", "a task of reasoning-gym") from exc
    return reasoning_gym

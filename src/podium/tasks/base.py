"""What a task is: problems in three disjoint splits, and a verifier.

Held-out honesty: training, validation and held-out problems have different answers (lower case, stripped), or, where a user's
own rows do not allow that, different prompts. Validation may steer a run; held-out is read only to report.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from pydantic import JsonValue

from podium.errors import TaskError
from podium.tasks.reward_process import FunctionSpec

Split = Literal["train", "validation", "held_out"]


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


Prompt: TypeAlias = str | tuple[Message, ...]
"""Plain text, or a conversation that the tokenizer's chat template turns into text."""


@dataclass(frozen=True)
class Problem:
    """One problem. `uid` is the same in every run of the same task and seed; `key` finds it again for the verifier."""

    uid: str
    prompt: Prompt
    answer: str
    key: int

    @property
    def prompt_text(self) -> str:
        """The prompt for people: of a conversation each message under its role, of one user message its content alone."""
        if isinstance(self.prompt, str):
            return self.prompt
        if len(self.prompt) == 1:
            return self.prompt[0].content
        return "\n".join(f"{message.role}: {message.content}" for message in self.prompt)

    @property
    def question(self) -> str:
        """The text of the prompt that is answered: all of a plain one, the last message of a conversation."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1].content


@dataclass(frozen=True)
class RewardInputs:
    """What a reward function receives about a problem besides the response, as verl names it."""

    data_source: str
    ground_truth: JsonValue
    extra_info: Mapping[str, JsonValue]


class Task(ABC):
    """Problems and their verifier."""

    train: Sequence[Problem]
    validation: Sequence[Problem]
    held_out: Sequence[Problem]
    disjoint_by: Literal["answer", "prompt"] = "answer"
    """In what the problems of two splits differ for certain."""
    remarks: tuple[str, ...] = ()
    """What a user who starts a run on these problems should know; logged once a run, not each time that the task is built."""
    isolated_verifier: FunctionSpec | None = None
    """The function of the verifier for processes of their own; None where `verify` is quick and only compares text."""

    def split(self, name: Split) -> Sequence[Problem]:
        """The problems of a split by its name."""
        problems: Sequence[Problem] = getattr(self, name)
        return problems

    @abstractmethod
    def verify(self, problem: Problem, response: str) -> float:
        """The reward of a response without a reward function, usually 0 or 1. May raise; it's reported with the row."""

    @abstractmethod
    def reward_inputs(self, problem: Problem) -> RewardInputs:
        """What a reward function gets. Stays out of `Problem`, which travels with every row."""

    def verifier_inputs(self, problem: Problem) -> RewardInputs:
        """What the `isolated_verifier` gets; must be picklable."""
        return self.reward_inputs(problem)


def normalised(answer: str) -> str:
    """The form in which answers are compared between splits, and by the exact match."""
    return answer.strip().lower()


def normalised_prompt(problem: Problem) -> str:
    """The form in which prompts are compared: white space does not count, letters' case does."""
    return " ".join(problem.prompt_text.split())


def check_disjoint(task: Task) -> None:
    """TaskError when two splits share a normalised answer, or for a task that is disjoint by prompt, a prompt."""
    form: Callable[[Problem], str] = normalised_prompt
    if task.disjoint_by == "answer":
        form = lambda problem: normalised(problem.answer)  # noqa: E731
    seen: dict[str, str] = {}
    for name in ("held_out", "validation", "train"):
        values = {form(problem) for problem in task.split(name)}
        for value in values & seen.keys():
            raise TaskError(f"the {task.disjoint_by} {value!r} is in both the {seen[value]} and the {name} split")
        seen |= dict.fromkeys(values, name)


def task_fingerprint(task: Task) -> str:
    """A sha256 in hex over the problems of each split in order: uids, prompts, answers. Two tasks with the same one ask the same.

    Where rows move from one split to another it changes too: a run that goes on with a task of another fingerprint may be
    asked in its held-out split what it was trained on.
    """
    digest = hashlib.sha256()
    for name in get_args(Split):
        for problem in task.split(name):
            row = json.dumps([name, problem.uid, problem.prompt, problem.answer])
            digest.update(f"{row}\n".encode())
    return digest.hexdigest()

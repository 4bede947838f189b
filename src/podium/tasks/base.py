"""What a task is: problems in three disjoint splits, and a verifier.

Held-out honesty: training, validation and held-out problems have different answers (lower case, stripped). Validation may
steer a run; held-out is read only to report.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from podium.errors import RewardError, TaskError

Split = Literal["train", "validation", "held_out"]


@dataclass(frozen=True)
class Problem:
    """One problem. `uid` is the same in every run of the same task and seed; `key` finds it again for the verifier."""

    uid: str
    prompt: str
    answer: str
    key: int


class Task(ABC):
    """Problems and their verifier."""

    train: Sequence[Problem]
    validation: Sequence[Problem]
    held_out: Sequence[Problem]

    def split(self, name: Split) -> Sequence[Problem]:
        """The problems of a split by its name."""
        problems: Sequence[Problem] = getattr(self, name)
        return problems

    @abstractmethod
    def verify(self, problem: Problem, response: str) -> float:
        """The reward of a response, usually 0 or 1. May raise; `score` reports it with the row."""


def normalised(answer: str) -> str:
    """The form in which answers are compared between splits."""
    return answer.strip().lower()


def check_disjoint(task: Task) -> None:
    """TaskError when two splits share a normalised answer."""
    seen: dict[str, str] = {}
    for name in ("held_out", "validation", "train"):
        answers = {normalised(problem.answer) for problem in task.split(name)}
        for answer in answers & seen.keys():
            raise TaskError(f"the answer {answer!r} is in both the {seen[answer]} and the {name} split")
        seen |= dict.fromkeys(answers, name)


def score(task: Task, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
    """The reward of each response. A verifier that raises or returns no finite number is a RewardError naming the row."""
    return [
        _score_row(task, row, problem, response) for row, (problem, response) in enumerate(zip(problems, responses, strict=True))
    ]


def _score_row(task: Task, row: int, problem: Problem, response: str) -> float:
    where = f"row {row} (uid {problem.uid}, response {response!r}, answer {problem.answer!r})"
    try:
        reward = task.verify(problem, response)
    except Exception as exc:
        raise RewardError(f"the verifier raised {type(exc).__name__}: {exc} on {where}") from exc
    if isinstance(reward, bool | int | float) and math.isfinite(reward):
        return float(reward)
    raise RewardError(f"the verifier returned {reward!r} on {where}; a reward is a finite number")

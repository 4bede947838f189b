"""Files of rows, and tasks and scorers made from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import dedent
from typing import Any

from podium.config import RewardConfig, TaskConfig
from podium.tasks import Problem, RewardInputs, Task, build_task


def write_rows(path: Path, rows: Iterable[dict[str, Any] | str]) -> str:
    """A JSONL file; a row given as text is written as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def sums(count: int) -> list[dict[str, Any]]:
    """Plain rows with distinct prompts and answers."""
    return [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(count)]


def verl_row(number: int, **changes: Any) -> dict[str, Any]:
    """A row as verl's GSM8K example writes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How much is {number}+1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"split": "train", "index": number},
        **changes,
    }


def file_task(train: str | list[str], *, count_tokens: Callable[[Any], int] | None = None, exact_match: bool = True, **settings):
    """The task of some files."""
    config = TaskConfig(train_files=train, **settings)
    return build_task(config, exact_match=exact_match, count_tokens=count_tokens)


class Rows(Task):
    """As many problems as asked, with what a reward function gets of them."""

    def __init__(self, count: int, *, answer: str = "7") -> None:
        self.train = self.validation = self.held_out = tuple(Problem(f"u{row}", f"p{row}", answer, row) for row in range(count))

    def verify(self, problem: Problem, response: str) -> float:
        return float(response == problem.answer)

    def reward_inputs(self, problem: Problem) -> RewardInputs:
        return RewardInputs("source", problem.answer, {"key": problem.key})


def reward_file(folder: Path, code: str, *, name: str = "reward.py") -> str:
    """A file with a reward function; returns what `reward.function` is for its `score`."""
    (folder / name).write_text(dedent(code))
    return f"{folder / name}:score"


def reward_config(folder: Path, code: str, **settings: Any) -> RewardConfig:
    """A config whose reward is the function `score` of this code."""
    return RewardConfig(function=reward_file(folder, code), **settings)

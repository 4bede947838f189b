"""A program: builds the task of every dataset of reasoning-gym, scores answers, and prints a line of JSON for each.

It stands in for the process of `draw_in_a_process`, with the same PYTHONHASHSEED: one for each dataset would take minutes.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

from reasoning_gym.factory import DATASETS

from podium.config import TaskConfig
from podium.tasks import TaskContext, check_disjoint, library_verifier, reasoning_gym, task_fingerprint
from podium.tasks.library_problems import MIXTURE
from podium.tasks.reasoning_gym import ReasoningGymTask

WRONG = ("", "no such answer", "-1", "[1, 2]", '{"a": 1}')
UNSCORED = {"game_of_life_halting"}
"""Datasets whose verifier takes any text as right."""
SLOW: dict[str, dict[str, Any]] = {"knight_swap": {"num_train": 1}}


def main(names: Iterable[str]) -> None:
    reply = sys.stdout
    sys.stdout = sys.stderr  # the library prints
    found = {}
    for name in names:
        config = TaskConfig(**{"name": name, "num_train": 2, "num_validation": 1, "num_held_out": 1, **SLOW.get(name, {})})
        random.seed(0)
        started_s = time.monotonic()
        task = ReasoningGymTask(
            TaskContext(TaskConfig.model_validate_json(config.model_dump_json()), exact_match=name not in UNSCORED)
        )
        check_disjoint(task)
        found[name] = task, time.monotonic() - started_s
    with patch("sys.addaudithook"):
        for name in found:
            library_verifier.prepare(name=name, params={})
    sys.addaudithook(library_verifier._guard)
    for name, (task, built_s) in found.items():
        started_s = time.monotonic()
        scores = {answer: score(task, name, answer) for answer in (task.train[0].answer, *WRONG)}
        line = {"name": name, "fingerprint": task_fingerprint(task), "by": task.disjoint_by, "built_s": built_s}
        json.dumps(dict(task.reward_inputs(task.train[0]).extra_info))
        print(json.dumps({**line, "scores": scores, "scored_s": time.monotonic() - started_s}), file=reply, flush=True)


def score(task: ReasoningGymTask, name: str, answer: str) -> float:
    inputs = task.verifier_inputs(task.train[0])
    return library_verifier.verify(inputs.data_source, answer, inputs.ground_truth, inputs.extra_info, name=name, params={})


if __name__ == "__main__":
    with patch.object(reasoning_gym, "RUNS_IN_THE_DRIVER", frozenset(DATASETS)):
        main(sys.argv[1:] or sorted(DATASETS.keys() - {MIXTURE}))

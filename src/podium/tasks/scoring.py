"""Scoring the responses of a batch: every row comes to a `Score` or `Failed`, and one policy says what a failure means.

A user's reward function runs in a `RewardPool`, and so does a task's own verifier unless it is quick and only compares text. All
take the same path afterwards. A failed row is NaN, never zero, unless the policy says which value it has.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from podium.config import RewardConfig
from podium.errors import RewardError
from podium.observability import Mean, Metrics, Sum
from podium.tasks.base import Problem, Task
from podium.tasks.outcomes import Failed, Outcome, Score, outcome_of
from podium.tasks.reward_pool import RewardPool
from podium.tasks.reward_process import FunctionSpec, Request

logger = logging.getLogger(__name__)

MAX_SHOWN = 300
"""Characters of a response that a message shows."""


@dataclass(frozen=True)
class Rewards:
    """What a batch is worth. `values[row]` is NaN where `is_scored[row]` is False; that row must not be learned from."""

    values: list[float]
    is_scored: list[bool]
    metrics: Metrics

    @property
    def scored(self) -> list[float]:
        """The values of the rows that have one."""
        return [value for value, is_scored in zip(self.values, self.is_scored, strict=True) if is_scored]


class Scorer:
    """Scores rows of a task by a config's reward. A context manager: it owns the processes that score."""

    def __init__(self, task: Task, config: RewardConfig, *, log: Path | None = None) -> None:
        """`log` takes what a reward function or a verifier prints."""
        self._task, self._config = task, config
        spec, self._inputs = task.isolated_verifier, task.verifier_inputs
        if config.function is not None:
            spec, self._inputs = FunctionSpec(config.function, config.kwargs), task.reward_inputs
        self._pool = build_pool(spec, config, log=log) if spec else None

    def __enter__(self) -> Self:
        if self._pool:
            self._pool.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pool:
            self._pool.close()

    @property
    def pids(self) -> list[int]:
        """The processes that score; none where the task's own verifier runs in the driver."""
        return self._pool.pids if self._pool else []

    def __call__(self, problems: Sequence[Problem], responses: Sequence[str]) -> Rewards:
        """The rewards of a batch. RewardError under `on_failure: raise`, and under any policy when every row failed."""
        outcomes, num_retries = self._tried(problems, responses)
        failed = [row for row, outcome in enumerate(outcomes) if isinstance(outcome, Failed)]
        if failed and (self._config.on_failure == "raise" or len(failed) == len(outcomes)):
            raise RewardError(_complaint(failed, outcomes, problems, responses, self._config))
        if failed:
            first = _row(failed[0], outcomes, problems, responses)
            logger.warning("%d of %d responses could not be scored; %s", len(failed), len(outcomes), first)
        return _settled(outcomes, self._config, num_retries)

    def outcomes(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Outcome]:
        """What scoring each row comes to, its retries included, before any policy."""
        return self._tried(problems, responses)[0]

    def _tried(self, problems: Sequence[Problem], responses: Sequence[str]) -> tuple[list[Outcome], int]:
        """The last outcome of each row, and how many scores were tried again."""
        outcomes, num_retries = self._once(problems, responses), 0
        for _ in range(self._config.max_retries):
            failed = [row for row, outcome in enumerate(outcomes) if isinstance(outcome, Failed)]
            if not failed:
                break
            again = self._once([problems[row] for row in failed], [responses[row] for row in failed])
            for row, outcome in zip(failed, again, strict=True):
                outcomes[row] = outcome
            num_retries += len(failed)
        return outcomes, num_retries

    def _once(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Outcome]:
        if self._pool is None:
            return [_verified(self._task, *row) for row in zip(problems, responses, strict=True)]
        return self._pool.score([self._request(*row) for row in zip(problems, responses, strict=True)])

    def _request(self, problem: Problem, response: str) -> Request:
        inputs = self._inputs(problem)
        return Request(inputs.data_source, response, inputs.ground_truth, inputs.extra_info)


def build_pool(
    spec: FunctionSpec, config: RewardConfig, *, num_workers: int | None = None, log: Path | None = None
) -> RewardPool:
    """A pool for a function under a config's limits; nothing is started yet."""
    return RewardPool(spec, num_workers=num_workers or config.num_workers, timeout_s=config.timeout_s, log=log)


def check_reward(config: RewardConfig) -> None:
    """Import the reward function in a process of its own and look at its signature. ConfigError says what is wrong with it."""
    if config.function is not None:
        with build_pool(FunctionSpec(config.function, config.kwargs), config, num_workers=1) as pool:
            pool.wait_until_ready()


def _verified(task: Task, problem: Problem, response: str) -> Outcome:
    try:
        return outcome_of(task.verify(problem, response))
    except Exception as exc:  # the rim of a verifier: reported by the policy, with its traceback
        return Failed(f"raised {type(exc).__name__}: {exc}", traceback.format_exc())


def _settled(outcomes: Sequence[Outcome], config: RewardConfig, num_retries: int) -> Rewards:
    missing = config.failure_value if config.on_failure == "value" else math.nan
    values = [outcome.value if isinstance(outcome, Score) else missing for outcome in outcomes]
    is_scored = [not math.isnan(value) for value in values]
    counts = {"reward/failed": Sum(sum(isinstance(outcome, Failed) for outcome in outcomes))}
    if config.max_retries:
        counts["reward/retries"] = Sum(num_retries)
    return Rewards(values, is_scored, Metrics({**counts, **_extra_metrics(outcomes)}))


def _extra_metrics(outcomes: Sequence[Outcome]) -> Mapping[str, Mean]:
    numbers: dict[str, list[float]] = {}
    for outcome in outcomes:
        if isinstance(outcome, Score):
            for name, number in outcome.extra.items():
                numbers.setdefault(name, []).append(number)
    return {f"reward/{name}/mean": Mean.of(found) for name, found in numbers.items()}


def _complaint(
    failed: Sequence[int],
    outcomes: Sequence[Outcome],
    problems: Sequence[Problem],
    responses: Sequence[str],
    config: RewardConfig,
) -> str:
    number = f"all {len(outcomes)}" if len(failed) == len(outcomes) else f"{len(failed)} of {len(outcomes)}"
    tries = f" in {config.max_retries + 1} tries each" if config.max_retries else ""
    text = f"{number} responses could not be scored{tries}; {_row(failed[0], outcomes, problems, responses)}"
    if len(failed) == len(outcomes):
        return f"{text}\na run in which nothing can be scored stops whatever reward.on_failure says"
    return f"{text}\nmend the reward, or set reward.on_failure=drop (leave such rows out) or =value"


def _row(row: int, outcomes: Sequence[Outcome], problems: Sequence[Problem], responses: Sequence[str]) -> str:
    outcome = outcomes[row]
    assert isinstance(outcome, Failed)
    where = f"row {row} (uid {problems[row].uid}, response {_shown(responses[row])}, answer {_shown(problems[row].answer)})"
    return f"the reward {outcome.reason.removeprefix('the reward ')} on {where}" + (
        f"\n{outcome.traceback}" if outcome.traceback else ""
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")

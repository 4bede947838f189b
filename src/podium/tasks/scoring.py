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
from podium.cores import num_cores
from podium.errors import ConfigError, RewardError
from podium.observability import Mean, Metrics, Sum
from podium.tasks.attempts import Attempts
from podium.tasks.base import Problem, RewardInputs, Task
from podium.tasks.outcomes import Failed, Outcome, Score, outcome_of
from podium.tasks.reward_pool import RewardPool
from podium.tasks.reward_process import FunctionSpec, Request

logger = logging.getLogger(__name__)

FEWEST_PROCESSES = 2
"""By default: while one waits (for a file, a container, a judge), another scores."""
MOST_PROCESSES = 32
"""By default: each imports the reward function's libraries, and so takes memory of the driver's machine."""
MAX_SHOWN = 300
"""Characters of a response that a message shows."""
_ADVICE = "mend the reward, or set reward.on_failure=drop (leave such rows out) or =value"


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
            spec, self._inputs = _function(config), task.reward_inputs
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
        """The rewards of a batch. RewardError under `on_failure: raise` at the first row that failed, without waiting for the
        others, and under any policy when every row failed."""
        attempts = self._tried(problems, responses, stops_at_failure=self._config.on_failure == "raise")
        if failed := attempts.failed:
            row, first = next(iter(failed.items()))
            failure = _failure(first, row, problems[row], responses[row])
            if attempts.is_stopped:
                raise RewardError(_first_failure(failure, len(responses), self._config))
            if len(failed) == len(responses):
                raise RewardError(_all_failed(failure, len(responses), self._config))
            logger.warning("%d of %d responses could not be scored; %s", len(failed), len(responses), failure)
        return _settled(_complete(attempts), self._config, attempts.num_retries)

    def outcomes(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Outcome]:
        """The outcome of each row, its retries included, before any policy."""
        return _complete(self._tried(problems, responses, stops_at_failure=False))

    def _tried(self, problems: Sequence[Problem], responses: Sequence[str], *, stops_at_failure: bool) -> Attempts:
        retries = self._config.max_retries
        attempts = Attempts(len(responses), max_retries=retries, stops_at_failure=stops_at_failure)
        if self._pool is not None:
            self._pool.score(
                [_request(self._inputs(problem), response) for problem, response in zip(problems, responses, strict=True)],
                attempts,
            )
        while attempts.is_waiting:
            row = attempts.take()
            attempts.settle(row, _verified(self._task, problems[row], responses[row]))
        return attempts


def _function(config: RewardConfig) -> FunctionSpec:
    """The reward function, once it is known that there is one."""
    return FunctionSpec(config.function or "", config.kwargs, config.source.text if config.source else None)


def _request(inputs: RewardInputs, response: str) -> Request:
    return Request(inputs.data_source, response, inputs.ground_truth, inputs.extra_info)


def build_pool(
    spec: FunctionSpec, config: RewardConfig, *, num_workers: int | None = None, log: Path | None = None
) -> RewardPool:
    """A pool for a function under a config's limits; nothing is started yet."""
    size = num_workers or config.num_workers or min(max(FEWEST_PROCESSES, num_cores()), MOST_PROCESSES)
    return RewardPool(spec, num_workers=size, timeout_s=config.timeout_s, log=log)


def check_reward(config: RewardConfig, task: Task) -> None:
    """Import the reward function in a process of its own, look at its signature, and try it on a row of the task.

    The row's ground truth and an empty response are scored: a policy gives either. ConfigError says what is wrong with the
    function; where failures are allowed (`on_failure` is not `raise`), one on the row is a warning.
    """
    if config.function is None:
        return
    with build_pool(_function(config), config, num_workers=1) as pool:
        pool.wait_until_ready()
        problem = task.train[0]
        for response, kind in ((problem.answer, "the ground truth as the response"), ("", "an empty response")):
            attempts = Attempts(1, max_retries=config.max_retries)
            pool.score([_request(task.reward_inputs(problem), response)], attempts)
            for failed in attempts.failed.values():
                _report_trial(failed, problem, kind, config)


def _report_trial(failed: Failed, problem: Problem, kind: str, config: RewardConfig) -> None:
    text = (
        f"{config.function} cannot score {kind}, tried before the start: the reward {failed.reason.removeprefix('the reward ')} "
        f"on the training row {problem.uid} (answer {_shown(problem.answer)})"
    )
    trace = f"\n{failed.traceback}" if failed.traceback else ""
    if config.on_failure == "raise":
        raise ConfigError(f"reward.function: {text}{trace}\n{_ADVICE}")
    logger.warning("%s (reward.on_failure=%s)%s", text, config.on_failure, trace)


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


def _complete(attempts: Attempts) -> list[Outcome]:
    """The outcomes of a batch that was not stopped."""
    return [outcome for outcome in attempts.outcomes if outcome is not None]


def _first_failure(failure: str, num_rows: int, config: RewardConfig) -> str:
    return f"a response of {num_rows} could not be scored{_tries(config)}; {failure}\n{_ADVICE}"


def _all_failed(failure: str, num_rows: int, config: RewardConfig) -> str:
    return (
        f"all {num_rows} responses could not be scored{_tries(config, ' each')}; {failure}\n"
        "a run in which nothing can be scored stops whatever reward.on_failure says"
    )


def _tries(config: RewardConfig, each: str = "") -> str:
    return f" in {config.max_retries + 1} tries{each}" if config.max_retries else ""


def _failure(failed: Failed, row: int, problem: Problem, response: str) -> str:
    where = f"row {row} (uid {problem.uid}, response {_shown(response)}, answer {_shown(problem.answer)})"
    return f"the reward {failed.reason.removeprefix('the reward ')} on {where}" + (
        f"\n{failed.traceback}" if failed.traceback else ""
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")

"""What is checked before anything starts, so that bad input costs one message and nothing else."""

from __future__ import annotations

from importlib.util import find_spec

from podium.config import RunConfig, check
from podium.errors import ConfigError, MissingExtraError
from podium.models import check_model_path, load_tokenizer
from podium.tasks import Task, build_task, check_disjoint


def prepare(config: RunConfig) -> Task:
    """The run's task, once everything that can be known has been checked.

    ConfigError, MissingExtraError or TaskError say what to change; nothing was written or started then.
    """
    check(config)
    check_model_path(config.model)
    _check_extras(config)
    task = build_task(config.task)
    check_disjoint(task)
    _check_lengths(config, task)
    return task


def _check_extras(config: RunConfig) -> None:
    needed = {"reasoning_gym": ("tasks", f"the task {config.task.name!r}")}
    if config.runtime_name == "ray":
        needed["ray"] = ("ray", "runtime=ray")
    if config.trainer.tensorboard:
        needed["tensorboard"] = ("tensorboard", "trainer.tensorboard=true")
    if config.trainer.curve:
        needed["matplotlib"] = ("plot", "trainer.curve=true")
    for package, (extra, needed_for) in needed.items():
        if find_spec(package) is None:
            raise MissingExtraError(package.replace("_", "-"), extra, needed_for)


def _check_lengths(config: RunConfig, task: Task) -> None:
    tokenizer = load_tokenizer(config.model)
    problems = [*task.train, *task.validation, *task.held_out]
    longest, uid = max((len(tokenizer.encode(problem.prompt)), problem.uid) for problem in problems)
    new, budget = config.rollout.sampling.max_new_tokens, config.actor.engine.max_tokens_per_micro_batch
    if longest + new > budget:
        raise ConfigError(
            f"the longest prompt ({uid}) has {longest} tokens; {longest} + rollout.sampling.max_new_tokens ({new}) = "
            f"{longest + new} exceeds actor.engine.max_tokens_per_micro_batch ({budget})"
        )

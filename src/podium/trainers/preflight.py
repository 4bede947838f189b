"""What is checked before anything starts, so that bad input costs one message and nothing else."""

from __future__ import annotations

from importlib.util import find_spec

from podium.config import ModelConfig, RunConfig, check
from podium.datasets import prompt_tokens
from podium.errors import ConfigError, MissingExtraError
from podium.models import check_model_path, load_tokenizer
from podium.tasks import Prompt, Task, build_task, check_disjoint, check_reward


def prepare(config: RunConfig) -> Task:
    """The run's task, once everything that can be known has been checked.

    ConfigError, MissingExtraError or TaskError say what to change; nothing was written or started then.
    """
    check(config)
    check_model_path(config.model)
    _check_reference(config)
    _check_extras(config)
    lengths = _PromptLengths(config)
    task = build_task(config.task, exact_match=config.reward.function is None, count_tokens=lengths)
    check_disjoint(task)
    _check_sizes(config, task)
    _check_lengths(config, task, lengths)
    check_reward(config.reward)
    return task


class _PromptLengths:
    """Tokens of each prompt as the policy will see it, counted once. DataError for a prompt that cannot be encoded."""

    def __init__(self, config: RunConfig) -> None:
        self._tokenizer = load_tokenizer(config.model)
        self._chat_template = config.task.chat_template
        self._known: dict[Prompt, int] = {}
        if self._chat_template == "always" and self._tokenizer.chat_template is None:
            raise ConfigError(f"task.chat_template=always: the tokenizer of {config.model.path} has no chat template")

    def __call__(self, prompt: Prompt) -> int:
        if prompt not in self._known:
            self._known[prompt] = len(prompt_tokens(prompt, self._tokenizer, chat_template=self._chat_template))
        return self._known[prompt]


def _check_sizes(config: RunConfig, task: Task) -> None:
    """What `check` cannot know of files: how many rows they hold."""
    if config.trainer.prompts_per_step > len(task.train):
        raise ConfigError(
            f"trainer.prompts_per_step ({config.trainer.prompts_per_step}) is more than the {len(task.train)} training problems: "
            "a step would hold a prompt twice"
        )


def _check_reference(config: RunConfig) -> None:
    if config.ref.model is None:
        return
    try:
        check_model_path(ModelConfig(path=config.ref.model))
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("model.path", "ref.model", 1)) from exc


def _check_extras(config: RunConfig) -> None:
    needed = {}
    if not config.task.has_files:
        needed["reasoning_gym"] = ("tasks", f"the task {config.task.name!r}")
    if config.runtime_name == "ray":
        needed["ray"] = ("ray", "runtime=ray")
    if config.trainer.tensorboard:
        needed["tensorboard"] = ("tensorboard", "trainer.tensorboard=true")
    if config.trainer.curve:
        needed["matplotlib"] = ("plot", "trainer.curve=true")
    for package, (extra, needed_for) in needed.items():
        if find_spec(package) is None:
            raise MissingExtraError(package.replace("_", "-"), extra, needed_for)


def _check_lengths(config: RunConfig, task: Task, lengths: _PromptLengths) -> None:
    problems = [*task.train, *task.validation, *task.held_out]
    longest, uid = max((lengths(problem.prompt), problem.uid) for problem in problems)
    new, budget = config.rollout.sampling.max_new_tokens, config.actor.engine.max_tokens_per_micro_batch
    if longest + new > budget:
        raise ConfigError(
            f"the longest prompt ({uid}) has {longest} tokens; {longest} + rollout.sampling.max_new_tokens ({new}) = "
            f"{longest + new} exceeds actor.engine.max_tokens_per_micro_batch ({budget})"
            + ("; task.max_prompt_tokens with task.bad_rows=drop leaves long prompts out" if config.task.has_files else "")
        )

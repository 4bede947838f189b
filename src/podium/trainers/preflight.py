"""What is checked before anything starts, so that bad input costs one message and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TypeAlias

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from podium.config import RunConfig, check, part_sections
from podium.datasets import prompt_tokens, special_token_remarks
from podium.errors import ConfigError, DataError, MissingExtraError, nearest
from podium.models import check_model_path, load_model_config, load_tokenizer, row_limit
from podium.parts import ENGINES, TRAINERS
from podium.runtimes import capabilities_of
from podium.tasks import Problem, Prompt, Task, build_task, check_disjoint, check_reward, draw_targets
from podium.trainers.dataflow import Step, check_dataflow, roles_of
from podium.trainers.paths import anchored
from podium.trainers.sft import SFTTrainer
from podium.trainers.steps import advantage_estimator
from podium.workers import DistProfiler, policy_loss

logger = logging.getLogger(__name__)

Limits: TypeAlias = Sequence[tuple[str, int]]


def prepare(config: RunConfig, *, is_trained: bool = True, is_new: bool = True) -> Task:
    """The run's task, once everything that can be known has been checked; `is_trained` is False for a model that is only tried.

    What there is to remark about the rows is logged when a run `is_new`, and not again when it goes on or is scored.

    ConfigError, MissingExtraError or TaskError say what to change; nothing was written or started then.
    """
    check(config, is_trained=is_trained)
    if is_trained:
        steps = TRAINERS.resolve(config.trainer.name, config.trainer.source).dataflow(config)
        _check_columns(config, steps)
        _check_outputs(config)
        _check_samples(config)
        if config.ref.model is not None and "ref" not in roles_of(steps):
            raise ConfigError(
                f"ref.model={config.ref.model} is not used: set actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, or "
                "ref.model=null"
            )
        if not capabilities_of(config.runtime_name).own_processes:  # elsewhere the ranks may have the GPU that a tool needs
            DistProfiler(0, config.profiler)
    config = anchored(config)
    check_model_path(config.model)
    model_config = load_model_config(config.model).get_text_config()
    _check_extras(config)
    _check_reference(config, model_config)
    tokenizer = load_tokenizer(config.model)
    _check_eos(config, tokenizer, model_config.vocab_size)
    lengths = _PromptLengths(config, tokenizer, model_config.vocab_size)
    task = build_task(config.task, exact_match=config.reward.function is None, count_tokens=lengths)
    check_disjoint(task)
    _check_sizes(config, task)
    limits = _limits(config, model_config)
    _check_lengths(config, task, lengths, limits)
    _check_targets(config, task, lengths, limits, tokenizer)
    if len(tokenizer) > model_config.vocab_size:
        _check_target_ids(config, task, tokenizer, model_config.vocab_size)
    check_reward(config.reward, task)
    if is_trained and is_new:
        prompts = ((problem.uid, problem.prompt) for problem in (*task.train, *task.validation, *task.held_out))
        for remark in (*task.remarks, *special_token_remarks(prompts, tokenizer, chat_template=config.task.chat_template)):
            logger.warning("%s", remark)
    return task


def _check_columns(config: RunConfig, steps: Sequence[Step]) -> None:
    """ConfigError for a column that an estimator, a loss or another step reads, and that no step before it makes."""
    try:
        check_dataflow(steps)
        if config.warmup.steps:
            check_dataflow(SFTTrainer.dataflow())
    except DataError as exc:
        parts = f"algorithm.adv_estimator={config.algorithm.adv_estimator.name} and actor.loss={config.actor.loss.name}"
        raise ConfigError(f"{exc}; with {parts}, whose `reads` are among what these steps read") from exc


def _check_outputs(config: RunConfig) -> None:
    """ConfigError for an output of the model that the policy loss asks for, and the engine does not give."""
    engine = config.actor.engine
    given = ENGINES.resolve(engine.name, engine.source).outputs
    for name in (name for name in policy_loss(config.actor).outputs if name not in given):
        raise ConfigError(
            f"actor.loss={config.actor.loss.name} asks for the output {name!r} of the model{nearest(name, given)}; "
            f"actor.engine={engine.name} gives {', '.join(given)}"
        )


def _check_samples(config: RunConfig) -> None:
    section, samples = config.algorithm.adv_estimator, config.rollout.sampling.n
    least = advantage_estimator(config.algorithm).min_samples
    if samples < least:
        raise ConfigError(
            f"{section.name} compares the samples of a prompt: rollout.sampling.n must be at least {least}, got {samples}"
        )


class _PromptLengths:
    """Tokens of each prompt as the policy will see it, counted once. DataError for a prompt that cannot be encoded, or that holds
    a token which the model does not have."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
        self._tokenizer, self._num_tokens = tokenizer, num_tokens
        self._chat_template = config.task.chat_template
        self._known: dict[Prompt, int] = {}
        if self._chat_template == "always" and self._tokenizer.chat_template is None:
            raise ConfigError(f"task.chat_template=always: the tokenizer of {config.model.path} has no chat template")

    def __call__(self, prompt: Prompt) -> int:
        if prompt not in self._known:
            tokens = prompt_tokens(prompt, self._tokenizer, chat_template=self._chat_template)
            _check_ids(tokens, self._tokenizer, self._num_tokens)
            self._known[prompt] = len(tokens)
        return self._known[prompt]


def _check_sizes(config: RunConfig, task: Task) -> None:
    """What `check` cannot know of files: how many rows they hold."""
    if config.trainer.prompts_per_step > len(task.train):
        raise ConfigError(
            f"trainer.prompts_per_step ({config.trainer.prompts_per_step}) is more than the {len(task.train)} training problems: "
            "a step would hold a prompt twice"
        )
    if config.warmup.steps and config.warmup.batch_rows > len(task.train):
        raise ConfigError(
            f"warmup.batch_rows ({config.warmup.batch_rows}) is more than the {len(task.train)} training problems: a batch would "
            f"hold a problem twice; use warmup.batch_rows={len(task.train)} or less"
        )


def _check_eos(config: RunConfig, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
    """A tokenizer may know more tokens than the model, as long as no row uses them; the end of each response is one."""
    if tokenizer.eos_token_id >= num_tokens:
        raise ConfigError(
            f"model.path: the end-of-sequence token {tokenizer.eos_token!r} of the tokenizer of {config.model.path} has id "
            f"{tokenizer.eos_token_id}, but the model has rows for {num_tokens} tokens only: they do not belong together"
        )


def _check_ids(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
    """DataError for a token that the model has no row for."""
    if (highest := max(tokens, default=0)) >= num_tokens:
        raise DataError(
            f"the token {tokenizer.convert_ids_to_tokens(highest)!r} has id {highest}, but the model has rows for {num_tokens} "
            "tokens only; take the tokenizer that belongs to the model, or resize its embeddings"
        )


def _check_reference(config: RunConfig, policy: PreTrainedConfig) -> None:
    """The reference reads the policy's token ids, so that both have to mean the same by them."""
    if config.ref.model is None:
        return
    model = config.model.moved_to(config.ref.model)
    try:
        check_model_path(model)
        reference = load_model_config(model).get_text_config()
    except ConfigError as exc:
        raise ConfigError(str(exc).replace("model.path", "ref.model", 1)) from exc
    if reference.vocab_size != policy.vocab_size:
        raise ConfigError(
            f"ref.model: {config.ref.model} has a vocabulary of {reference.vocab_size} tokens and the policy {config.model.path} "
            f"one of {policy.vocab_size}; the reference must read the policy's tokens: use a model of the same family"
        )


def _check_extras(config: RunConfig) -> None:
    """MissingExtraError with all that is missing, in one pip line, and how to do without."""
    needed = {}
    for path, table, part in part_sections(config):
        if (row := table.row(part.name)) is not None and row.package is not None:
            without = " (trainer.trackers=[] does without)" if path.startswith("trainer.trackers.") else ""
            needed[row.package] = (row.extra or row.package, f"the {table.kind} {part.name!r}{without}")
    if package := capabilities_of(config.runtime_name).package:
        needed[package] = (package, f"runtime={config.runtime} with num_workers={config.num_workers}")
    if config.trainer.curve:
        needed["matplotlib"] = ("plot", "trainer.curve=true (trainer.curve=false does without)")
    missing = {package.replace("_", "-"): why for package, why in needed.items() if find_spec(package) is None}
    if missing:
        extras, needs = zip(*missing.values(), strict=True)
        raise MissingExtraError(", ".join(missing), ",".join(extras), " and ".join(needs))


def _limits(config: RunConfig, model_config: PreTrainedConfig) -> list[tuple[str, int]]:
    """What a prompt and what follows it must fit into, each with its name."""
    budget = config.actor.engine.max_tokens_per_micro_batch
    rows = row_limit(model_config)
    limits = [(f"actor.engine.max_tokens_per_micro_batch ({budget})", budget)]
    if rows is not None:
        limits.append((f"{rows.reason}; model.path is {config.model.path}", rows.tokens))
    return limits


def _check_lengths(config: RunConfig, task: Task, lengths: _PromptLengths, limits: Limits) -> None:
    problems = [*task.train, *task.validation, *task.held_out]
    longest, uid = max((_length_of(problem, lengths), problem.uid) for problem in problems)
    new = config.rollout.sampling.max_new_tokens
    for name, limit in limits:
        if longest + new > limit:
            raise ConfigError(
                f"the longest prompt ({uid}) has {longest} tokens; {longest} + rollout.sampling.max_new_tokens ({new}) = "
                f"{longest + new} exceeds {name}"
                + ("; task.max_prompt_tokens with task.bad_rows=drop leaves long prompts out" if config.task.has_files else "")
            )


def _length_of(problem: Problem, lengths: _PromptLengths) -> int:
    try:
        return lengths(problem.prompt)
    except DataError as exc:
        raise ConfigError(f"the prompt {problem.uid}: {exc}") from exc


def _check_target_ids(config: RunConfig, task: Task, tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> None:
    """The tokens of the warm-up's targets."""
    for kind in config.warmup.targets if config.warmup.steps else ():
        for problem, text in zip(task.train, draw_targets(task.train, {kind: 1.0}, seed=0, step=0), strict=True):
            try:
                _check_ids(tokenizer.encode(text, add_special_tokens=False), tokenizer, num_tokens)
            except DataError as exc:
                raise ConfigError(f"warm-up: the target ({kind}) of the prompt {problem.uid}: {exc}") from exc


def _check_targets(
    config: RunConfig, task: Task, lengths: _PromptLengths, limits: Limits, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The warm-up's rows: a prompt and each target that may be drawn for it."""
    if not config.warmup.steps:
        return
    if "answer" in config.warmup.targets and not all(problem.answer for problem in task.train):
        raise ConfigError(f"warmup.targets has answer, but {config.task.name} does not give right answers; use {{copy: 1.0}}")
    name, limit = min(limits, key=lambda entry: entry[1])
    for kind in config.warmup.targets:
        for problem, text in zip(task.train, draw_targets(task.train, {kind: 1.0}, seed=0, step=0), strict=True):
            prompt = lengths(problem.prompt)
            if prompt + len(text.encode()) + 2 <= limit:  # a token has a byte at least, or is one that starts or ends the text
                continue
            target = len(tokenizer.encode(text, add_special_tokens=False)) + 1
            if prompt + target > limit:
                raise ConfigError(
                    f"warm-up: the prompt {problem.uid} has {prompt} tokens and its target ({kind}) {target} with the end of "
                    f"sequence; {prompt} + {target} = {prompt + target} exceeds {name}"
                )

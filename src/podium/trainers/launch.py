"""From a config to a finished run: the warm-up, then RL, each with its own group of workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from podium.config import ModelConfig, ProfilerConfig, RunConfig, total_optimizer_steps
from podium.errors import DataError
from podium.models import load_tokenizer
from podium.observability import Progress, Trackers, draw_curve
from podium.runtimes import capabilities_of
from podium.single_controller import Init, Worker, WorkerGroup
from podium.tasks import Scorer, Task
from podium.trainers.evaluation import evaluate, greedy
from podium.trainers.node_setup import ModelFiles, NodeSetup, shared
from podium.trainers.paths import anchored
from podium.trainers.placing import start_group
from podium.trainers.ppo import PPOTrainer
from podium.trainers.profiling import StepProfiler
from podium.trainers.report import rounded
from podium.trainers.run_directory import RunDirectory
from podium.trainers.session import Session, publish_model
from podium.trainers.sft import SFTTrainer
from podium.trainers.watch import LogProbsDisagree, NothingLearned, ThreadsWait, Watcher
from podium.workers import ActorRolloutRefWorker, PolicySpec, Role, TrainingSpec, TrainingWorker

logger = logging.getLogger(__name__)

W = TypeVar("W", bound=Worker)

WARMUP_SAVE_FREQ = 200
"""Steps of the warm-up between two checkpoints."""


def run(config: RunConfig, directory: RunDirectory, task: Task, progress: Progress) -> None:
    """Do a run, or what is left of one, in its directory: afterwards `hf/` holds the model and `report.json` the scores.

    ConfigError when another process is at it, when the task or a model is not the one that the run began with, when a setting
    was changed too late, or when something in the directory is damaged.
    """
    config, directory = anchored(config), RunDirectory(directory.path.absolute())  # ranks have working directories of their own
    directory.check_files()
    with directory.locked():
        directory.check_task(task, config)
        models = directory.check_models(config)
        directory.pin_settings(config)
        directory.pin_task(task)
        directory.pin_models(models)
        tokenizer = load_tokenizer(config.model)
        if config.warmup.steps and not directory.warmup.has_model:
            warm_up(config, directory.warmup, task, tokenizer, progress)
        reinforce(config, directory, task, tokenizer, progress)
        if config.trainer.curve:
            _draw_curve(directory)


def warm_up(
    config: RunConfig, directory: RunDirectory, task: Task, tokenizer: PreTrainedTokenizerBase, progress: Progress
) -> None:
    """Supervised fine-tuning of the config's model into `hf/` of the warm-up's directory."""
    directory.path.mkdir(exist_ok=True)
    spec = TrainingSpec(
        config.model, config.actor.engine, config.warmup.optim, config.warmup.steps, config.seed, config.warmup.dropout
    )
    session = Session(
        directory,
        progress,
        num_ranks=config.num_workers,
        save_freq=WARMUP_SAVE_FREQ,
        keep=config.trainer.keep_checkpoints,
        total_steps=config.warmup.steps,
        trackers=Trackers(directory.tracker_run(config, "warm-up"), config.trainer.trackers),
        watchers=_thread_watchers(config),
    )
    _announce_start(config, progress)
    with session, _group(config, Init(TrainingWorker, spec), "warmup", directory, {"model.path": config.model}) as group:
        SFTTrainer(config, group, task, tokenizer, session).fit()


def reinforce(
    config: RunConfig,
    directory: RunDirectory,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> None:
    """RL from the warmed-up model, or from the config's own, into `hf/`."""
    trainer = config.trainer
    role: Role = "actor_rollout_ref" if config.needs_reference else "actor_rollout"
    session = Session(
        directory,
        progress,
        num_ranks=config.num_workers,
        save_freq=trainer.save_freq,
        keep=trainer.keep_checkpoints,
        total_steps=trainer.total_steps,
        trackers=Trackers(directory.tracker_run(config, "rl"), trainer.trackers),
        watchers=[NothingLearned(), *_log_prob_watchers(config), *_thread_watchers(config)],
    )
    spec = replace(policy_spec(config, _start_model(config, directory)), profiler=_profiler(config, directory))
    models = {"model.path": spec.model, **({"ref.model": spec.ref_model} if spec.ref_model else {})}
    _announce_start(config, progress)
    with (
        session,
        Scorer(task, config.reward, log=directory.path / "reward.log") as scorer,
        _group(config, Init(ActorRolloutRefWorker, spec, role), "policy", directory, models) as group,
    ):
        session.profiler = StepProfiler(config.profiler, [group])
        ppo = PPOTrainer(config, group, task, scorer, tokenizer, session)
        ppo.fit()
        ppo.report_held_out("after", step=trainer.total_steps)
        progress.announce("saving the model")
        publish_model(directory.hf, group.call.save_hf, step=trainer.total_steps)


@dataclass(frozen=True)
class Scores:
    """What `podium eval` prints: mean scores, which are shares of exact matches where the reward is 0 or 1."""

    greedy_score: float
    sampled_score: float
    n: int


def evaluate_model(config: RunConfig, model: ModelConfig, task: Task) -> Scores:
    """Held-out scores of a model folder under a recipe's task and sampling."""
    tokenizer, sampling = load_tokenizer(model), config.rollout.sampling
    role: Role = "rollout"
    step, chat_template = config.trainer.total_steps, config.task.chat_template
    spec, setup = policy_spec(config, model), NodeSetup((ModelFiles.of("model.path", model),))
    with (
        Scorer(task, config.reward) as scorer,
        start_group(config, Init(ActorRolloutRefWorker, spec, role), "eval", setup) as group,
    ):
        generate = group.call.generate_sequences
        likeliest, sampled = (
            evaluate(generate, scorer, task.held_out, tokenizer, how, step=step, chat_template=chat_template)
            for how in (greedy(sampling), sampling)
        )
    return Scores(greedy_score=rounded(likeliest.mean), sampled_score=rounded(sampled.mean), n=len(task.held_out))


def policy_spec(config: RunConfig, model: ModelConfig) -> PolicySpec:
    """The policy worker's part of a config."""
    return PolicySpec(
        model, config.actor, config.rollout, total_optimizer_steps(config), config.seed, ref_model=_ref_model(config)
    )


def _profiler(config: RunConfig, directory: RunDirectory) -> ProfilerConfig:
    save_path = str(directory.path.absolute() / config.profiler.save_path)  # ranks have working directories of their own
    return config.profiler.model_copy(update={"save_path": save_path})


def _ref_model(config: RunConfig) -> ModelConfig | None:
    """The reference model if it is not the one that RL starts from; loaded like that one."""
    return None if config.ref.model is None else config.model.moved_to(config.ref.model)


def _start_model(config: RunConfig, directory: RunDirectory) -> ModelConfig:
    return config.model.moved_to(str(directory.warmup.hf)) if config.warmup.steps else config.model


def _draw_curve(directory: RunDirectory) -> None:
    """A run whose rows were lost has nothing to draw, and is done all the same."""
    try:
        draw_curve(directory.path)
    except DataError as exc:
        logger.warning("curve.png is not drawn: %s", exc)


def _announce_start(config: RunConfig, progress: Progress) -> None:
    if capabilities_of(config.runtime_name).own_processes:
        progress.announce(f"starting {config.num_workers} {config.runtime_name} worker(s) on {config.nodes} node(s)")


def _thread_watchers(config: RunConfig) -> list[Watcher]:
    """This process's CPU time tells of the ranks only where they live in it."""
    return [ThreadsWait()] if not capabilities_of(config.runtime_name).own_processes else []


def _log_prob_watchers(config: RunConfig) -> list[Watcher]:
    """In bfloat16 rounding alone makes large gaps."""
    return [LogProbsDisagree()] if config.actor.engine.compute_dtype is None else []


def _group(
    config: RunConfig, init: Init[W], name: str, directory: RunDirectory, models: Mapping[str, ModelConfig]
) -> WorkerGroup[W]:
    """The workers of a phase, on nodes that see its directory and its models (by the settings that name them)."""
    files = tuple(ModelFiles.of(setting, model) for setting, model in models.items())
    with shared(directory.path) as folder:
        return start_group(config, init, name, NodeSetup(files, folder))

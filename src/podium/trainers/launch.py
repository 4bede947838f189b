"""From a config to a finished run: the warm-up, then RL, each with its own group of workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from podium.config import ModelConfig, RunConfig
from podium.errors import DataError
from podium.models import load_tokenizer
from podium.observability import Progress, Trackers, draw_curve
from podium.parts import TRAINERS
from podium.runtimes import capabilities_of
from podium.single_controller import Init
from podium.tasks import Scorer, Task
from podium.trainers.base import TrainerContext
from podium.trainers.evaluation import evaluate, greedy
from podium.trainers.health import HealthCheck, LogProbsDisagree, NothingLearned, ThreadsWait
from podium.trainers.node_setup import shared
from podium.trainers.paths import anchored
from podium.trainers.ppo import policy_spec
from podium.trainers.profiling import StepProfiler
from podium.trainers.report import rounded
from podium.trainers.roles import GroupPlan, Groups, started
from podium.trainers.run_directory import RunDirectory
from podium.trainers.session import Session
from podium.trainers.sft import SFTTrainer
from podium.workers import ActorRolloutRefWorker, Role, TrainingSpec, TrainingWorker

logger = logging.getLogger(__name__)

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
        health_checks=_thread_checks(config),
    )
    plan = GroupPlan("warmup", ("actor",), Init(TrainingWorker, spec), {"model.path": config.model})
    _announce_start(config, progress)
    with session, _groups(config, [plan], directory) as groups:
        SFTTrainer(config, groups, task, tokenizer, session).fit()


def reinforce(
    config: RunConfig,
    directory: RunDirectory,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> None:
    """The trainer of the config, from the warmed-up model or from the config's own, into `hf/`."""
    settings, kind = config.trainer, TRAINERS.resolve(config.trainer.name, config.trainer.source)
    session = Session(
        directory,
        progress,
        num_ranks=config.num_workers,
        save_freq=settings.save_freq,
        keep=settings.keep_checkpoints,
        total_steps=settings.total_steps,
        trackers=Trackers(directory.tracker_run(config, "rl"), settings.trackers),
        health_checks=[NothingLearned(), *_log_prob_checks(config), *_thread_checks(config)],
    )
    plans = kind.plans(_with_profile_folder(config, directory), _start_model(config, directory))
    _announce_start(config, progress)
    with (
        session,
        Scorer(task, config.reward, log=directory.path / "reward.log") as scorer,
        _groups(config, plans, directory) as groups,
    ):
        session.profiler = StepProfiler(config.profiler, groups.distinct())
        trainer = kind(TrainerContext(config, groups, task, scorer, tokenizer, session))
        trainer.fit()
        trainer.finish()


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
    plan = GroupPlan(
        "eval", ("rollout",), Init(ActorRolloutRefWorker, policy_spec(config, model), role), {"model.path": model}, ()
    )
    with Scorer(task, config.reward) as scorer, started(config, [plan]) as groups:
        generate = groups.of("rollout", ActorRolloutRefWorker).call.generate_sequences
        likeliest, sampled = (
            evaluate(generate, scorer, task.held_out, tokenizer, how, step=step, chat_template=chat_template)
            for how in (greedy(sampling), sampling)
        )
    return Scores(greedy_score=rounded(likeliest.mean), sampled_score=rounded(sampled.mean), n=len(task.held_out))


def _with_profile_folder(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """Ranks have working directories of their own, so that the folder of recordings must be absolute."""
    save_path = str(directory.path.absolute() / config.profiler.save_path)
    return config.model_copy(update={"profiler": config.profiler.model_copy(update={"save_path": save_path})})


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


def _thread_checks(config: RunConfig) -> list[HealthCheck]:
    """This process's CPU time is that of the ranks only where they live in it."""
    return [ThreadsWait()] if not capabilities_of(config.runtime_name).own_processes else []


def _log_prob_checks(config: RunConfig) -> list[HealthCheck]:
    """In bfloat16 rounding alone makes large gaps."""
    return [LogProbsDisagree()] if config.actor.engine.compute_dtype is None else []


@contextmanager
def _groups(config: RunConfig, plans: Sequence[GroupPlan], directory: RunDirectory) -> Iterator[Groups]:
    """The groups of a phase, on nodes that see its directory and its models."""
    with ExitStack() as stack:
        with shared(directory.path) as folder:
            groups = stack.enter_context(started(config, plans, folder))
        yield groups

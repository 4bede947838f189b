"""What the consumers of a config show of it: each probe builds them the way a run does, and answers with names and values.

A probe is cheap: a model of one tiny layer, four prompts, and one step. `SETTINGS` is the config that all of them start from.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from podium import recipes
from podium.algorithms import PolicyLoss, SFTLoss
from podium.cli.main import app
from podium.config import RunConfig, resolve
from podium.datasets import batches, supervised_batch
from podium.engines import BaseEngine
from podium.errors import RewardError, TaskError
from podium.models import load_model, load_tokenizer, loading
from podium.observability import Progress
from podium.protocol.jagged import lengths_of
from podium.single_controller import WorkerGroup
from podium.tasks import Problem, Scorer, Task, build_task
from podium.trainers import PPOTrainer, RunDirectory, Session, SFTTrainer, launch, placing, preflight
from podium.workers import DistProfiler
from tests.tasks.builders import Rows

T = TypeVar("T")
Shown = Mapping[str, object]
Probe = Callable[[RunConfig], Shown]

SETTINGS: dict[str, Any] = {
    "name": "small",
    "threads_per_rank": 1,
    "model": {
        "path": "char_llama",
        "override_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    },
    "task": {"name": "spell_backward", "num_train": 16, "num_validation": 4, "num_held_out": 4},
    "warmup": {"batch_rows": 4},
    "actor": {"optim": {"lr": 1e-3}, "mini_batch_prompts": 2},
    "rollout": {"sampling": {"n": 2, "max_new_tokens": 4}},
    "trainer": {"total_steps": 2, "prompts_per_step": 4, "trackers": [], "curve": False},
}
BASE = resolve(SETTINGS)


class SeenError(Exception):
    """Ends a run once a probe has what it looked for."""


def cached(probe: Callable[[RunConfig], T]) -> Callable[[RunConfig], T]:
    """The probe, run once per config."""
    known: dict[str, T] = {}

    @wraps(probe)
    def run_once(config: RunConfig) -> T:
        key = config.model_dump_json()
        if key not in known:
            known[key] = probe(config)
        return known[key]

    return run_once


@cached
def problems(config: RunConfig) -> Task:
    """The task of a config; making problems is what takes longest."""
    return build_task(config.task)


def run(config: RunConfig) -> RunDirectory:
    """A whole run, as `podium train` does it; ends without a word where a probe has what it wants."""
    directory, of_task = RunDirectory.create(config), BASE.model_copy(update={"task": config.task})
    with Progress(Console(file=io.StringIO())) as progress, suppress(SeenError):
        launch.run(config, directory, problems(of_task), progress)
    return directory


def looked_at(config: RunConfig, trainer: type[PPOTrainer | SFTTrainer], look: Callable[[Any], Shown]) -> Shown:
    """What `look` sees of the trainer, in the place of its `fit`; nothing of one that the run has no use for."""
    shown: dict[str, object] = {}

    def fit(self: Any) -> None:
        if isinstance(self, trainer):
            shown.update(look(self))
        raise SeenError

    with pytest.MonkeyPatch.context() as patch:
        for each in (PPOTrainer, SFTTrainer):
            patch.setattr(each, "fit", fit)
        run(config)
    return shown


# -- the runs' files and texts ----------------------------------------------------------------------------------------


def folder(config: RunConfig) -> Shown:
    path = RunDirectory.create(config).path
    return {"root": path.parent.name, "name": path.name.rsplit("-", 2)[0]}


def recipe_list(config: RunConfig) -> Shown:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "RECIPES", {"mine": lambda: config})
        return {"output": CliRunner().invoke(app, ["recipes"]).output}


@cached
def whole_run(config: RunConfig) -> Shown:
    path = run(config).path
    steps = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    samples = [json.loads(line)["step"] for line in (path / "samples.jsonl").read_text().splitlines()]
    return {
        "validated": [row["step"] for row in steps if "val/score/mean" in row],
        "saved": sorted(int(step.name.removeprefix("step-")) for step in (path / "checkpoints").glob("step-*")),
        "samples": samples.count(1),
        "files": sorted(name for name in ("mine.txt", "curve.png") if (path / name).exists()),
    }


@cached
def profile(config: RunConfig) -> Shown:
    """What a run records of its steps."""
    folder = next((path for path in run(config).path.iterdir() if any(path.glob("step-*.gz"))), None)
    traces = [gzip.decompress(path.read_bytes()) for path in (folder.glob("*.gz") if folder else [])]
    return {
        "folder": folder and folder.name,
        "files": sorted(path.name for path in folder.iterdir()) if folder else [],
        "has_shapes": any(b"Input Dims" in trace for trace in traces),
    }


def profiled_ranks(config: RunConfig) -> Shown:
    return {"ranks": [rank for rank in range(3) if DistProfiler(rank, config.profiler).is_enabled]}


# -- models, tasks and groups -----------------------------------------------------------------------------------------


def model_loading(config: RunConfig) -> Shown:
    """How transformers is asked for a folder's config, weights and tokenizer."""
    asked: dict[str, object] = {}

    def spied(load: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def loads(*args: Any, **kwargs: Any) -> Any:
            asked[kind] = kwargs.get("trust_remote_code")
            return load(*args, **kwargs)

        return loads

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
            patch.setattr(getattr(loading, kind), "from_pretrained", spied(getattr(loading, kind).from_pretrained, kind))
        load_model(config.model, seed=0)
        load_tokenizer(config.model)
    return {"trust": asked}


@cached
def task(config: RunConfig) -> Shown:
    """The task, as it is prepared before a run."""
    try:
        found = preflight.prepare(config)
    except TaskError:
        return {"sizes": "refused"}
    return {
        "sizes": [len(found.train), len(found.validation), len(found.held_out)],
        "first": [found.split(name)[0].prompt_text for name in ("train", "validation", "held_out")],
        "lines": len(found.train[0].prompt_text.splitlines()),
        "answer_lengths": {len(problem.answer) for problem in found.train},
        "source": found.reward_inputs(found.train[0]).data_source,
    }


def chat_templates(config: RunConfig) -> Shown:
    """When text went through the chat template: before a run, in warm-up, rollout and evaluation, and in `podium eval`."""
    asked: list[object] = []
    tokens = batches.prompt_tokens

    def spied(*args: Any, **kwargs: Any) -> list[int]:
        asked.append(kwargs.get("chat_template"))
        return tokens(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for module in (batches, preflight):
            patch.setattr(module, "prompt_tokens", spied)
        found = preflight.prepare(config)
        run(config)
        launch.evaluate_model(config, config.model, found)
    return {"asked": set(asked)}


def group(config: RunConfig) -> Shown:
    """The group of workers and the session that a run asks for."""
    shown: dict[str, object] = {}

    class SpiedSession(Session):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            shown["session.num_ranks"] = kwargs["num_ranks"]
            super().__init__(*args, **kwargs)

    def spied_group(pool: Any, init: object, **kwargs: Any) -> WorkerGroup[Any]:
        shown.update(kwargs, ranks=pool.world_size, on_nodes=pool.process_on_nodes, use_gpu=pool.use_gpu)
        raise SeenError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placing, "WorkerGroup", spied_group)
        patch.setattr(launch, "Session", SpiedSession)
        run(config)
    return shown


# -- scoring ----------------------------------------------------------------------------------------------------------


class Flaky(Rows):
    """A verifier that breaks on some responses."""

    def verify(self, problem: Problem, response: str) -> float:
        if response == "odd":
            raise ValueError("odd")
        return 1.0


def scorer(config: RunConfig) -> Shown:
    """What the scorer makes of a response that cannot be scored."""
    flaky = Flaky(2)
    try:
        with Scorer(flaky, config.reward) as scores:
            rewards, num_processes = scores(flaky.train, ["odd", "even"]), len(scores.pids)
    except RewardError:
        return {"rewards": "the run stops"}
    values = [value if is_scored else None for value, is_scored in zip(rewards.values, rewards.is_scored, strict=True)]
    return {"rewards": values, "retries": rewards.metrics.to_floats().get("reward/retries"), "processes": num_processes}


# -- training ---------------------------------------------------------------------------------------------------------


class Recorded:
    """The calls of a group, noted with the temperature that came along."""

    def __init__(self, calls: Any) -> None:
        self._calls = calls
        self.noted: dict[str, object] = {}

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        def call(batch: Any) -> Any:
            self.noted[name] = batch.meta_info.get("temperature")
            return getattr(self._calls, name)(batch)

        return call


def optimizer(engine: BaseEngine, trainer: PPOTrainer | SFTTrainer) -> Shown:
    """Three optimizer steps of an engine: AdamW, its schedule, clipping and micro-batches."""
    problems = trainer.task.train[:4]
    batch = supervised_batch([problem.prompt for problem in problems], ["x"] * 4, trainer.tokenizer)
    micros, computed_in = engine._plan(batch), set[str]()
    engine.model.get_output_embeddings().register_forward_hook(lambda *seen: computed_in.add(str(seen[2].dtype)))
    engine.version = 0
    lrs = [engine.train_batch(batch, SFTLoss()).to_floats()["lr"]]
    adamw = engine._optimizer
    moments = torch.cat([state["exp_avg"].flatten() for state in adamw.state.values()])
    lrs += [engine.train_batch(batch, SFTLoss()).to_floats()["lr"] for _ in range(2)]
    return {
        "lrs": lrs,
        "adamw": {key: adamw.param_groups[0][key] for key in ("betas", "eps", "weight_decay")},
        "first_moment": float(moments.norm()),
        "micro_batches": len(micros),
        "layouts": {micro.layout for micro in micros},
        "computed_in": computed_in,
        "is_noisy": engine.model.training,
    }


@cached
def warm_up(config: RunConfig) -> Shown:
    def look(trainer: SFTTrainer) -> Shown:
        engine = trainer.model._group.workers[0].engine
        batch = trainer.batch(1)
        return {
            "loaded_from": Path(engine.model.name_or_path).name,
            "steps": (trainer.session.total_steps, engine._total_steps),
            "rows": len(batch),
            "prompts": trainer.sampler.rows(0),
            "targets": [trainer.tokenizer.decode(row, skip_special_tokens=True) for row in batch.batch["responses"].unbind()],
            **optimizer(engine, trainer),
        }

    return looked_at(config, SFTTrainer, look)


@cached
def policy(config: RunConfig) -> Shown:
    """The workers of RL as they were built, and their optimizer."""

    def look(trainer: PPOTrainer) -> Shown:
        worker = trainer.actor._group.workers[0]
        engine, model = worker.actor.engine, worker.actor.engine.model
        ref = worker.ref.engine.model if worker.role == "actor_rollout_ref" else None
        return {
            "role": worker.role,
            "dtype": str(model.dtype),
            "loaded_from": Path(model.name_or_path).name,
            "hidden_size": model.config.hidden_size,
            "ref.hidden_size": ref.config.hidden_size if ref else None,
            "weights": [weight.sum().item() for weight in model.parameters()],
            "seed": engine._seed,
            "loss": loss_of(worker.actor._loss),
            "steps": (trainer.session.total_steps, engine._total_steps),
            "prompts": trainer.sampler.rows(0),
            "decoded_at_once": [len(rows) for rows in worker.rollout._batches(torch.tensor([2, 2]), 2)],
            **optimizer(engine, trainer),
        }

    return looked_at(config, PPOTrainer, look)


def loss_of(loss: PolicyLoss) -> Shown:
    """The settings of the policy's loss: those of its surrogate beside its own."""
    terms = {name: value for name, value in asdict(loss).items() if name != "surrogate"}
    return {**terms, **loss.surrogate.settings.model_dump(exclude={"name"}), "kl": loss.kl}


@cached
def step(config: RunConfig) -> Shown:
    """What one step of RL does."""

    def look(trainer: PPOTrainer) -> Shown:
        trainer.sync()
        engine = trainer.actor._group.workers[0].actor.engine
        recorded = trainer.actor = trainer.generator = Recorded(trainer.actor)
        trainer.reference = trainer.reference and recorded
        future = trainer.score(trainer.rollout(1))
        future = trainer.advantages(trainer.log_probs(future, 2), 1)  # the first step compares log-probs in any case
        trainer.update(future)
        batch = future.get()
        return {
            "rows": len(batch),
            "responses": batch.non_tensor_batch["response"].tolist(),
            "longest": int(lengths_of(batch.batch["responses"]).max()),
            "rewards": batch.batch["rewards"].tolist(),
            "reward_kl": batch.batch["reward_kl"].tolist() if "reward_kl" in batch.batch else None,
            "advantages": batch.batch["advantages"].tolist(),
            "calls": list(recorded.noted),
            "temperatures": recorded.noted,
            "optimizer_steps": engine.version,
        }

    return looked_at(config, PPOTrainer, look)


def write_files(where: Path) -> None:
    """What the settings of the table name, by relative paths: models, rows and rewards."""
    chat = load_tokenizer(BASE.model)
    chat.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    small = resolve(SETTINGS, ["model.override_config.hidden_size=8"]).model
    for name, model in (("model", small), ("start", BASE.model)):
        load_model(model, seed=5).save_pretrained(where / name)
        chat.save_pretrained(where / name)
    for name, count in (("train", 16), ("validation", 4), ("held_out", 4)):
        rows = [{"prompt": f"{name} {'long long ' * (row == 0)}{row}", "answer": f"{name}{row}"} for row in range(count)]
        (where / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (where / "bad.jsonl").write_text((where / "train.jsonl").read_text() + '{"prompt": "no answer"}\n')
    (where / "tracker.py").write_text(
        "from podium.observability import Tracker\n"
        "class Mine(Tracker):\n"
        "    def start(self, run): self.file = run.folder / 'mine.txt'\n"
        "    def log(self, step, metrics): self.file.write_text(str(step))\n"
    )
    (where / "reward.py").write_text(
        "import time\n"
        "def constant(data_source, solution_str, ground_truth, extra_info, value=0.5):\n"
        "    return value\n"
        "def slow(data_source, solution_str, ground_truth, extra_info):\n"
        "    time.sleep(0.7 * (solution_str == 'odd'))\n"
        "    return 1.0\n"
    )

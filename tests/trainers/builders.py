"""A run of the real recipe, small enough for a test, and how to compare two of them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from podium.config import RunConfig, resolve
from podium.observability import Progress
from podium.recipes import recipe
from podium.trainers import RunDirectory, run
from podium.trainers.preflight import prepare

SMALL = (
    "task.params.max_word_len=3",
    "task.num_train=200",
    "task.num_validation=16",
    "task.num_held_out=16",
    "rollout.sampling.n=4",
    "actor.mini_batch_prompts=4",
    "trainer.prompts_per_step=8",
    "trainer.total_steps=5",
    "trainer.val_freq=2",
    "trainer.save_freq=2",
    "trainer.trackers=[]",
    "trainer.curve=false",
)
WARM_UP = ("warmup.steps=150", "warmup.optim.lr=5e-3", "trainer.total_steps=1")


def small_config(root: Path, *overrides: str) -> RunConfig:
    """The demo's recipe with words of three letters and few, small steps."""
    return resolve(recipe("spell_backward"), [*SMALL, f"run_root={root}", *overrides])


def from_base(root: Path, base: Path, *overrides: str) -> RunConfig:
    """The same without the warm-up, from a model folder."""
    return small_config(root, f"model={base}", "warmup.steps=0", *overrides)


def train(config: RunConfig, directory: RunDirectory | None = None) -> RunDirectory:
    """Do a run, or the rest of one, in this process; returns its directory."""
    directory = directory or RunDirectory.create(config)
    with Progress(Console(file=io.StringIO())) as progress:
        run(config, directory, prepare(config), progress)
    return directory


def rows(directory: RunDirectory) -> list[dict[str, Any]]:
    """The metrics of every step, but for time and `perf/*`."""
    lines = (directory.path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(("timing_s/", "perf/"))} for line in lines]


def weights(directory: RunDirectory) -> bytes:
    """The bytes of the trained model."""
    return (directory.hf / "model.safetensors").read_bytes()

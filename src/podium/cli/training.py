"""`podium train` and `podium eval`: starting, resuming, interrupting and reporting a run on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from podium.config import RunConfig, explain
from podium.errors import ConfigError
from podium.observability import Progress
from podium.tasks import Task
from podium.trainers import RunDirectory, Scores, evaluate_model, run
from podium.trainers.preflight import prepare

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells report it."""


def start(config: RunConfig, *, dry_run: bool) -> None:
    """Check a config, then make a run directory and train in it."""
    task = prepare(config)
    if dry_run:
        _explain(config, task)
    else:
        _train(config, RunDirectory.create(config), task)


def resume(path: Path, *, dry_run: bool) -> None:
    """Go on with an existing run."""
    directory, config = RunDirectory.open(path)
    task = prepare(config)
    directory.check_task(task)
    if dry_run:
        _explain(config, task)
    else:
        _train(config, directory, task)


def evaluate(path: Path, bare_model_config: RunConfig | None) -> Scores:
    """Held-out scores of a run's model, or of a bare model folder under another config's task."""
    directory = None
    if bare_model_config is not None:
        config, model = bare_model_config, bare_model_config.model.moved_to(str(path))
    else:
        directory, config = RunDirectory.open(path)
        model = config.model.moved_to(str(directory.hf))
        if not directory.hf.is_dir():
            raise ConfigError(f"{path} has no hf/ folder yet: the run did not finish; go on with podium train --resume {path}")
    task = prepare(config.model_copy(update={"model": model}), is_trained=False)
    if directory is not None:
        directory.check_task(task)
    return evaluate_model(config, model, task)


def _explain(config: RunConfig, task: Task) -> None:
    console = Console()
    sizes = f"{len(task.train)} training, {len(task.validation)} validation, {len(task.held_out)} held-out problems"
    for line in (f"{sizes}; no {task.disjoint_by} is in two of them", *explain(config)):
        console.print(line, highlight=False)
    console.print("dry run: everything that can be checked beforehand is in order; nothing was started", highlight=False)


def _train(config: RunConfig, directory: RunDirectory, task: Task) -> None:
    console = Console()
    console.print(f"run directory: {directory.path}", highlight=False, soft_wrap=True)
    try:
        with Progress(console, title=config.name) as progress:
            run(config, directory, task, progress)
    except KeyboardInterrupt:
        steps = sorted(int(folder.name.removeprefix("step-")) for folder in directory.checkpoints.glob("step-*"))
        kept = f"the checkpoint of step {steps[-1]} is kept" if steps else "no step of RL was saved yet"
        console.print(
            f"\ninterrupted; {kept}. Go on with: podium train --resume {directory.path}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(INTERRUPTED) from None
    _print_report(console, config, directory)


def _print_report(console: Console, config: RunConfig, directory: RunDirectory) -> None:
    report = directory.read_report()
    before, after = report["before"], report["after"]
    scores = Table(title=f"held-out, {after['n']} problems never trained on", title_justify="left")
    for column in ("", "before", "after"):
        scores.add_column(column, justify="right" if column else "left")
    unit, form = ("exact match", "{:.1%}") if config.reward.function is None else ("mean reward", "{:.4g}")
    for label, key in ((f"greedy {unit}", "greedy_exact"), (f"sampled {unit}", "sampled_exact")):
        scores.add_row(label, form.format(before[key]), form.format(after[key]))
    console.print(scores)
    console.print(_answers(before["answers"], after["answers"]))
    for name, path in (
        ("model", directory.hf),
        ("metrics", directory.path / "metrics.jsonl"),
        ("curve", directory.path / "curve.png"),
    ):
        if path.exists():
            console.print(f"{name}: {path}", highlight=False, soft_wrap=True)


def _answers(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Table:
    table = Table(title="greedy answers", title_justify="left")
    for column in ("prompt", "right answer", "before", "after"):
        table.add_column(column)
    for old, new in zip(before, after, strict=True):
        table.add_row(*(repr(text)[1:-1] for text in (old["prompt"].strip(), old["answer"], old["response"], new["response"])))
    return table

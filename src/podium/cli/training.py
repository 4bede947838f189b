"""`podium train` and `podium eval`: starting, resuming, interrupting and reporting a run on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from podium.cli.signals import exit_code, in_words
from podium.cli.terminal import text_console
from podium.config import RunConfig, explain
from podium.errors import ConfigError, TaskError
from podium.observability import Progress
from podium.tasks import Task
from podium.trainers import RunDirectory, Scores, evaluate_model, run
from podium.trainers.launch import WARMUP_SAVE_FREQ
from podium.trainers.model_files import check_published
from podium.trainers.paths import anchored
from podium.trainers.preflight import prepare
from podium.trainers.run_directory import check_root
from podium.trainers.threads import threads_line


def start(config: RunConfig, *, dry_run: bool) -> None:
    """Check a config, then make a run directory and train in it."""
    config = anchored(config)  # before a link in it such as runs/latest moves to the new run
    check_root(config)
    task = prepare(config)
    if dry_run:
        _explain(config, task)
    else:
        _train(config, RunDirectory.create(config), task)


def resume(path: Path, overrides: Sequence[str], *, dry_run: bool) -> None:
    """Go on with an existing run, with the settings it has but for the overrides."""
    directory, config = RunDirectory.open(path, overrides)
    task = prepare(config, is_new=False)
    directory.check_task(task, config)
    if dry_run:
        directory.check_models(config)
        _explain(config, task)
    elif not overrides and _is_done(config, directory):
        _print_done(config, directory)
    else:
        _train(config, directory, task)


def evaluate(path: Path, bare_model_config: RunConfig | None) -> tuple[Scores, RunConfig]:
    """Held-out scores of a run's model, or of a bare model folder under another config's task, and the config that asked."""
    directory = None
    if bare_model_config is not None:
        moved = bare_model_config.model.moved_to(str(path))
        config = anchored(bare_model_config.model_copy(update={"model": moved}))
        model = config.model
    else:
        directory, config = RunDirectory.open(path)
        model = config.model.moved_to(str(directory.hf))
        if not directory.hf.is_dir():
            raise ConfigError(f"{path} has no hf/ folder yet: the run did not finish; go on with podium train --resume {path}")
        check_published(directory.hf)
    task = prepare(config.model_copy(update={"model": model}), is_trained=False)
    if directory is not None:
        directory.check_task(task)
    return evaluate_model(config, model, task), config


def _explain(config: RunConfig, task: Task) -> None:
    console = text_console()
    sizes = f"{len(task.train)} training, {len(task.validation)} validation, {len(task.held_out)} held-out problems"
    lines = [f"{sizes}; no {task.disjoint_by} is in two of them", *explain(config), threads_line(config)]
    for line in filter(None, lines):
        console.print(line, soft_wrap=True)
    in_order = "dry run: everything that can be checked beforehand is in order; nothing was started"
    console.print(in_order, soft_wrap=True)


def _train(config: RunConfig, directory: RunDirectory, task: Task) -> None:
    console = text_console()
    console.print(f"run directory: {directory.path}", soft_wrap=True)
    if line := threads_line(config):
        console.print(line, soft_wrap=True)
    try:
        with Progress(console, title=config.name) as progress:
            run(config, directory, task, progress)
        _print_report(console, config, directory)
    except KeyboardInterrupt as interrupt:
        text = f"\n{in_words(interrupt)}; {_kept(config, directory)}. {_way_on(directory)}"
        console.print(text, soft_wrap=True)
        raise typer.Exit(exit_code(interrupt)) from None
    except (ConfigError, TaskError):  # of input that `run` refused; nothing was changed
        raise
    except Exception as exc:
        exc.add_note(_way_on(directory))
        raise


def _way_on(directory: RunDirectory) -> str:
    return f"Go on with: podium train --resume {directory.path}"


def _is_done(config: RunConfig, directory: RunDirectory) -> bool:
    with directory.locked():
        is_done = directory.is_done(config)
        if is_done:
            check_published(directory.hf)
        return is_done


def _print_done(config: RunConfig, directory: RunDirectory) -> None:
    console, steps = text_console(), config.trainer.total_steps
    _print_report(console, config, directory)
    more = f"podium train --resume {directory.path} trainer.total_steps={2 * steps}"
    console.print(f"already done ({steps}/{steps}); for more: {more}", soft_wrap=True)


def _kept(config: RunConfig, directory: RunDirectory) -> str:
    """What an interrupted run has saved."""
    if (step := directory.saved_step) is not None:
        return f"the checkpoint of step {step} is kept"
    warmup = directory.warmup
    if not config.warmup.steps or warmup.has_model:
        return f"no step of RL was saved yet{', the warm-up is kept' if config.warmup.steps else ''}"
    if (step := warmup.saved_step) is not None:
        return f"the warm-up's checkpoint of step {step} is kept"
    return f"nothing was saved yet, the warm-up starts again from 0 (it saves every {WARMUP_SAVE_FREQ} steps)"


def _print_report(console: Console, config: RunConfig, directory: RunDirectory) -> None:
    report = directory.read_report()
    found = {when: report[when] for when in ("before", "after") if when in report}
    scores = Table(title=f"held-out, {report['after']['n']} problems never trained on", title_justify="left")
    for column in ("", *found):
        scores.add_column(column, justify="right" if column else "left")
    unit, form = unit_of(config)
    for label, key in ((f"greedy {unit}", "greedy_score"), (f"sampled {unit}", "sampled_score")):
        scores.add_row(label, *(form.format(entry[key]) for entry in found.values()))
    console.print(scores)
    console.print(_answers({when: entry["answers"] for when, entry in found.items()}))
    for name, path in (
        ("model", directory.hf),
        ("metrics", directory.path / "metrics.jsonl"),
        ("curve", directory.path / "curve.png"),
    ):
        if path.exists():
            console.print(f"{name}: {path}", soft_wrap=True)


def unit_of(config: RunConfig) -> tuple[str, str]:
    """What a score of this run is, and the format to print it in: a user's own reward need not be a share."""
    return ("exact match", "{:.1%}") if config.reward.function is None else ("mean reward", "{:.4g}")


def _answers(found: Mapping[str, list[dict[str, Any]]]) -> Table:
    """The greedy answers side by side, a column for each time that they were taken."""
    table = Table(title="greedy answers", title_justify="left")
    for column in ("prompt", "right answer", *found):
        table.add_column(column)
    for entries in zip(*found.values(), strict=True):
        texts = (entries[0]["prompt"].strip(), entries[0]["answer"], *(entry["response"] for entry in entries))
        table.add_row(*(repr(text)[1:-1] for text in texts))
    return table

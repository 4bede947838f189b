"""The folder of a run: where each file is, and what a resumed run reads there."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.checkpoint import CheckpointStore
from podium.config import RunConfig, read_yaml, resolve, sources_of, to_yaml
from podium.errors import ConfigError
from podium.observability import Phase, RunInfo
from podium.parts import edited, read_sources, write_sources
from podium.tasks import Task, task_fingerprint
from podium.trainers.json_files import read_json, write_json, write_text
from podium.trainers.model_files import ModelFiles, check_given, check_published, pin_given
from podium.trainers.paths import anchored
from podium.trainers.report import check_report
from podium.trainers.settings import SettingsRecord, changes

logger = logging.getLogger(__name__)

FOLDERS = ("checkpoints", "hf", "parts", "tb", "warmup")
FILES = (
    *("metrics.jsonl", "samples.jsonl", "report.json", "task.json", "settings.json", "models.json", "traffic.json"),
    *("trackers.json", "reward.log", "curve.png", ".lock"),
)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run: `config.yaml`, `settings.json` (a record of it, which shows edits), `task.json` (the task's fingerprint),
    `models.json` (checksums of the models that it was given), `metrics.jsonl`, `traffic.json` (what the last step moved),
    `samples.jsonl`, `trackers.json` (the run's id for trackers), `tb/`, `curve.png`, `report.json`, `checkpoints/`, `hf/` (the
    trained model), and `warmup/` with the same files of the supervised phase. `parts/` has the files of parts that are named by a
    path."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def settings(self) -> SettingsRecord:
        return SettingsRecord(self.path / "settings.json", read_sources(self.parts))

    @property
    def parts(self) -> Path:
        """The files of parts that are named by a path, as they were when the run first used them."""
        return self.path / "parts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def warmup(self) -> RunDirectory:
        return RunDirectory(self.path / "warmup")

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def task(self) -> Path:
        return self.path / "task.json"

    @property
    def models(self) -> Path:
        return self.path / "models.json"

    @property
    def traffic(self) -> Path:
        return self.path / "traffic.json"

    @property
    def has_model(self) -> bool:
        """Whether `hf/` is there, which is then whole (`publish_model`)."""
        return (self.hf / "config.json").is_file()

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint by its name, whole or not; None without any."""
        names = (re.fullmatch(r"step-(\d+)", path.name) for path in self.checkpoints.glob("step-*"))
        return max((int(match[1]) for match in names if match), default=None)

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """A new folder `NAME-YYYYmmdd-HHMMSS` under `config.run_root`, holding `config.yaml`; `latest` there links to it.

        What is kept has absolute paths, so that the run can go on from any working directory.
        """
        root, config = Path(config.run_root), anchored(config)
        name = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            path = root / f"{name}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as exc:
                raise ConfigError(f"run_root: no run directory can be made at {path}: {exc}") from exc
            run = cls(path)
            try:
                write_sources(run.parts, sources_of(config))
                run.config.write_text(to_yaml(config), encoding="utf-8")
                run.settings.write(config)
            except OSError as exc:
                raise ConfigError(f"run_root: nothing can be written to {path}: {exc}") from exc
            _link_latest(root, path.name)
            return run
        raise ConfigError(f"run_root: {root} holds a thousand runs called {name} already")

    @classmethod
    def open(cls, path: Path, overrides: Sequence[str] = ()) -> tuple[RunDirectory, RunConfig]:
        """An existing run, and its config with `key=value` overrides in it; changes nothing.

        ConfigError when the folder holds no `config.yaml`, when that was edited in a setting that matters and the overrides do
        not say the same, when the run is too far for a change, or when something in the folder is damaged.
        """
        run = cls(path.resolve())
        run.check_files()
        written, recorded = run._written(), run.settings.read()
        if recorded is None:
            logger.warning("%s is gone: whether config.yaml was edited since the run began is not known", run.settings.path)
        else:
            run.settings.check_edits(written, anchored(resolve(recorded, overrides)), run.path)
        config = anchored(resolve(written, overrides, sources=read_sources(run.parts)))
        run.check_settings(config)
        for source in filter(edited, sources_of(config).values()):
            logger.warning(
                "%s was edited since the run began: the run goes on with the text that it began with, which is %s. To use the "
                "edit, start a new run, or give the file another path and choose that",
                source.path,
                run.parts / f"{source.sha256}.py",
            )
        return run, config

    def is_done(self, config: RunConfig) -> bool:
        """Whether nothing of the config is left to do: its last step is in a whole checkpoint, model and scores are there.

        CheckpointError when there are checkpoints and none is whole.
        """
        checkpoint = CheckpointStore(self.checkpoints, keep=config.trainer.keep_checkpoints).latest()
        is_last = checkpoint is not None and checkpoint.step == config.trainer.total_steps
        return is_last and self.has_model and "after" in self.read_report()

    def check_files(self) -> None:
        """ConfigError for a folder in the place of a file, a file in the place of a folder, and a damaged JSON file."""
        for names, is_right, kind in ((FOLDERS, Path.is_dir, "folder"), (FILES, Path.is_file, "file")):
            for found in (run.path / name for run in (self, self.warmup) for name in names):
                if found.exists() and not is_right(found):
                    raise ConfigError(f"{found} is not a {kind}: move it away, and put back what was there")
        self.settings.read()
        self._fingerprint()
        self.read_report()

    def check_settings(self, config: RunConfig) -> None:
        """ConfigError for a change of the warm-up after its end, and for fewer steps than are done."""
        done, recorded = self.saved_step, self.settings.read()
        if done is not None and config.trainer.total_steps < done:
            raise ConfigError(
                f"trainer.total_steps={config.trainer.total_steps}, but {self.path} has done {done}: it cannot have fewer"
            )
        if recorded is not None and recorded.warmup != config.warmup and (self.warmup.has_model or done is not None):
            raise ConfigError(
                f"warmup.*: the warm-up of {self.path} is done, so that a change has no effect; put the settings back, or start "
                "a new run"
            )

    def pin_settings(self, config: RunConfig) -> None:
        """Keep the settings that the run goes on with, after `check_settings`; what changed is logged and listed in
        `settings.json`."""
        config = anchored(config)
        self.check_settings(config)
        write_sources(self.parts, sources_of(config))
        for change in self.settings.write(config, after_step=self.saved_step):
            logger.warning("%s goes on with another setting: %s", self.path.name, change)
        if not self.config.is_file() or self._written() != config:
            write_text(self.config, to_yaml(config))

    def _written(self) -> RunConfig:
        """What `config.yaml` holds."""
        return anchored(resolve(read_yaml(self.config), sources=read_sources(self.parts)))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other process writes here meanwhile. ConfigError names the process that does.

        The kernel lets go of the lock when this process ends, however it ends: nothing is left to clean up.
        """
        with (self.path / ".lock").open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                file.seek(0)
                raise ConfigError(
                    f"{self.path} is being written by another process (pid {file.read() or 'not known'}); wait for it or end it"
                ) from exc
            except OSError as exc:
                raise ConfigError(f"{self.path} is on a file system without locks: {exc}; use another run_root") from exc
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def pin_task(self, task: Task) -> None:
        """Keep the task's fingerprint as that of the run, or where it has one, `check_task`."""
        self.check_task(task)
        if not self.task.is_file():
            write_json(self.task, {"fingerprint": task_fingerprint(task)})

    def check_task(self, task: Task, config: RunConfig | None = None) -> None:
        """ConfigError when these are not the problems that the run began with: what it trained on might now be held out.

        The message names the settings of the task that `config` would change.
        """
        known, found = self._fingerprint(), task_fingerprint(task)
        if known is not None and known != found:
            recorded = self.settings.read()
            edits = changes(recorded, anchored(config)) if recorded and config else []
            if of_task := [str(edit) for edit in edits if edit.key.startswith("task.")]:
                raise ConfigError(
                    f"{'; '.join(of_task)}: the problems would not be those that {self.path} began with, and what it trained on "
                    "might now be held out. Leave the setting as it was, or start a new run"
                )
            raise ConfigError(
                f"the problems of the task are not those that {self.path} began with (fingerprint {found[:12]}, {self.task.name} "
                f"has {known[:12]}): the task's files, or the library that makes the problems, changed since. Put them back as "
                "they were, or start a new run"
            )

    def check_models(self, config: RunConfig) -> dict[str, ModelFiles]:
        """The files of the models that the run was given; reads every byte of them, and of the warm-up's.

        ConfigError when one of them, or the warmed-up model, is not the same any more.
        """
        if config.warmup.steps and self.warmup.has_model:
            check_published(self.warmup.hf)
        return check_given(self.models, config)

    def pin_models(self, files: Mapping[str, ModelFiles]) -> None:
        """Keep the files of models, after `check_models`, as those of the run."""
        pin_given(self.models, files)

    def tracker_run(self, config: RunConfig, phase: Phase) -> RunInfo:
        """This phase of the run as trackers know it, under an id that is kept in `trackers.json`."""
        path, remedy = self.path / "trackers.json", "put it back, or remove it to log under a new id"
        content = read_json(path, remedy=remedy)
        if content is None:
            content = {"run_id": secrets.token_hex(8)}
            write_json(path, content)
        if not isinstance(run_id := content.get("run_id"), str):
            raise ConfigError(f"{path} is damaged (it does not have a run_id): {remedy}")
        group = self.path.parent.name if phase == "warm-up" else self.path.name
        return RunInfo(
            run_id=run_id,
            name=f"{group}-warmup" if phase == "warm-up" else group,
            group=group,
            phase=phase,
            folder=self.path,
            config=config.model_dump(mode="json"),
        )

    def _fingerprint(self) -> str | None:
        remedy = "put it back; without it Podium does not know whether held-out problems were trained on"
        content = read_json(self.task, remedy=remedy)
        if content is not None and not isinstance(content.get("fingerprint"), str):
            raise ConfigError(f"{self.task} is damaged (it has no fingerprint): {remedy}")
        return None if content is None else content["fingerprint"]

    def write_report(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Add entries to `report.json`, atomically; returns the whole report."""
        report = {**self.read_report(), **entries}
        write_json(self.report, report)
        return report

    def read_report(self) -> dict[str, Any]:
        """What was reported so far: held-out scores and answers, `before` and `after`. ConfigError when it is damaged."""
        remedy = "put it back, or remove it to go on without the scores in it"
        report = read_json(self.report, remedy=remedy) or {}
        try:
            check_report(report)
        except ValueError as exc:
            raise ConfigError(f"{self.report} is damaged ({exc}): {remedy}") from exc
        return report


def check_root(config: RunConfig) -> None:
    """ConfigError when `run_root` is not a folder that can be written, or cannot be made."""
    root = Path(config.run_root).absolute()
    nearest = next(folder for folder in (root, *root.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        kind = "is not a folder" if not nearest.is_dir() else "cannot be written"
        raise ConfigError(f"run_root: no run directory can be made in {config.run_root}: {nearest} {kind}; use another run_root")


def _link_latest(root: Path, name: str) -> None:
    """Link `latest` to this run. Where that fails, a warning says so, and the run goes on."""
    latest, link = root / "latest", root / f".latest-{os.getpid()}"
    if latest.exists() and not latest.is_symlink():
        logger.warning("%s is not a link to a run; it stays as it is. Rename it, and the next run makes the link", latest)
        return
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(latest)
    except OSError as exc:
        logger.warning("%s does not link to the run %s: %s", latest, name, exc)

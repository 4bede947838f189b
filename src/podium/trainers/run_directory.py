"""The folder that a run leaves: where each file is, and what a resumed run finds there."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.checkpoint import sync
from podium.config import RunConfig, read_yaml, resolve, to_yaml
from podium.errors import ConfigError
from podium.tasks import Task, task_fingerprint


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run: `config.yaml`, `task.json` (the task's fingerprint), `metrics.jsonl`, `samples.jsonl`, `tb/`,
    `curve.png`, `report.json`, `checkpoints/`, `hf/` (the trained model), and `warmup/` with the same files of the supervised
    phase."""

    path: Path

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

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """A new folder `NAME-YYYYmmdd-HHMMSS` under `config.run_root`, holding `config.yaml`; `latest` there links to it."""
        root = Path(config.run_root)
        name = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            path = root / f"{name}{suffix}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as exc:
                raise ConfigError(f"run_root: no run directory can be made at {path}: {exc}") from exc
            (path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
            _link_latest(root, path.name)
            return cls(path)
        raise ConfigError(f"run_root: {root} holds a thousand runs called {name} already")

    @classmethod
    def open(cls, path: Path) -> tuple[RunDirectory, RunConfig]:
        """An existing run and its config. ConfigError when the folder holds no `config.yaml`."""
        return cls(path.resolve()), resolve(read_yaml(path / "config.yaml"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes here meanwhile. ConfigError names the process that does.

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
            _write_json(self.task, {"fingerprint": task_fingerprint(task)})

    def check_task(self, task: Task) -> None:
        """ConfigError when these are not the problems that the run began with: what it trained on might now be held out."""
        if not self.task.is_file():
            return
        known, found = json.loads(self.task.read_text(encoding="utf-8"))["fingerprint"], task_fingerprint(task)
        if known != found:
            raise ConfigError(
                f"the problems of the task are not those that {self.path} began with (fingerprint {found[:12]}, {self.task.name} "
                f"has {known[:12]}): the task's files, or the library that makes the problems, changed since. Put them back as "
                "they were, or start a new run"
            )

    def write_report(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Add entries to `report.json`, atomically; returns the whole report."""
        report = {**self.read_report(), **entries}
        _write_json(self.report, report)
        return report

    def read_report(self) -> dict[str, Any]:
        """What was reported so far: held-out scores and answers, before and after."""
        if not self.report.is_file():
            return {}
        report: dict[str, Any] = json.loads(self.report.read_text(encoding="utf-8"))
        return report


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Atomically: the file is the old one or the new one, never half of it, also after a power cut."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(content, indent=1), encoding="utf-8")
    sync(beside)
    beside.replace(path)


def _link_latest(root: Path, name: str) -> None:
    link = root / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(root / "latest")

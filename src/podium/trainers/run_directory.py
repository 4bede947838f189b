"""The folder that a run leaves: where each file is, and what a resumed run finds there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.config import RunConfig, read_yaml, resolve, to_yaml
from podium.errors import ConfigError


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run: `config.yaml`, `metrics.jsonl`, `samples.jsonl`, `tb/`, `curve.png`, `report.json`, `checkpoints/`,
    `hf/` (the trained model), and `warmup/` with the same files of the supervised phase."""

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

    def write_report(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Add entries to `report.json`, atomically; returns the whole report."""
        report = {**self.read_report(), **entries}
        beside = self.report.with_suffix(".tmp")
        beside.write_text(json.dumps(report, indent=1), encoding="utf-8")
        beside.replace(self.report)
        return report

    def read_report(self) -> dict[str, Any]:
        """What was reported so far: held-out scores and answers, before and after."""
        if not self.report.is_file():
            return {}
        report: dict[str, Any] = json.loads(self.report.read_text(encoding="utf-8"))
        return report


def _link_latest(root: Path, name: str) -> None:
    link = root / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(root / "latest")

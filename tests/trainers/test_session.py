"""What stands around the steps: the rates that a row reports, publishing a model, and who may write a run directory."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from podium.errors import ConfigError
from podium.observability import Metrics, Progress
from podium.trainers import RunDirectory, Session
from podium.trainers.session import publish_model


def test_throughput_is_per_rank_and_tokens_per_s_is_of_all_ranks(tmp_path):
    """As verl's perf/throughput, which is per GPU."""
    progress = Progress(Console(file=io.StringIO()))
    with Session(RunDirectory(tmp_path), progress, num_ranks=4, save_freq=0, keep=1, total_steps=9) as session:
        session.end_step(1, Metrics(), lambda folder: None, tokens=1000)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["perf/tokens_per_s"] == pytest.approx(1000 / row["timing_s/step"])
    assert row["perf/throughput"] == pytest.approx(row["perf/tokens_per_s"] / 4)


def test_a_published_model_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Every file, then the folders, then the rename, then the parent's list of names."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    def save(folder: str) -> None:
        (Path(folder) / "inner").mkdir()
        for name in ("config.json", "inner/model.safetensors"):
            (Path(folder) / name).write_text("x")

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    publish_model(tmp_path / "run" / "hf", save)
    assert set(events[:4]) == {"config.json", "model.safetensors", "inner", ".hf.tmp"}
    assert events[3:] == [".hf.tmp", "rename", "run"]
    assert (tmp_path / "run" / "hf" / "inner" / "model.safetensors").is_file()


def test_a_run_directory_has_one_writer_at_a_time(tmp_path):
    directory = RunDirectory(tmp_path)
    with (
        directory.locked(),
        pytest.raises(ConfigError, match=rf"is being written by another process \(pid {os.getpid()}\)"),
        directory.locked(),
    ):
        pass
    with directory.locked():
        assert (tmp_path / ".lock").read_text() == str(os.getpid())

"""What stands around the steps: the rates that a row reports, publishing a model, and who may write a run directory."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from podium.checkpoint import Checkpoint, WrittenFiles, manifest
from podium.errors import CheckpointError, ConfigError
from podium.observability import Metrics, Progress
from podium.trainers import RunDirectory, Session
from podium.trainers import session as session_module
from podium.trainers.roles import Groups
from podium.trainers.session import publish_model


def groups_of(save: Callable[[str], object], calls: Sequence[str] = ()) -> Groups:
    """An actor that saves like this, with these calls in flight."""
    group: Any = SimpleNamespace(call=SimpleNamespace(save_checkpoint=save), status=lambda: SimpleNamespace(calls=calls))
    return Groups({"actor": group, "rollout": group}, saved=["actor"])


def test_throughput_is_per_rank_and_tokens_per_s_is_of_all_ranks(tmp_path):
    """As verl's perf/throughput, which is per GPU."""
    progress = Progress(Console(file=io.StringIO()))
    with Session(RunDirectory(tmp_path), progress, num_ranks=4, save_freq=0, keep=1, total_steps=9) as session:
        with session.step():
            pass
        session.end_step(1, Metrics(), tokens=1000)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["perf/tokens_per_s"] == pytest.approx(1000 / row["timing_s/step"])
    assert row["perf/throughput"] == pytest.approx(row["perf/tokens_per_s"] / 4)


def test_seconds_and_rates_of_a_step_are_those_of_its_own_phases(tmp_path, monkeypatch):
    """Not of the validation, the checkpoint before or what a resumed run does first; these have their own timings."""
    now = 100.0
    monkeypatch.setattr(session_module, "time", SimpleNamespace(perf_counter=lambda: now, process_time=lambda: now / 2))
    progress = Progress(Console(file=io.StringIO()))

    def save(folder: str) -> list[WrittenFiles]:
        (Path(folder) / "state").write_text("x")
        return [WrittenFiles.of(Path(folder), "rank 0")]

    with Session(RunDirectory(tmp_path), progress, num_ranks=1, save_freq=1, keep=1, total_steps=9) as session:
        session.begin("rl", groups_of(save))
        session.end_step(0, Metrics())
        for step in (1, 2):
            now += 30.0  # loading weights, the checkpoint of the step before
            with session.step():
                now += 2.0
            with session.spans("validation"):
                now += 50.0
            session.end_step(step, Metrics(), tokens=1000)
    before, *rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert not {"timing_s/step", "perf/cpu_s", "perf/tokens_per_s"} & before.keys(), "step 0 only validates"
    for row in rows:
        assert (row["timing_s/step"], row["perf/cpu_s"], row["perf/tokens_per_s"]) == (2.0, 1.0, 500.0)
        assert {"timing_s/validation", "timing_s/save_checkpoint"} <= row.keys()


def test_a_published_model_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Every file, then the manifest, the folders, then the rename, then the parent's list of names."""
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def recorded_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    def save(folder: str) -> list[WrittenFiles]:
        (Path(folder) / "inner").mkdir()
        for name in ("config.json", "inner/model.safetensors"):
            (Path(folder) / name).write_text("x")
        return [WrittenFiles.of(Path(folder), "rank 0")]

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    publish_model(tmp_path / "run" / "hf", save, step=3)
    assert events == ["config.json", "model.safetensors", "manifest.json", "inner", ".hf.tmp", "rename", "run"]
    published = Checkpoint.read(tmp_path / "run" / "hf")
    published.verify()
    assert (published.step, set(published.manifest.files)) == (3, {"config.json", "inner/model.safetensors"})


def test_a_model_that_the_driver_does_not_see_is_not_published(tmp_path, monkeypatch):
    """The driver published an empty folder when rank 0 wrote on the disk of another node."""
    monkeypatch.setattr(manifest, "VISIBLE_WITHIN_S", 0.0)
    (tmp_path / "model.safetensors").write_text("x")
    with pytest.raises(CheckpointError, match=r"rank 0 on b wrote .*model\.safetensors with 1 bytes, but the driver on "):
        publish_model(tmp_path / "hf", lambda folder: [WrittenFiles.of(tmp_path, "rank 0 on b")], step=3)
    assert not (tmp_path / "hf").exists()


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


def test_an_interrupted_run_does_not_wait_for_busy_ranks_for_ever(tmp_path, monkeypatch, caplog):
    """A scheduler kills soon after its SIGTERM; the run then goes on from the checkpoint before."""
    monkeypatch.setattr("podium.trainers.session.IDLE_LIMIT_S", 0.2)
    busy = groups_of(pytest.fail, calls=["generate_sequences"])
    progress = Progress(Console(file=io.StringIO()))
    with Session(RunDirectory(tmp_path), progress, num_ranks=1, save_freq=0, keep=1, total_steps=9) as kept:
        kept.begin("rl", busy)
        kept.end_step(1, Metrics())
        with pytest.raises(KeyboardInterrupt), kept.saved_when_interrupted():
            raise KeyboardInterrupt
    assert "step 1 is not saved: the ranks were still busy after 0.2 s" in caplog.text

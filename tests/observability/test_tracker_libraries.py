"""Each tracker of ours with its real library, in the mode that needs no network; `make test-trackers` installs them all.

A phase logs three steps, is interrupted, and is resumed from the second under the same id.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podium.config import TrackerConfig
from podium.observability import RunInfo, Sample, Tracker, Trackers
from podium.parts import TRACKERS

CONFIG = {"seed": 1, "actor": {"optim": {"lr": 1e-3, "betas": [0.9, 0.99]}, "engine": {}}, "note": None}


def section(name: str, **settings: Any) -> TrackerConfig:
    cls = TRACKERS.settings_of(name)
    assert cls is not None
    found: TrackerConfig = cls(name=name, **settings)
    return found


def log_and_resume(folder: Path, settings: TrackerConfig, caplog: pytest.LogCaptureFixture) -> RunInfo:
    """Through the driver's own way: on the tracker's thread, and without a warning."""
    run = RunInfo(run_id="0123456789abcdef", name="demo-1", group="demo", phase="rl", folder=folder, config=CONFIG)
    for resumed, steps, status in ((None, (0, 1, 2), "interrupted"), (1, (2, 3), "finished")):
        trackers = Trackers(run, [settings])
        trackers.start(resumed)
        for step in steps:
            if step:
                text = f"a response\nof step {step} | *x*"
                trackers.log_samples(
                    step, [Sample(uid="u", sample_index=0, weight_version=step, prompt="p", response=text, reward=0.5)]
                )
            trackers.log(step, {"actor/loss": step + 0.25, "not/a number": math.nan, "perf/gb": 1.0})
        trackers.finish(status)  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records if record.name.startswith("podium")] == []
    return replace(run, resumed_step=1)


def test_tensorboard_hides_steps_that_are_logged_again(tmp_path, caplog):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_and_resume(tmp_path, section("tensorboard"), caplog)
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/loss")] == [(0, 0.25), (1, 1.25), (2, 2.25), (3, 3.25)]
    assert "of step 3" in events.Tensors("samples/0/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_wandb_offline_writes_one_id_with_steps_settings_and_samples(tmp_path, caplog):
    pytest.importorskip("wandb")
    run = log_and_resume(tmp_path, section("wandb", mode="offline", project="x", init={"tags": ["a"]}), caplog)
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run.run_id}.wandb"] * 2
    rows: dict[int, float] = {}
    for file in files:
        for record in wandb_records(file):
            if record.HasField("run"):
                assert (record.run.run_id, record.run.project, record.run.run_group) == (run.run_id, "x", "demo")
                assert list(record.run.tags) == ["a"]
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            if "actor/loss" in items:
                rows[int(items["_step"])] = float(items["actor/loss"])
    assert rows == {0: 0.25, 1: 1.25, 2: 2.25, 3: 3.25}
    (table,) = (json.loads(path.read_text()) for path in tmp_path.glob("wandb/latest-run/files/media/table/samples_3_*.json"))
    assert table["data"][0][table["columns"].index("response")] == "a response\nof step 3 | *x*"


def wandb_records(path: Path) -> list[Any]:
    """The records of a short file: a header of 7 bytes, then each with CRC, length and kind (1: the whole record) before it."""
    from wandb.proto import wandb_internal_pb2

    content, found, place = path.read_bytes(), [], 7
    while place < len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        assert kind == 1, "a record that continues in the next block"
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[place + 7 : place + 7 + length])
        found.append(record)
        place += 7 + length
    return found


def test_mlflow_goes_on_with_the_run_that_has_the_id(tmp_path, caplog):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(uri)
    client.create_experiment("x", artifact_location=(tmp_path / "artifacts").as_uri())
    run = log_and_resume(tmp_path, section("mlflow", tracking_uri=uri, experiment="x"), caplog)
    (found,) = client.search_runs([client.get_experiment_by_name("x").experiment_id])
    assert (found.info.run_name, found.info.status, found.data.tags["podium.run_id"]) == (run.name, "FINISHED", run.run_id)
    assert found.data.params == {
        "seed": "1",
        "actor.optim.lr": "0.001",
        "actor.optim.betas": "[0.9, 0.99]",
        "actor.engine": "{}",
        "note": "None",
    }
    values = {metric.step: metric.value for metric in client.get_metric_history(found.info.run_id, "actor/loss")}
    assert values == {0: 0.25, 1: 1.25, 2: 2.25, 3: 3.25}
    lines = (tmp_path / "artifacts" / found.info.run_id / "artifacts" / "samples" / "step-3.jsonl").read_text().splitlines()
    assert [json.loads(line)["response"] for line in lines] == ["a response\nof step 3 | *x*"]


def test_swanlab_offline_writes_one_id(tmp_path, caplog):
    pytest.importorskip("swanlab")
    run = log_and_resume(tmp_path, section("swanlab", mode="offline", project="x"), caplog)
    files = sorted(tmp_path.glob("swanlog/run-*/run-*.swanlab"))
    assert [file.name for file in files] == [f"run-{run.run_id}.swanlab"] * 2
    first, second = (file.read_bytes() for file in files)
    assert b"actor/loss" in first
    assert b"actor/loss" in second
    texts = [path.read_text() for path in tmp_path.glob("swanlog/run-*/media/text/*.txt")]
    assert any("of step 3" in text for text in texts)


def test_trackio_goes_on_with_the_run_of_the_name(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    run = log_and_resume(tmp_path, section("trackio", project="x"), caplog)
    with sqlite3.connect(tmp_path / "trackio" / "x.db") as database:
        rows = database.execute("select run_name, run_id, step, metrics from metrics order by id").fetchall()
    assert {(name, number) for name, number, _, _ in rows} == {(f"{run.name}-{run.run_id}", rows[0][1])}
    values: dict[int, Mapping[str, Any]] = {}
    for _, _, step, metrics in rows:
        values[step] = {**values.get(step, {}), **json.loads(metrics)}
    assert {step: metrics["actor/loss"] for step, metrics in values.items()} == {0: 0.25, 1: 1.25, 2: 2.25, 3: 3.25}
    assert "of step 3" in json.dumps(values[3]["samples"])


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_several_run_at_once_and_a_second_phase_follows_in_the_same_process(tmp_path, caplog, monkeypatch, name):
    """The warm-up and RL follow each other; libraries with one open run a process must have closed the first."""
    pytest.importorskip(name)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    own = {
        "wandb": {"mode": "offline"},
        "swanlab": {"mode": "offline"},
        "mlflow": {"tracking_uri": f"sqlite:///{tmp_path}/m.db"},
        "trackio": {},
    }
    for number, phase in enumerate(("warm-up", "rl")):
        folder = tmp_path / phase
        folder.mkdir()
        run = RunInfo(run_id=f"{number:016x}", name=phase, group="g", phase=phase, folder=folder, config=CONFIG)  # type: ignore[arg-type]
        trackers = Trackers(run, [section("tensorboard"), section(name, **own[name])])
        trackers.start(None)
        for step in range(3):
            trackers.log(step, {"a": step})
        trackers.finish("finished")
        assert list(folder.glob("tb/*"))
    assert [record.getMessage() for record in caplog.records if record.name.startswith("podium")] == []


def test_every_tracker_of_the_table_is_tested_here():
    names = {"tensorboard", "wandb", "mlflow", "swanlab", "trackio"}
    assert set(TRACKERS.rows) == names
    assert issubclass(TRACKERS.resolve("tensorboard"), Tracker)

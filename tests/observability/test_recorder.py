"""The files of a run: exact, strict, cut on resume, and safe from trackers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch

from podium.errors import DataError
from podium.observability import METRICS_FILE, SAMPLES_FILE, Recorder, Sample, read_rows


def reject_constant(text: str) -> NoReturn:
    raise AssertionError(f"{text} is not JSON")


def strict_rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=reject_constant) for line in path.read_text(encoding="utf-8").splitlines()]


def sample(**changes: object) -> Sample:
    fields: dict[str, object] = {"uid": "u1", "sample_index": 0, "weight_version": 3, "prompt": "2+2", "response": "4"}
    return Sample(**(fields | changes))  # type: ignore[arg-type]


def test_floats_round_trip_and_step_comes_first(tmp_path: Path) -> None:
    metrics = {"actor/pg_loss": 0.1 + 0.2, "tiny": 5e-324, "big": 1.7976931348623157e308, "third": 1 / 3, "neg": -0.0}
    with Recorder(tmp_path) as rec:
        rec.log_step(1, metrics)
        rec.log_step(2, {"np": np.float32(0.1), "torch": torch.tensor(2.0)})
    first, second = strict_rows(tmp_path / METRICS_FILE)
    assert list(first) == ["step", *metrics]
    assert first == {"step": 1, **metrics}
    assert math.copysign(1, float(str(first["neg"]))) == -1
    assert second == {"step": 2, "np": float(np.float32(0.1)), "torch": 2.0}


def test_non_finite_values_are_null(tmp_path: Path) -> None:
    with Recorder(tmp_path) as rec:
        rec.log_step(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    assert strict_rows(tmp_path / METRICS_FILE) == [{"step": 1, "a": None, "b": None, "c": 1.0}]


def test_each_line_is_on_disk_at_once(tmp_path: Path) -> None:
    rec = Recorder(tmp_path)
    rec.log_step(1, {"a": 1})
    assert len(strict_rows(tmp_path / METRICS_FILE)) == 1
    rec.close()


def test_a_step_has_one_row(tmp_path: Path) -> None:
    with Recorder(tmp_path) as rec:
        rec.log_step(0, {})
        rec.log_step(5, {})
        for step in (5, 4):
            with pytest.raises(DataError, match=rf"begin\({step - 1}\)"):
                rec.log_step(step, {})
        with pytest.raises(DataError, match="'step'"):
            rec.log_step(6, {"step": 1.0})
    with Recorder(tmp_path) as again, pytest.raises(DataError, match="cannot follow step 5"):
        again.log_step(5, {})


def test_samples_are_traceable_plain_json(tmp_path: Path) -> None:
    extra = {
        "score": torch.tensor(0.5),
        "mask": np.array([1, 0]),
        "n": np.int64(3),
        "nan": np.float32("nan"),
        "uid": "never wins",
    }
    with Recorder(tmp_path) as rec:
        rec.log_samples(
            7, [sample(reward=np.float32(0.5), response="né\nü\ud800", extra=extra), sample(extra={"path": Path("x")})]
        )
    first, second = strict_rows(tmp_path / SAMPLES_FILE)
    assert list(first)[:4] == ["step", "uid", "sample_index", "weight_version"]
    assert first == {
        "step": 7, "uid": "u1", "sample_index": 0, "weight_version": 3, "prompt": "2+2", "response": "né\nü\ud800",
        "answer": None, "reward": 0.5, "split": "train", "score": 0.5, "mask": [1, 0], "n": 3, "nan": None,
    }  # fmt: skip
    assert second["path"] == "x"


class Unwritable:
    def __str__(self) -> str:
        raise RuntimeError("not today")


def test_a_field_that_cannot_be_written_costs_no_other(tmp_path: Path) -> None:
    endless: list[object] = []
    endless.append(endless)
    extra = {
        "endless": endless,
        "unwritable": {"a": Unwritable()},
        "key": {Unwritable(): 1},
        "huge": [10**5000],
        "complex": 1j,
        "bytes": b"\xff",
        "infinite": {"a": [math.inf]},
    }
    with Recorder(tmp_path) as rec:
        rec.log_samples(1, [sample(extra=extra, response="\ud83d\ude00 \udc80")])
    (row,) = strict_rows(tmp_path / SAMPLES_FILE)
    assert row["endless"] == "<a list that cannot be written: RecursionError>"
    assert row["unwritable"] == row["key"] == "<a dict that cannot be written: RuntimeError>"
    assert row["huge"] == [hex(10**5000)]
    assert (row["complex"], row["bytes"], row["infinite"]) == ("1j", "b'\\xff'", {"a": [None]})
    assert row["response"] == "\U0001f600 \udc80"


def test_resume_cuts_later_rows_and_a_torn_line(tmp_path: Path) -> None:
    with Recorder(tmp_path) as rec:
        for step in range(1, 6):
            rec.log_samples(step, [sample(), sample(sample_index=1)])
            rec.log_step(step, {"x": step / 3})
    for name in (METRICS_FILE, SAMPLES_FILE):
        with (tmp_path / name).open("ab") as file:
            file.write('{"step": 6, "prompt": "né'.encode()[:-1])
    assert [row["step"] for row in read_rows(tmp_path / METRICS_FILE)] == [1, 2, 3, 4, 5]
    with Recorder(tmp_path) as rec:
        rec.begin(3)
        rec.log_step(4, {"x": 9.0})
    assert strict_rows(tmp_path / METRICS_FILE) == [{"step": s, "x": x} for s, x in ((1, 1 / 3), (2, 2 / 3), (3, 1.0), (4, 9.0))]
    assert [row["step"] for row in strict_rows(tmp_path / SAMPLES_FILE)] == [1, 1, 2, 2, 3, 3]
    assert not list(tmp_path.glob(".*"))


def test_a_torn_line_is_cut_without_truncating_too(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n{"step": 2, "a')
    with Recorder(tmp_path) as rec:
        rec.log_step(2, {"a": 1})
    assert strict_rows(tmp_path / METRICS_FILE) == [{"step": 1}, {"step": 2, "a": 1.0}]


def test_damage_inside_the_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).write_bytes(b'{"step": 1}\n\0\0\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2 is not JSON"):
        Recorder(tmp_path)


def test_import_brings_no_optional_package_and_configures_nothing() -> None:
    code = (
        "import logging, sys, podium.observability;"
        "assert not logging.getLogger().handlers and not logging.getLogger('podium').handlers;"
        "assert not {'tensorboard', 'matplotlib', 'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

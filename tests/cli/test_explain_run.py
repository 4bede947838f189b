"""`podium explain RUN`, as a user meets it: the arithmetic, and where the bytes of the last step went."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from podium.trainers import RunDirectory
from tests.cli.in_process import podium
from tests.trainers.builders import small_config, train


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunDirectory:
    """Of two steps: the first one makes a further call, which compares rollout and trainer."""
    return train(small_config(tmp_path_factory.mktemp("runs"), "warmup.steps=0", "trainer.total_steps=2"))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip()[1:-1].split("│")]


def test_it_prints_the_arithmetic_and_the_bytes_of_each_edge(run: RunDirectory):
    explained = podium("explain", str(run.path))
    assert explained.returncode == 0, explained.stderr
    arithmetic, _, measured = explained.stdout.partition("\n\n")
    comments = [line.removeprefix("# ") for line in podium("explain", str(run.config)).stdout.partition("\n\n")[0].splitlines()]
    assert comments == arithmetic.splitlines()[:-1]
    assert f"all settings: {run.config}" in arithmetic
    assert measured.startswith("bytes of each column in step 2, as measured")
    found = [cells(line) for line in measured.splitlines() if line.startswith("│")]
    assert [edge for edge, _, _ in found if edge] == [
        *("driver -> generate_sequences", "generate_sequences -> driver", "generate_sequences -> stays"),
        *("driver -> update_actor", "ranks read for update_actor"),
    ]
    assert found[0] == ["driver -> generate_sequences", "prompts", "320 bytes"]  # 8 prompts of 5 characters: int64
    sums, through = measured.splitlines()[-2:]
    assert sums.startswith("sent ")
    assert sums.endswith(", fetched 0 bytes")
    assert through.startswith("through the driver: ")
    assert through.endswith(" that moved")


def test_as_json_it_is_one_object(run: RunDirectory):
    explained = podium("explain", str(run.path), "--json")
    assert explained.returncode == 0, explained.stderr
    explanation = json.loads(explained.stdout)
    assert "8 prompts x 4 samples = 32 rows per step" in explanation["arithmetic"]
    traffic, rows = explanation["traffic"], json.loads(run.traffic.read_text())["rows"]
    assert traffic["step"] == 2
    assert traffic["edges"][0] == {
        "call": "generate_sequences",
        "way": "sent",
        "columns": {"prompts": 320, "uid": rows[1]["bytes"]},
    }
    assert traffic["through_driver"] == sum(row["bytes"] for row in rows if row["way"] in ("sent", "returned", "fetched"))
    assert traffic["moved"] == sum(row["bytes"] for row in rows if row["way"] != "stayed")
    assert traffic["by_way"]["read"] == sum(row["bytes"] for row in rows if row["way"] == "read")


def test_a_run_without_measured_bytes_says_so_in_one_line(run: RunDirectory, tmp_path: Path):
    shutil.copy(run.config, tmp_path / "config.yaml")
    explained = podium("explain", ".", cwd=tmp_path)
    assert explained.returncode == 0, explained.stderr
    assert explained.stdout.splitlines()[-1] == "no bytes were measured: no step of RL was finished since they are counted"
    assert json.loads(podium("explain", str(tmp_path), "--json").stdout)["traffic"] is None


def test_bad_paths_and_files_are_one_message_and_exit_code_2(run: RunDirectory, tmp_path: Path):
    shutil.copy(run.config, tmp_path / "config.yaml")
    (tmp_path / "traffic.json").write_text('{"step": "one"}')
    (tmp_path / "empty").mkdir()
    for arguments, expected in [
        ([str(tmp_path / "empty")], "is not a run directory: it has no config.yaml"),
        ([str(tmp_path / "nowhere")], f"no such file: {tmp_path / 'nowhere'}"),
        ([str(tmp_path)], "traffic.json is damaged (step: Input should be a valid integer"),
        (["spell_backward", "--json"], "--json is for a run directory, which spell_backward is not"),
        ([str(run.path), "sed=1"], "unknown key 'sed'; did you mean 'seed'?"),
    ]:
        refused = podium("explain", *arguments)
        assert refused.returncode == 2, refused.stderr
        assert expected in refused.stderr
        assert "Traceback" not in refused.stderr

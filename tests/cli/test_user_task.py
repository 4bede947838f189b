"""docs/tasks.md as a user would follow it, through the real command line, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from podium.config import RunConfig
from tests.cli import in_process
from tests.cli.test_cli import podium
from tests.tasks.test_rewards import wait_until_gone

DOCS = Path(__file__).parents[2] / "docs" / "tasks.md"
BLOCKS = dict(re.findall(r"```\w+ title=(\S+)\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S))
SMALL = ("warmup.steps=3", "trainer.total_steps=2", "trainer.val_freq=1", "trainer.trackers=[]", "trainer.curve=false")


@pytest.fixture
def example(tmp_path):
    """A folder with the files of the docs' example, its rows made."""
    for name in ("make_rows.py", "reward.py", "sort.yaml"):
        (tmp_path / name).write_text(BLOCKS[name])
    subprocess.run([sys.executable, "make_rows.py"], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.slow
def test_the_example_of_the_docs_runs(example):
    commands = [line.split("#")[0].split() for line in BLOCKS["run"].splitlines()]
    assert [command[0] for command in commands] == ["python", "podium", "podium", "podium"]
    dry, trained, scored = (
        podium(*command[1:], *(SMALL if command[1] == "train" else ()), cwd=example) for command in commands[1:]
    )
    assert dry.returncode == 0, dry.stderr
    assert "training, 128 validation, 63 held-out problems; no answer is in two of them" in dry.stdout
    assert trained.returncode == 0, trained.stderr
    assert "greedy mean reward" in trained.stdout
    steps = [json.loads(line) for line in (example / "runs" / "latest" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    assert all(row["reward/failed"] == 0 and 0 <= row["reward/exact/mean"] <= 1 for row in steps[1:])
    reported = json.loads((example / "runs" / "latest" / "report.json").read_text())["after"]
    assert json.loads(scored.stdout) == {key: reported[key] for key in ("greedy_score", "sampled_score", "n")}


@pytest.mark.slow
def test_a_run_on_files_goes_on_and_is_scored_from_another_working_directory(example, tmp_path_factory):
    assert podium("train", "sort.yaml", *SMALL, cwd=example).returncode == 0
    elsewhere, run = tmp_path_factory.mktemp("elsewhere"), str(example / "runs" / "latest")
    resumed = podium("train", "--resume", run, "trainer.total_steps=3", cwd=elsewhere)
    assert resumed.returncode == 0, resumed.stderr
    scored = podium("eval", run, cwd=elsewhere)
    assert scored.returncode == 0, scored.stderr
    assert "63 problems: mean reward 0." in scored.stdout  # the user's own reward is not a percentage
    assert [*elsewhere.iterdir()] == []
    (example / "sort.jsonl").unlink()
    gone = podium("eval", run, cwd=elsewhere)
    assert gone.returncode == 2
    assert f"task.train_files: no such file: {(example / 'sort.jsonl').resolve()}" in gone.stderr


def test_the_docs_name_settings_that_exist():
    named = set(re.findall(r"`(task|reward|warmup)\.(?!log`)(\w+)", DOCS.read_text(encoding="utf-8")))
    assert len(named) > 12
    for section, key in named:
        assert key in RunConfig.model_fields[section].annotation.model_fields, f"{section}.{key}"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["task.train_files=[srot.jsonl]"], "error: task.train_files: no such file: srot.jsonl"),
        (["task.name=spell_backward"], "a task is either a dataset of reasoning-gym (task.name) or your own rows"),
        (["task.max_prompt_tokens=5"], "sort.jsonl row 2: the prompt has 6 tokens"),
        (["reward.function=reward.py:scoer"], "reward.py has no function 'scoer'; did you mean 'score'?"),
        (["reward.kwargs.bonus=1"], "got an unexpected keyword argument 'bonus'"),
        (["reward.function=score"], "must be path/to/file.py:function or package.module.function, got 'score'"),
        (["reward.timout_s=3"], "unknown key 'reward.timout_s'; did you mean 'timeout_s'?"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(example, change, expected):
    result = in_process.podium("train", "sort.yaml", *change, cwd=example)
    assert result.returncode == 2, result.stderr
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    assert not (example / "runs").exists()


def test_a_reward_that_fails_while_running_is_exit_code_1_with_the_users_lines(example):
    tried = "if solution_str in ('', ground_truth):\n        return 1\n"  # what it is tried on before the start
    (example / "reward.py").write_text(
        f"def score(data_source, solution_str, ground_truth, **rest):\n    {tried}    return 1 / 0\n"
    )
    result = in_process.podium("train", "sort.yaml", *SMALL, cwd=example)
    assert result.returncode == 1
    assert "failed: a response of 63 could not be scored; the reward raised ZeroDivisionError" in result.stderr
    assert 'reward.py", line 4, in score' in result.stderr
    assert "site-packages" not in result.stderr
    (run,) = (path for path in (example / "runs").iterdir() if not path.is_symlink())
    assert result.stderr.splitlines()[-1] == f"Go on with: podium train --resume {run.relative_to(example)}"


def test_a_dry_run_finds_a_reward_that_raises(example):
    (example / "reward.py").write_text("def score(data_source, solution_str, ground_truth, **rest):\n    return 1 / 0\n")
    result = in_process.podium("train", "sort.yaml", "--dry-run", cwd=example)
    assert result.returncode == 2
    assert "error: reward.function: " in result.stderr
    assert "reward raised ZeroDivisionError: division by zero on the training row sort.jsonl:" in result.stderr
    assert 'reward.py", line 2, in score' in result.stderr


@pytest.mark.slow
def test_ctrl_c_while_a_run_is_checked_is_one_line(example):
    slow = "import time\nopen('checking', 'w').close()\ntime.sleep(60)\n"
    (example / "reward.py").write_text(slow + (example / "reward.py").read_text())
    command = [sys.executable, "-m", "podium.cli.main", "train", "sort.yaml"]
    with subprocess.Popen(
        command, cwd=example, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        deadline = time.monotonic() + 120
        while not (example / "checking").exists():
            assert time.monotonic() < deadline
            assert running.poll() is None, running.communicate()
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGINT)
        output, errors = running.communicate(timeout=30)
    assert (running.returncode, output, errors) == (130, "", "interrupted; no run was started or changed\n")
    assert not (example / "runs").exists()


@pytest.mark.slow
def test_ctrl_c_leaves_no_process_of_the_reward(example):
    (example / "reward.py").write_text(
        "import os, time\n"
        "def score(data_source, solution_str, ground_truth, **rest):\n"
        "    open(f'pid-{os.getpid()}', 'w').close()\n"
        "    time.sleep(60 if os.path.exists('hang') else 0)\n"
        "    return len(solution_str)\n"
    )
    command = [sys.executable, "-m", "podium.cli.main", "train", "sort.yaml", *SMALL, "trainer.total_steps=100000"]
    with subprocess.Popen(
        command, cwd=example, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as running:
        metrics, deadline = example / "runs" / "latest" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < deadline
            assert running.poll() is None, running.communicate()[0]
            time.sleep(0.05)
        (example / "hang").touch()  # the next step hangs in scoring
        time.sleep(1.0)
        pids = [int(path.name.removeprefix("pid-")) for path in example.glob("pid-*")]
        os.kill(running.pid, signal.SIGINT)
        output, _ = running.communicate(timeout=30)
    assert running.returncode == 130
    assert "is kept" in output
    assert "Traceback" not in output
    assert len(pids) >= 2
    wait_until_gone(pids)

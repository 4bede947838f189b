"""SIGTERM, as a scheduler sends it: what is saved and printed, the exit code, and that no process stays behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from podium.checkpoint import CheckpointStore
from tests.trainers.builders import SMALL, small_config, train

ROOT = Path(__file__).parents[2]
LIMIT_S = 180.0
pytestmark = pytest.mark.timeout(600)
REWARD = """
import time

def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.05)
    return float(len(solution_str) % 3)
"""


@contextmanager
def podium(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The command as a process in a session of its own, which is gone afterwards."""
    command = [sys.executable, "-m", "podium.cli.main", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def ended(process: subprocess.Popen[str], *, signals: int = 1) -> str:
    """Its output after SIGTERM, once the process and all that it started are gone."""
    started = descendants(process.pid)
    for _ in range(signals):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    output = process.communicate(timeout=60)[0]
    deadline_s = time.monotonic() + 15
    while left := {pid for pid in started if is_alive(pid)}:
        assert time.monotonic() < deadline_s, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.1)
    assert "Traceback" not in output
    assert "SIGTERM received" not in output, "the stacks of Ray's C++"
    return output


def descendants(pid: int) -> set[int]:
    children = {int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()}
    return children | {found for child in children for found in descendants(child)}


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def settings(root: Path, *overrides: str) -> list[str]:
    longer = ["trainer.total_steps=100000", "actor.optim.schedule=constant", "trainer.save_freq=0", f"run_root={root}/runs"]
    return [*SMALL, *longer, *overrides]


@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_sigterm_saves_the_last_finished_step_and_says_how_to_go_on(tmp_path, runtime):
    (tmp_path / "reward.py").write_text(REWARD)
    slow_reward = f"reward.function={tmp_path}/reward.py:score"  # most of a step is its reward, so that is when the signal comes
    overrides = settings(tmp_path, "warmup.steps=0", "trainer.val_freq=0", f"runtime={runtime}", slow_reward)
    run = tmp_path / "runs" / "latest"
    with podium("train", "spell_backward", *overrides) as process:
        wait_for(lambda: lines(run / "metrics.jsonl") > 1, process)
        output = ended(process, signals=2)
    assert process.returncode == 143, output
    saved = CheckpointStore(run / "checkpoints", keep=2).latest()
    assert saved is not None
    assert saved.step == lines(run / "metrics.jsonl") - 1 > 0, output
    assert f"terminated by SIGTERM; the checkpoint of step {saved.step} is kept" in output
    assert f"podium train --resume {run.resolve()}" in output


@pytest.mark.slow
def test_sigterm_in_the_warm_up_saves_its_last_finished_step(tmp_path):
    warmup = tmp_path / "runs" / "latest" / "warmup"
    with podium("train", "spell_backward", *settings(tmp_path, "warmup.steps=100000")) as process:
        wait_for(lambda: lines(warmup / "metrics.jsonl") > 3, process)
        output = ended(process)
    assert process.returncode == 143, output
    assert "terminated by SIGTERM; " in output
    saved = CheckpointStore(warmup / "checkpoints", keep=2).latest()
    kept = "nothing was saved yet" if saved is None else f"the warm-up's checkpoint of step {saved.step} is kept"
    assert kept in output


@pytest.mark.slow
def test_sigterm_while_a_checkpoint_is_written_leaves_a_whole_one(tmp_path):
    run = tmp_path / "runs" / "latest"
    with podium("train", "spell_backward", *settings(tmp_path, "warmup.steps=0", "trainer.save_freq=1")) as process:
        wait_for(lambda: lines(run / "metrics.jsonl") > 2, process)
        wait_for(lambda: bool([*(run / "checkpoints").glob(".tmp-*")]), process)
        output = ended(process)
    assert process.returncode == 143, output
    saved = CheckpointStore(run / "checkpoints", keep=2).latest()
    assert saved is not None
    assert f"the checkpoint of step {saved.step} is kept" in output
    assert not [*(run / "checkpoints").glob(".tmp-*")]


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["inline", "ray"])
def test_sigterm_ends_podium_eval(tmp_path, runtime):
    run = train(small_config(tmp_path, "warmup.steps=0", "trainer.total_steps=1"))
    run.config.write_text(run.config.read_text().replace("runtime: auto", f"runtime: {runtime}"))
    with podium("eval", str(run.path)) as process:
        time.sleep(6.0)
        output = ended(process)
    assert process.returncode in (0, 143), output
    assert "terminated by SIGTERM; no run was started or changed" in output or "held-out" in output


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [0.3, 2.0, 4.0, 6.0, 8.0])
def test_sigterm_at_any_moment_of_the_start_ends_a_run_on_ray(tmp_path, after_s):
    with podium("train", "spell_backward", *settings(tmp_path, "warmup.steps=0", "runtime=ray")) as process:
        time.sleep(after_s)
        output = ended(process)
    assert process.returncode in (143, -signal.SIGTERM), output

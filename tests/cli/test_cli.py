"""The command line as a user meets it: a process, its output and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from podium import __version__
from tests.cli import in_process
from tests.trainers.builders import SMALL, small_config, train

ROOT = Path(__file__).parents[2]


def podium(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "podium.cli.main", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "spell_bakward"], "unknown recipe 'spell_bakward'; did you mean 'spell_backward'?"),
        (["train", "spell_backward", "actor.optim.lrr=1"], "unknown key 'actor.optim.lrr'; did you mean 'lr'?"),
        (["train", "spell_backward", "trainer.total_steps=many"], "trainer.total_steps: input should be a valid integer"),
        (["train", "spell_backward", "actor.mini_batch_prompts=30"], "64 / 30 leaves 4 prompts over"),
        (["train", "nothing.yaml"], "no such file: nothing.yaml"),
        (["train"], "say what to train"),
        (["train", "--resume", "no/such/run"], "no run directory no/such/run"),
        (["train", "spell_backward", "--resume", "runs/latest"], "takes KEY=VALUE, and no recipe (spell_backward)"),
        (["train", "spell_backward", "model={pth: char_llama}"], "unknown key 'model.pth'; did you mean 'path'?"),
        (["train", "spell_backward", "model=not/exist"], "no folder 'not/exist' here. As a hub id, OWNER/NAME, it is not in"),
        (["eval", "."], "is not a run directory"),
        (["explain", "spell_backward", "sed=1"], "unknown key 'sed'; did you mean 'seed'?"),
        (["train", "spell_backward", "--seed", "3"], "--seed is not an option; settings are written without dashes: seed=3"),
        (["train", "spell_backward", "lr=1e-3"], "unknown key 'lr'; did you mean 'warmup.optim.lr' or 'actor.optim.lr'?"),
        (["trian"], "No such command 'trian'"),
        (["train", "spell_backward", "--dryrun"], "No such option"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(arguments, expected):
    result = in_process.podium(*arguments, cwd=ROOT)
    assert result.returncode == 2, result.stderr
    assert expected in result.stdout + result.stderr


def test_a_process_with_bad_input_ends_with_exit_code_2_and_without_a_traceback():
    result = podium("train", "spell_backward", "sed=1")
    assert result.returncode == 2
    assert result.stderr == "error: unknown key 'sed'; did you mean 'seed'?\n"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["task.name=spell_bakward"], "did you mean 'spell_backward'"),
        (["task.params.min_lenght=3"], "min_lenght"),
        (["model=no/such/folder"], "no folder 'no/such/folder'"),
        (["actor.engine.max_tokens_per_micro_batch=12"], "exceeds actor.engine.max_tokens_per_micro_batch (12)"),
        (
            ["rollout.sampling.max_new_tokens=300"],
            "the model's 256 positions (max_position_embeddings); model.path is char_llama",
        ),
    ],
)
def test_what_only_the_task_and_the_model_know_is_checked_before_anything_starts(tmp_path, overrides, expected):
    result = in_process.podium("train", "spell_backward", f"run_root={tmp_path}/runs", *overrides)
    assert result.returncode == 2, result.stderr
    assert expected in result.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_error_of_a_missing_extra_has_its_pip_line(tmp_path):
    blocked = (
        "import sys; sys.modules['reasoning_gym'] = None; sys.argv = ['podium', 'train', 'spell_backward'];"
        "import podium.cli.main as cli; cli.main()"
    )
    result = subprocess.run([sys.executable, "-c", blocked], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert 'pip install -e ".[tasks]"' in result.stderr


def test_dry_run_shows_the_arithmetic_and_starts_nothing(tmp_path):
    result = in_process.podium("train", "spell_backward", "--dry-run", f"run_root={tmp_path}/runs")
    assert result.returncode == 0, result.stderr
    assert "64 prompts x 16 samples = 1024 rows per step" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("is in order; nothing was started")  # a line stays one, however wide
    assert not (tmp_path / "runs").exists()


def test_recipes_and_explain():
    listed = podium("recipes")
    assert listed.returncode == 0
    assert "spell_backward" in listed.stdout
    explained = in_process.podium("explain", "spell_backward", "trainer.total_steps=3")
    assert "3 steps x 2 = 6 optimizer steps in all" in explained.stdout
    assert "total_steps: 3" in explained.stdout
    assert yaml.safe_load(explained.stdout)["trainer"]["total_steps"] == 3  # the whole output is a YAML file


def test_the_version():
    result = in_process.podium("--version")
    assert (result.returncode, result.stdout) == (0, f"podium {__version__}\n")


def test_a_section_with_a_shorthand_may_be_given_as_a_mapping():
    explained = in_process.podium("explain", "spell_backward", "model={path: char_llama, dtype: float64}")
    assert explained.returncode == 0, explained.stderr
    assert "dtype: float64" in explained.stdout


@pytest.mark.slow
def test_a_resumed_run_takes_overrides_and_names_edits(tmp_path):
    overrides = [*SMALL, "warmup.steps=0", "trainer.total_steps=1", f"run_root={tmp_path}/runs"]
    assert podium("train", "spell_backward", *overrides).returncode == 0
    run = (tmp_path / "runs" / "latest").resolve()
    longer = podium("train", "--resume", str(run), "trainer.total_steps=2")
    assert longer.returncode == 0, longer.stderr
    assert "trainer.total_steps: was 1, is 2" in longer.stderr
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("clip_high: 0.28", "clip_high: 0.3"))
    edited = podium("train", "--resume", str(run))
    assert edited.returncode == 2
    assert "actor.loss.clip_high: was 0.28, is 0.3" in edited.stderr
    assert "Traceback" not in edited.stderr


@pytest.mark.slow
def test_a_written_out_recipe_trains_and_eval_agrees_with_the_report(tmp_path):
    overrides = [*SMALL, "warmup.steps=20", "trainer.total_steps=1", f"run_root={tmp_path}/runs"]
    explained = podium("explain", "spell_backward", *overrides)
    (tmp_path / "mine.yaml").write_text(explained.stdout)
    trained = podium("train", str(tmp_path / "mine.yaml"))
    assert trained.returncode == 0, trained.stderr
    run = (tmp_path / "runs" / "latest").resolve()
    assert "held-out, 16 problems" in trained.stdout
    assert str(run) in trained.stdout
    reported = json.loads((run / "report.json").read_text())["after"]
    expected = {key: reported[key] for key in ("greedy_score", "sampled_score", "n")}
    assert json.loads(podium("eval", str(run), "--json").stdout) == expected
    bare = podium("eval", str(run / "hf"), "--recipe", str(tmp_path / "mine.yaml"), "--json")
    assert json.loads(bare.stdout) == expected


@pytest.mark.slow
def test_ctrl_c_ends_soon_keeps_the_checkpoint_and_says_how_to_go_on(tmp_path):
    overrides = [
        *SMALL,
        "warmup.steps=20",
        "trainer.total_steps=100000",
        "actor.optim.schedule=constant",
        f"run_root={tmp_path}/runs",
    ]
    command = [sys.executable, "-m", "podium.cli.main", "train", "spell_backward", *overrides]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as running:
        metrics = tmp_path / "runs" / "latest" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_text().count("\n") > 4):
            assert time.monotonic() < deadline
            assert running.poll() is None, running.communicate()[0]
            time.sleep(0.05)
        os.kill(running.pid, signal.SIGINT)
        started = time.monotonic()
        output, _ = running.communicate(timeout=30)
    assert time.monotonic() - started < 5
    assert running.returncode == 130
    assert "is kept" in output
    assert f"podium train --resume {(tmp_path / 'runs' / 'latest').resolve()}" in output
    assert "Traceback" not in output
    assert any((tmp_path / "runs" / "latest" / "checkpoints").glob("step-*/manifest.json"))


def test_a_failure_while_running_is_exit_code_1(tmp_path):
    run = train(small_config(tmp_path, "warmup.steps=0", "trainer.total_steps=1"))
    for manifest in run.checkpoints.glob("step-*/manifest.json"):
        manifest.write_text("garbage")
    result = in_process.podium("train", "--resume", str(run.path))
    assert result.returncode == 1
    assert "none is complete" in result.stderr


@pytest.mark.slow
def test_a_run_that_another_process_writes_is_refused_until_that_process_is_dead(tmp_path):
    """Two `--resume` of one run would interleave its rows and write its checkpoints into each other."""
    overrides = [*SMALL, "warmup.steps=0", "trainer.total_steps=1", f"run_root={tmp_path}/runs"]
    assert podium("train", "spell_backward", *overrides).returncode == 0
    run = (tmp_path / "runs" / "latest").resolve()
    before = (run / "metrics.jsonl").read_bytes()
    held = (
        "import sys, time; from pathlib import Path; from podium.trainers import RunDirectory\n"
        "with RunDirectory(Path(sys.argv[1])).locked():\n    print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", held, str(run)], cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            refused = podium("train", "--resume", str(run))
        finally:
            holder.kill()
    assert refused.returncode == 2, refused.stderr
    assert f"{run} is being written by another process (pid {holder.pid})" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (run / "metrics.jsonl").read_bytes() == before
    assert podium("train", "--resume", str(run)).returncode == 0


@pytest.mark.slow
def test_a_bfloat16_model_may_be_evaluated_but_not_trained(tmp_path):
    overrides = [*SMALL, "warmup.steps=0", "trainer.total_steps=1"]
    assert podium("train", "spell_backward", *overrides, f"run_root={tmp_path}/runs").returncode == 0
    explained = podium("explain", "spell_backward", *overrides)
    settings = explained.stdout.replace("dtype: float32", "dtype: bfloat16")
    (tmp_path / "bf16.yaml").write_text(settings)
    trained = podium("train", str(tmp_path / "bf16.yaml"), "--dry-run")
    assert trained.returncode == 2
    assert "model.dtype=bfloat16 cannot be trained" in trained.stderr
    evaluated = podium("eval", str(tmp_path / "runs" / "latest" / "hf"), "--recipe", str(tmp_path / "bf16.yaml"), "--json")
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["n"] == 16

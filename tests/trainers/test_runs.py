"""Whole runs of the demo's recipe, small: what they leave behind, and that a resumed one equals an uninterrupted one."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.config import ModelConfig
from podium.errors import CheckpointError
from podium.trainers import PPOTrainer, RunDirectory, evaluate_model
from podium.trainers.preflight import prepare
from tests.trainers.builders import from_base, rows, small_config, train, weights

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")


@pytest.fixture(scope="module")
def whole_run(base, tmp_path_factory):
    """An uninterrupted run of five steps."""
    directory = train(from_base(tmp_path_factory.mktemp("whole"), base))
    assert any(0 < row.get("critic/rewards/mean", 0) < 1 for row in rows(directory)), "without mixed rewards nothing is learned"
    return directory


def test_the_run_directory_holds_what_the_docs_say(whole_run, warmed_up):
    assert [row["step"] for row in rows(whole_run)] == [0, 1, 2, 3, 4, 5]
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "report.json", "checkpoints", "hf"} <= {
        p.name for p in whole_run.path.iterdir()
    }
    assert (whole_run.path.parent / "latest").resolve() == whole_run.path.resolve()
    assert [row["step"] for row in rows(warmed_up.warmup)] == list(range(1, 151))
    sample = json.loads((whole_run.path / "samples.jsonl").read_text().splitlines()[0])
    assert {"step", "uid", "sample_index", "weight_version", "prompt", "response", "answer", "reward"} <= sample.keys()


def test_validation_and_checkpoints_come_when_they_are_due(whole_run):
    """The last step is validated and saved whatever the interval."""
    assert [row["step"] for row in rows(whole_run) if "val/score/mean" in row] == [0, 2, 4, 5]
    assert sorted(p.name for p in (whole_run.path / "checkpoints").iterdir()) == ["step-4", "step-5"]


def test_the_model_folder_loads_and_scores_as_reported(whole_run):
    model = AutoModelForCausalLM.from_pretrained(whole_run.hf)
    tokenizer = AutoTokenizer.from_pretrained(whole_run.hf)
    assert model.config.vocab_size == len(tokenizer) == 99
    config = small_config(whole_run.path.parent)
    scores = evaluate_model(config, ModelConfig(path=str(whole_run.hf)), prepare(config))
    reported = whole_run.read_report()["after"]
    assert (scores.greedy_score, scores.sampled_score, scores.n) == (reported["greedy_score"], reported["sampled_score"], 16)


def test_training_moves_the_weights_and_the_rollout_uses_them(whole_run, base):
    before = AutoModelForCausalLM.from_pretrained(base)
    after = AutoModelForCausalLM.from_pretrained(whole_run.hf)
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    samples = [json.loads(line) for line in (whole_run.path / "samples.jsonl").read_text().splitlines()]
    assert all(sample["weight_version"] == 2 * (sample["step"] - 1) for sample in samples)  # two mini-batches a step


def test_another_seed_gives_another_run(whole_run, base, tmp_path):
    other = train(from_base(tmp_path, base, "seed=1", "trainer.total_steps=1"))
    assert rows(other)[1] != rows(whole_run)[1]


DIES = """
import os, signal, sys
from pathlib import Path
from podium.trainers import PPOTrainer, SFTTrainer
from tests.trainers.builders import WARM_UP, from_base, small_config, train

root, base, deadly_step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
trainer, config = (PPOTrainer, from_base(root, Path(base))) if base else (SFTTrainer, small_config(root, *WARM_UP))
update, seen = trainer.update, []

def killed(self, batch):
    seen.append(batch)
    if len(seen) == deadly_step:
        os.kill(os.getpid(), signal.SIGKILL)
    return update(self, batch)

trainer.update = killed
train(config)
"""


def die(root, base, step):
    """A run in a process of its own that kills itself in the middle of a step, with signal 9."""
    command = [sys.executable, "-c", DIES, str(root), str(base), str(step)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("step", [1, pytest.param(4, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)])
def test_kill_9_in_the_middle_of_a_step_then_resume_equals_the_uninterrupted_run(whole_run, base, tmp_path, step):
    die(tmp_path, base, step)
    directory, config = RunDirectory.open(tmp_path / "latest")
    assert rows(directory)[-1]["step"] == step - 1
    train(config, directory)
    assert rows(directory) == rows(whole_run)
    assert weights(directory) == weights(whole_run)
    assert directory.read_report() == whole_run.read_report()
    assert (directory.path / "samples.jsonl").read_text() == (whole_run.path / "samples.jsonl").read_text()


@pytest.mark.parametrize(("phase", "saved_step"), [("score", 2), ("update", 0)])
def test_an_interrupt_saves_the_last_finished_step_unless_its_state_is_changing(
    whole_run, base, tmp_path, monkeypatch, phase, saved_step
):
    """And the run goes on from there to the same end."""
    interrupted, calls = getattr(PPOTrainer, phase), []

    def third_time(self, *args):
        result = interrupted(self, *args)
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return result

    config = from_base(tmp_path, base, "trainer.save_freq=0")
    directory = RunDirectory.create(config)
    monkeypatch.setattr(PPOTrainer, phase, third_time)
    with pytest.raises(KeyboardInterrupt):
        train(config, directory)
    assert directory.saved_step == saved_step
    train(config, directory)
    assert rows(directory) == rows(whole_run)
    assert weights(directory) == weights(whole_run)


@pytest.mark.slow
def test_kill_9_in_the_warm_up_then_resume_equals_the_uninterrupted_run(warmed_up, tmp_path):
    die(tmp_path, "", 120)
    directory, config = RunDirectory.open(tmp_path / "latest")
    assert not directory.warmup.hf.exists()
    train(config, directory)
    assert rows(directory.warmup) == rows(warmed_up.warmup)
    assert weights(directory.warmup) == weights(warmed_up.warmup)
    assert rows(directory) == rows(warmed_up)
    assert weights(directory) == weights(warmed_up)


def test_resuming_a_finished_run_changes_nothing(whole_run, base, tmp_path):
    config = from_base(tmp_path, base, "trainer.total_steps=1")
    directory = train(config)
    before = rows(directory), weights(directory)
    train(config, directory)
    assert (rows(directory), weights(directory)) == before


def test_a_run_goes_on_from_a_checkpoint_without_a_folder_for_each_role(base, tmp_path):
    """As an older Podium wrote it: the files of the actor in the folder of the step."""
    directory = train(from_base(tmp_path, base, "trainer.total_steps=2", "trainer.save_freq=1"))
    expected, step = (rows(directory), weights(directory)), directory.checkpoints / "step-1"
    shutil.rmtree(directory.checkpoints / "step-2")
    for file in (step / "actor").iterdir():
        file.rename(step / file.name)
    (step / "actor").rmdir()
    manifest = step / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"actor/', '"'))
    directory, config = RunDirectory.open(directory.path)
    train(config, directory)
    assert (rows(directory), weights(directory)) == expected
    assert {path.name for path in (directory.checkpoints / "step-2").iterdir()} == {"actor", "manifest.json"}


def test_damaged_checkpoints_are_never_a_fresh_start(base, tmp_path, caplog):
    config = from_base(tmp_path, base, "trainer.total_steps=2", "trainer.save_freq=1")
    directory = train(config)
    expected = rows(directory), weights(directory)
    newest = directory.checkpoints / "step-2" / "actor" / "train.safetensors"
    newest.write_bytes(newest.read_bytes()[:100])
    train(config, directory)
    assert "step-2" in caplog.text
    assert (rows(directory), weights(directory)) == expected
    for folder in directory.checkpoints.glob("step-*"):
        (folder / "manifest.json").write_text("garbage")
    with pytest.raises(CheckpointError, match="none is complete"):
        train(config, directory)


def test_ray_with_one_worker_is_bit_equal_to_inline(whole_run, base, tmp_path, ray_cluster):
    on_ray = train(from_base(tmp_path, base, "runtime=ray"))
    assert rows(on_ray) == rows(whole_run)
    assert weights(on_ray) == weights(whole_run)


def test_micro_batches_recomputing_and_dropping_change_nothing_but_rounding(whole_run, base, tmp_path):
    other = train(
        from_base(
            tmp_path,
            base,
            "actor.engine.max_tokens_per_micro_batch=40",
            "actor.recompute_old_log_probs=true",
            "actor.drop_zero_advantage=false",
            "rollout.max_rows=5",
            "trainer.total_steps=1",
        )
    )
    assert rows(other)[1]["rollout/log_prob_gap_max"] < 1e-5
    gaps = ["rollout/log_prob_gap_max" in row for row in rows(whole_run)]
    assert gaps == [False, True, *[False] * (len(gaps) - 2)], (
        "with the rollout's log-probs the first step is compared all the same"
    )
    for name in ("critic/rewards/mean", "response_length/mean", "actor/grad_norm", "actor/pg_loss", "rollout/neg_log_prob"):
        assert rows(other)[1][name] == pytest.approx(rows(whole_run)[1][name], rel=1e-4, abs=1e-6)


@pytest.mark.slow  # test_grpo_terms compares runs with every term
def test_two_workers_equal_one_within_rounding(base, tmp_path, ray_cluster):
    """The model sharded over two actors, on the same rollouts.

    The tolerance is float32's: Llama computes its norms and rotations in float32 whatever the dtype of the model. Against a
    plain batch, tests/engines/test_fsdp2.py compares to 1e-10.
    """
    overrides = ("model.dtype=float64", "trainer.total_steps=2", "rollout.sampling.n=3", "trainer.prompts_per_step=10")
    overrides = (*overrides, "actor.mini_batch_prompts=5", "actor.recompute_old_log_probs=true")
    overrides = (*overrides, "actor.optim.eps=1e-4")  # the usual 1e-8 blows rounding up where a gradient is next to nothing
    one = train(from_base(tmp_path / "one", base, *overrides))
    two = train(from_base(tmp_path / "two", base, *overrides, "num_workers=2"))
    for expected, found in zip(rows(one), rows(two), strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)
    weights_of = [AutoModelForCausalLM.from_pretrained(run.hf, dtype=torch.float64).state_dict() for run in (one, two)]
    for name, tensor in weights_of[0].items():
        assert torch.allclose(tensor, weights_of[1][name], rtol=0, atol=1e-6), name


IMPORTS_NOTHING_HEAVY = """
import sys
from pathlib import Path
from tests.trainers.builders import from_base, train

train(from_base(Path(sys.argv[1]), Path(sys.argv[2]), "trainer.total_steps=3"))
heavy = [name for name in ("ray", "vllm", "sglang", "flash_attn", "tensorboard", "pyarrow") if name in sys.modules]
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


def test_an_inline_run_imports_no_other_engine_and_no_extra_it_does_not_use(base, tmp_path):
    """The driver's process of a run of three steps on a CPU."""
    command = [sys.executable, "-c", IMPORTS_NOTHING_HEAVY, str(tmp_path), str(base)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_in_silence(base, tmp_path):
    config = from_base(tmp_path, base, "trainer.total_steps=1")
    directory = train(config)
    shutil.rmtree(directory.checkpoints)
    with pytest.raises(CheckpointError, match="holds no checkpoint, but step 1 was logged"):
        train(config, directory)

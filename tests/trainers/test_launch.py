"""What a config becomes before anything runs: the groups of its phases and their models, and what preflight refuses."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from podium.cli import training
from podium.config import ModelConfig, to_yaml
from podium.errors import ConfigError, MissingExtraError
from podium.models import load_model, save_model
from podium.observability import Progress
from podium.single_controller import Init, ResourcePool
from podium.trainers import RunDirectory, launch, placing, preflight
from podium.trainers.preflight import prepare
from podium.trainers.threads import threads_line
from tests.trainers.builders import small_config


class NotStartedError(Exception):
    """Thrown in place of starting workers."""


@pytest.fixture
def groups(monkeypatch):
    """(spec, keyword arguments) of every group that would have been started."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def recorded(pool: ResourcePool, init: Init[Any], **kwargs: Any) -> None:
        seen.append((init.args[0], {"pool": pool, **kwargs}))
        raise NotStartedError

    monkeypatch.setattr(placing, "WorkerGroup", recorded)
    return seen


def reinforce(config, directory: RunDirectory) -> None:
    with pytest.raises(NotStartedError):
        launch.reinforce(config, directory, prepare(config), None, Progress(Console(file=io.StringIO())))


def test_a_model_keeps_its_settings_on_the_way_from_the_warm_up_to_rl_and_to_eval(groups, tmp_path):
    """`trust_remote_code` was lost, so that a model with code of its own was warmed up and could not be loaded again."""
    reference = tmp_path / "reference"
    save_model(load_model(ModelConfig(path="char_llama"), seed=0), str(reference))
    own = ("model.trust_remote_code=true", "model.dtype=float64", "model.override_config.num_hidden_layers=1")
    config = small_config(tmp_path, *own, f"ref.model={reference}", "actor.use_kl_loss=true")
    directory = RunDirectory(tmp_path)
    reinforce(config, directory)
    expected = {"dtype": "float64", "trust_remote_code": True, "override_config": {}}
    assert groups[0][0].model.model_dump() == {"path": str(directory.warmup.hf), **expected}
    assert groups[0][0].ref_model.model_dump() == {"path": str(reference), **expected}


@pytest.mark.parametrize("is_bare", [True, False])
def test_eval_loads_a_model_as_the_run_did(groups, tmp_path, is_bare):
    config = small_config(tmp_path, "model.trust_remote_code=true", "model.override_config.num_hidden_layers=1")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    model = load_model(config.model, seed=0)
    save_model(model, str(tmp_path / "hf"))
    launch.load_tokenizer(config.model).save_pretrained(tmp_path / "hf")
    with pytest.raises(NotStartedError):
        training.evaluate(*((tmp_path / "hf", config) if is_bare else (tmp_path, None)))
    assert groups[0][0].model == ModelConfig(path=str(tmp_path / "hf"), trust_remote_code=True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["threads_per_rank=0"], 1),
        (["threads_per_rank=2"], 2),
        (["threads_per_rank=0", "model.override_config={hidden_size: 512, num_hidden_layers: 8}"], 0),
    ],
)
def test_a_small_model_gets_one_thread_unless_the_settings_say_otherwise(groups, tmp_path, overrides, expected):
    """Two threads of a small model on shared cores were up to 18 times slower."""
    config = small_config(tmp_path, *overrides)
    reinforce(config, RunDirectory(tmp_path))
    assert groups[0][1]["threads_per_rank"] == expected
    line = threads_line(config)
    assert (line is not None) == (overrides == ["threads_per_rank=0"])
    assert line is None or line.startswith("1 torch thread per rank, for a model of about 0.25 M parameters")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [([], None), (["runtime=ray"], 3600.0), (["runtime=ray", "call_timeout_s=7200"], 7200.0)],
)
def test_the_limit_of_a_call_reaches_the_group(groups, tmp_path, overrides, expected):
    """Inline runs a call on the caller's own thread and knows no limit."""
    reinforce(small_config(tmp_path, *overrides), RunDirectory(tmp_path))
    assert groups[0][1]["call_timeout_s"] == expected


def test_a_response_that_has_no_position_is_refused_with_the_sum(tmp_path):
    """char_llama has 256 positions, or what its config was changed to; BOS, a word of three and the newline are 5 tokens."""
    prepare(small_config(tmp_path, "rollout.sampling.max_new_tokens=251"))
    with pytest.raises(ConfigError) as caught:
        prepare(small_config(tmp_path, "rollout.sampling.max_new_tokens=252"))
    assert "has 5 tokens; 5 + rollout.sampling.max_new_tokens (252) = 257 exceeds the model's 256 positions" in str(caught.value)
    prepare(small_config(tmp_path, "rollout.sampling.max_new_tokens=252", "model.override_config.max_position_embeddings=257"))


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    folder = tmp_path / "reference"
    save_model(load_model(ModelConfig(path="char_llama", override_config={"vocab_size": 120}), seed=0), str(folder))
    with pytest.raises(ConfigError, match=r"ref\.model: .* has a vocabulary of 120 tokens and the policy char_llama one of 99"):
        prepare(small_config(tmp_path, "actor.use_kl_loss=true", f"ref.model={folder}"))


def test_the_warm_up_takes_the_actors_engine(groups, tmp_path):
    """It had the defaults, whatever `actor.engine` said."""
    config = small_config(tmp_path, "actor.engine.max_tokens_per_micro_batch=300", "actor.engine.layout=packed")
    with pytest.raises(NotStartedError):
        launch.warm_up(config, RunDirectory(tmp_path / "warmup"), prepare(config), None, Progress(Console(file=io.StringIO())))
    assert groups[0][0].engine == config.actor.engine


def test_a_target_of_the_warm_up_that_does_not_fit_is_refused_with_the_sum(tmp_path):
    """BOS, a word of three and the newline, then a copy of the word and EOS."""
    sizes = ("rollout.sampling.max_new_tokens=1", "actor.engine.max_tokens_per_micro_batch")
    prepare(small_config(tmp_path, sizes[0], f"{sizes[1]}=9"))
    with pytest.raises(ConfigError, match=r"5 tokens and its target \(answer\) 4 .*; 5 \+ 4 = 9 exceeds actor\.engine"):
        prepare(small_config(tmp_path, sizes[0], f"{sizes[1]}=8"))
    prepare(small_config(tmp_path, sizes[0], f"{sizes[1]}=8", "warmup.steps=0"))


@pytest.mark.parametrize("setting", ["model", "ref.model"])
def test_damaged_weights_are_found_before_anything_starts(tmp_path, setting):
    """They were found by the ranks, with a run directory made and a traceback of a worker."""
    folder = tmp_path / "model"
    save_model(load_model(ModelConfig(path="char_llama"), seed=0), str(folder))
    launch.load_tokenizer(ModelConfig(path="char_llama")).save_pretrained(folder)
    config = small_config(tmp_path, f"{setting}={folder}", "actor.use_kl_loss=true")
    prepare(config)
    (folder / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ConfigError, match=rf"{setting.replace('.', '[.]')}.*is not a complete safetensors file"):
        prepare(config)


LISTING = """
from podium.observability import Tracker

class Listing(Tracker):
    def start(self, run):
        assert run.config["trainer"]["total_steps"] == 1
        self.file = (run.folder / "listing.txt").open("a")
        print(run.phase, run.name == run.group, run.resumed_step, run.run_id, file=self.file)

    def log(self, step, metrics):
        print(step, "val/score/mean" in metrics, file=self.file)

    def log_samples(self, step, samples):
        print(step, len(samples), file=self.file)

    def finish(self, status):
        print(status, file=self.file)
        self.file.close()
"""


def test_a_users_tracker_gets_both_phases_and_goes_on_under_the_same_id(tmp_path):
    (tmp_path / "listing.py").write_text(LISTING)
    tracker = f"trainer.trackers=[{tmp_path}/listing.py:Listing]"
    config = small_config(tmp_path, "warmup.steps=2", "trainer.total_steps=1", tracker)
    directory = RunDirectory.create(config)
    for _ in range(2):
        with Progress(Console(file=io.StringIO())) as progress:
            launch.run(config, directory, prepare(config), progress)
    ids = [json.loads((run.path / "trackers.json").read_text())["run_id"] for run in (directory, directory.warmup)]
    warmup = (directory.warmup.path / "listing.txt").read_text().splitlines()
    assert warmup == [f"warm-up False None {ids[1]}", "1 False", "2 False", "finished"]
    rows = (directory.path / "listing.txt").read_text().splitlines()
    assert rows[:5] == [f"rl True None {ids[0]}", "0 True", "1 4", "1 True", "finished"]
    assert rows[5:] == [f"rl True 1 {ids[0]}", "finished"]
    assert ids[0] != ids[1]


def test_all_missing_extras_are_one_message_that_says_how_to_do_without(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "find_spec", lambda package: None)
    with pytest.raises(MissingExtraError) as caught:
        prepare(small_config(tmp_path, "trainer.trackers=[tensorboard, wandb]", "trainer.curve=true"))
    text = str(caught.value)
    assert text.startswith("not installed: reasoning-gym, tensorboard, wandb, matplotlib, for the task 'spell_backward' and ")
    assert 'pip install -e ".[tasks,tensorboard,wandb,plot]"' in text
    assert "the tracker 'wandb' (trainer.trackers=[] does without)" in text
    assert "(trainer.curve=false does without)" in text


def test_an_override_that_the_model_does_not_know_is_found_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="no 'hiden_size'; did you mean 'hidden_size'"):
        prepare(small_config(tmp_path, "model.override_config.hiden_size=8"))

"""A user's engine, rollout, estimator, loss, task and tracker, each in one file outside the package, in whole runs.

Engine, rollout and task are the ones on docs/parts.md.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from podium.cli.main import app
from podium.config import read_yaml, resolve
from podium.errors import ConfigError
from podium.observability import Progress
from podium.trainers import RunDirectory, run
from podium.trainers.preflight import prepare
from tests.trainers.builders import rows

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")

PAGE = Path(__file__).parents[2] / "docs" / "parts.md"
FILES = dict(re.findall(r"```python title=(\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
FILES["my_tracker.py"] = """
from pathlib import Path
from podium.config import TrackerConfig
from podium.observability import Tracker

class Lines(Tracker):
    class Settings(TrackerConfig):
        file: str

    def log(self, step, metrics):
        with Path(self.settings.file).open("a") as file:
            print(step, metrics.get("actor/rows_trained"), file=file)
"""
FILES["my_estimator.py"] = """
import torch
from podium.algorithms import AdvantageEstimator, Advantages
from podium.config import AdvantageConfig

class Constant(AdvantageEstimator):
    class Settings(AdvantageConfig):
        value: float = 1.0

    def __call__(self, rows):
        return Advantages(torch.full_like(rows.rewards, self.settings.value))
"""
FILES["my_loss.py"] = """
from podium.algorithms import Surrogate
from podium.config import PolicyLossConfig

class Linear(Surrogate):
    class Settings(PolicyLossConfig):
        factor: float = 1.0

    def __call__(self, tokens):
        metrics = tokens.ratio_metrics(tokens.log_ratio())
        return self.settings.factor * tokens.advantages_N + 0.0 * tokens.logprobs_N, metrics
"""
YAML = """
name: own
threads_per_rank: 1
model: {path: char_llama, override_config: {hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1}}
task: {name: my_task.py:Successor, first: 50}
actor:
  optim: {lr: 1.0e-3}
  engine: {name: my_engine.py:CountingEngine, weight: 0.5}
  loss: {name: my_loss.py:Linear, factor: 3.0}
algorithm: {adv_estimator: {name: my_estimator.py:Constant, value: 0.25}}
rollout: {name: my_rollout.py:Parrot, token: 7, sampling: {n: 2, max_new_tokens: 3}}
trainer:
  total_steps: 1
  prompts_per_step: 4
  curve: false
  trackers: [{name: my_tracker.py:Lines, file: tracked}]
"""
CLI = (
    "task=my_task.py:Successor",
    "task.first=50",
    "actor.engine=my_engine.py:CountingEngine",
    "actor.engine.weight=0.5",
    "actor.loss=my_loss.py:Linear",
    "actor.loss.factor=3",
    "algorithm.adv_estimator=my_estimator.py:Constant",
    "algorithm.adv_estimator.value=0.25",
    "rollout=my_rollout.py:Parrot",
    "rollout.token=7",
    "trainer.trackers=[{name: my_tracker.py:Lines, file: tracked}]",
)
"""The same parts on the command line, over settings that name others."""
OTHERS = """
task: {name: chain_sum}
actor: {optim: {lr: 1.0e-3}, engine: {name: fsdp2, layout: packed}}
rollout: {name: hf, max_rows: 8, sampling: {n: 2, max_new_tokens: 3}}
trainer: {total_steps: 1, prompts_per_step: 4, curve: false}
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "own.yaml").write_text(YAML)
    (tmp_path / "others.yaml").write_text(YAML[: YAML.index("task:")] + OTHERS)
    return tmp_path


def finished(*overrides: str, source: str = "own.yaml") -> RunDirectory:
    """A whole run, whose files of parts are gone before it starts."""
    config = resolve(read_yaml(Path(source)), overrides)
    task, directory = prepare(config), RunDirectory.create(config)
    for name in FILES:
        Path(name).unlink()
    with Progress(Console(file=io.StringIO())) as progress:
        run(config, directory, task, progress)
    return directory


def check_used(directory: RunDirectory, own: Path) -> None:
    """All parts did their work: 8 rows that count 0.5 each, a loss of 3 times the advantage, one answer, a line for each step."""
    step = rows(directory)[1]
    assert step["actor/rows_trained"] == 4.0
    assert step["actor/pg_loss"] == pytest.approx(3 * 0.25)
    assert (own / "tracked").read_text() == "0 None\n1 4.0\n"
    samples = [json.loads(line) for line in (directory.path / "samples.jsonl").read_text().splitlines()]
    assert len({sample["response"] for sample in samples}) == 1
    assert all(int(sample["prompt"].split("+")[0]) >= 50 for sample in samples)
    stored = json.loads((directory.parts / "index.json").read_text())
    assert sorted(stored) == sorted(str(own / name) for name in FILES)


def test_parts_of_a_yaml_file_run_on_one_rank(own: Path) -> None:
    check_used(finished(), own)


def test_parts_of_the_command_line_run_on_two_ranks_that_do_not_have_the_files(own: Path, ray_cluster: None) -> None:
    check_used(finished(*CLI, "num_workers=2", source="others.yaml"), own)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "actor.engine=my_engine.py:CountinEngine",
            "actor.engine.name: .* does not have 'CountinEngine'; did you mean 'CountingEngine'",
        ),
        ("rollout=my_engine.py:CountingEngine", "rollout.name: .* must be a subclass of podium.rollout.BaseRollout"),
        ("actor.loss=my_loss.py:Liner", "actor.loss.name: .* does not have 'Liner'; did you mean 'Linear'"),
        ("algorithm.adv_estimator=gpro", "adv_estimator.name: unknown advantage estimator 'gpro'; did you mean 'grpo'"),
        ("algorithm.adv_estimator.vlaue=1", "unknown key 'algorithm.adv_estimator.vlaue'; did you mean 'value'"),
        ("task=my_tsak.py:Successor", r"task\.name: no such file: my_tsak\.py"),
        ("actor.engine.wieght=1", "unknown key 'actor.engine.wieght'; did you mean 'weight'"),
        (
            "trainer.trackers=[{name: my_tracker.py:Lines, fiel: x}]",
            r"unknown key 'trainer\.trackers\.0\.fiel'; did you mean 'file'",
        ),
        (
            "trainer.trackers=[tensorbord]",
            r"trainer\.trackers\.0\.name: unknown tracker 'tensorbord'; did you mean 'tensorboard'",
        ),
    ],
)
def test_a_wrong_name_or_key_ends_the_command_before_a_run_directory_is_made(own: Path, override: str, expected: str) -> None:
    found = CliRunner().invoke(app, ["train", "own.yaml", override])
    assert isinstance(found.exception, ConfigError)
    assert re.search(expected, str(found.exception))
    assert not (own / "runs").exists()


def test_explain_shows_the_settings_of_each_part_and_where_it_is_defined(own: Path) -> None:
    output = CliRunner().invoke(app, ["explain", "own.yaml", "actor.engine.weight=2"]).output
    assert f"actor.engine my_engine.py:CountingEngine ({own / 'my_engine.py'}, sha256 " in output
    assert yaml.safe_load(output)["actor"]["engine"]["weight"] == 2
    assert yaml.safe_load(output)["rollout"]["token"] == 7

"""docs/algorithms.md: its estimator and its policy loss train, from files of their own and as rows of the tables."""

from __future__ import annotations

import re
import shlex
import sys
from ast import literal_eval
from pathlib import Path

import pytest
import torch

from podium.algorithms import PolicyLoss
from podium.config import GRPOConfig, PPOClipConfig
from podium.parts import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, PartTable, SourceFile
from tests.algorithms.builders import outputs, policy_batch, rewarded
from tests.trainers.builders import rows, small_config, train

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")
PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
BLOCKS = dict(re.findall(r"```\w+ title=(\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
FILES = [name for name in BLOCKS if name.endswith(".py")]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    for name in FILES:
        (tmp_path / name).write_text(BLOCKS[name])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def overrides(command: str) -> list[str]:
    """The settings of a command line of the page."""
    program, verb, recipe, *settings = shlex.split(BLOCKS[command])
    assert (program, verb, recipe) == ("podium", "train", "spell_backward")
    return settings


def test_the_estimator_and_the_loss_of_the_page_train_as_its_commands_say(tmp_path):
    short = (
        "actor.drop_zero_advantage=false",
        "warmup.steps=3",
        "trainer.total_steps=1",
        "task.num_held_out=4",
        "task.num_validation=4",
    )
    found = rows(train(small_config(tmp_path, *short, *overrides("estimator"), *overrides("loss"))))[1]
    assert {"actor/pg_loss", "actor/gain", "actor/ppo_kl"} <= found.keys()


def test_the_estimator_of_the_page_is_what_its_docstring_says():
    cls = SourceFile.read("median.py").module().MedianBaseline
    section = small_config(Path(), *overrides("estimator")).algorithm.adv_estimator
    counted = torch.tensor([True, True, True, False, True])
    given = rewarded(torch.tensor([1.0, 2.0, 9.0, 50.0, 4.0]), torch.tensor([0, 0, 0, 0, 1]), counted)
    assert cls(section)(given).advantages.tolist() == [-0.5, 0.0, 3.5, 0.0, 0.0]


def test_the_loss_of_the_page_is_what_its_docstring_says():
    cls = SourceFile.read("soft_clip.py").module().SoftClip
    section = small_config(Path(), *overrides("loss")).actor.loss
    leaf = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    found = PolicyLoss(cls(section))(outputs(leaf), policy_batch([[1]], [[-0.5]], [[3.0]]))
    gain = torch.tanh(4 * (torch.tensor(0.5, dtype=torch.float64).exp() - 1)) / 4
    assert float(found.total.detach()) == pytest.approx(-3.0 * float(gain))
    assert found.metrics.to_floats()["gain"] == pytest.approx(float(gain))


@pytest.mark.parametrize(
    ("table", "file", "block"),
    [(ADVANTAGE_ESTIMATORS, "median.py", "estimator_row"), (POLICY_LOSSES, "soft_clip.py", "loss_row")],
)
def test_the_rows_of_the_page_give_short_names(table, file, block, monkeypatch):
    row = literal_eval(BLOCKS[block])
    [(name, target)] = row.items()
    place, _, attribute = target.partition(":")
    module = SourceFile.read(file).module()
    monkeypatch.setitem(sys.modules, place, module)
    wider = PartTable(table.kind, {**table.rows, **row}, base=table.base)
    assert wider.resolve(name) is getattr(module, attribute)
    assert wider.settings_of(name) not in (None, GRPOConfig, PPOClipConfig)

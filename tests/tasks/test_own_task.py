"""Tasks and rewards that a user wrote in a file of their own."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from podium.config import resolve
from podium.errors import ConfigError, TaskError
from podium.tasks import Scorer, build_task
from tests.config.test_load import SETTINGS
from tests.tasks.builders import Rows

OWN = """
from podium.config import TaskConfig
from podium.tasks import Problem, RewardInputs, Task

class Doubling(Task):
    class Settings(TaskConfig):
        first: int = 0

    def __init__(self, context):
        start, size = context.settings.first, context.settings.num_train or 4
        problems = [Problem(f"n{n}", f"{n}+{n}=", str(2 * n), n) for n in range(start, start + size + 2)]
        self.train, self.validation, self.held_out = problems[:-2], problems[-2:-1], problems[-1:]

    def verify(self, problem, response):
        return float(response == problem.answer)

    def reward_inputs(self, problem):
        return RewardInputs("doubling", problem.answer, {})

def five(context):
    return Doubling(type("Context", (), {"settings": Doubling.Settings(name="x.y:Z", first=5)}))

def nothing(context):
    return None

def reward(data_source, solution_str, ground_truth, extra_info):
    return 0.5
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.parametrize(
    ("overrides", "first"),
    [(["task=own.py:Doubling", "task.first=3"], "3+3="), (["task.name=own.py:five"], "5+5="), (["task=own.py:Doubling"], "0+0=")],
)
def test_a_task_is_a_class_or_a_function_of_a_file(own: Path, overrides: list[str], first: str) -> None:
    config = pickle.loads(pickle.dumps(resolve(SETTINGS, overrides)))
    own.unlink()
    assert build_task(config.task).train[0].prompt == first


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["task=own.py:Doubling", "task.frist=3"], "unknown key 'task.frist'; did you mean 'first'?"),
        (
            ["task=own.py:Doubbling"],
            "task.name: the task 'own.py:Doubbling': own.py does not have 'Doubbling'; did you mean 'Doubling'?",
        ),
        (
            ["task=own.py:Doubling", "task.few_shot=3"],
            "task.few_shot: only for a task with task.name (a dataset of reasoning-gym)",
        ),
        (["task=own.py:Doubling", "task.train_files=a.jsonl"], "your own rows (task.train_files), got both"),
    ],
)
def test_settings_that_a_task_of_a_user_does_not_have_are_refused(own: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(SETTINGS, overrides)
    assert expected in str(caught.value)


def test_what_is_not_a_task_is_named(own: Path) -> None:
    with pytest.raises(TaskError, match=r"task\.name: own\.py:nothing must give a podium\.tasks\.Task, got None"):
        build_task(resolve(SETTINGS, ["task=own.py:nothing"]).task)


def test_an_edit_of_the_reward_file_after_the_settings_were_read_changes_no_reward(own: Path) -> None:
    config = resolve(SETTINGS, ["reward.function=own.py:reward", "reward.num_workers=1"])
    own.write_text("def reward(**inputs): return 0.25\n")
    task = Rows(1)
    with Scorer(task, config.reward) as scorer:
        assert scorer(task.train, ["x"]).values == [0.5]
    with Scorer(task, resolve(SETTINGS, ["reward.function=own.py:reward", "reward.num_workers=1"]).reward) as scorer:
        assert scorer(task.train, ["x"]).values == [0.25]

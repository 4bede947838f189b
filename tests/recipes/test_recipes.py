from __future__ import annotations

import pytest

from podium.config import check, read_yaml, resolve, to_yaml
from podium.errors import ConfigError
from podium.recipes import RECIPES, recipe
from podium.tasks import build_task, check_disjoint


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_works_out_and_says_what_it_shows(name, tmp_path):
    """Field reports K1, K4: every example runs dry, and reads back equal from YAML; no override changes nothing."""
    config = recipe(name)
    check(config)
    assert config.name == name
    assert len(config.description) > 40
    (tmp_path / "recipe.yaml").write_text(to_yaml(config))
    assert resolve(read_yaml(tmp_path / "recipe.yaml")) == config == resolve(config)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_task_has_disjoint_splits_of_the_asked_size(name):
    config = recipe(name).task
    task = build_task(config)
    check_disjoint(task)
    assert (len(task.train), len(task.validation), len(task.held_out)) == (
        config.num_train,
        config.num_validation,
        config.num_held_out,
    )
    for problem in (*task.train[:5], *task.held_out[:5]):
        assert isinstance(problem.prompt, str)
        assert task.verify(problem, problem.answer) == 1.0


def test_an_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'spell_backward'"):
        recipe("spell_backwards")

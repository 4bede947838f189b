"""Ready-made runs, one file each: a recipe is a function that returns a `RunConfig`."""

from __future__ import annotations

from collections.abc import Callable

from podium.config import RunConfig
from podium.errors import ConfigError, unknown_name
from podium.recipes.spell_backward import spell_backward

__all__ = ["RECIPES", "recipe"]

RECIPES: dict[str, Callable[[], RunConfig]] = {"spell_backward": spell_backward}


def recipe(name: str) -> RunConfig:
    """The config of a recipe. ConfigError for an unknown name, with the nearest one."""
    if name not in RECIPES:
        raise ConfigError(unknown_name("recipe", name, RECIPES))
    return RECIPES[name]()

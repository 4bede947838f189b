"""Ready-made runs, one file each: a recipe is a function that returns a `RunConfig`."""

from __future__ import annotations

from collections.abc import Callable

from podium.config import RunConfig
from podium.errors import ConfigError, unknown_name
from podium.recipes.palindrome import palindrome
from podium.recipes.smollm2_chain_sum import smollm2_chain_sum
from podium.recipes.spell_backward import spell_backward
from podium.recipes.word_sorting import word_sorting

__all__ = ["RECIPES", "recipe"]

RECIPES: dict[str, Callable[[], RunConfig]] = {
    "spell_backward": spell_backward,
    "word_sorting": word_sorting,
    "palindrome": palindrome,
    "smollm2_chain_sum": smollm2_chain_sum,
}


def recipe(name: str) -> RunConfig:
    """The config of a recipe. ConfigError for an unknown name, with the nearest one."""
    if name not in RECIPES:
        raise ConfigError(unknown_name("recipe", name, RECIPES))
    return RECIPES[name]()

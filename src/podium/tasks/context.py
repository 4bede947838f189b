"""`TaskContext`: what a task is constructed from, the same for tasks of ours and of users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from podium.config import TaskConfig
from podium.tasks.base import Prompt

C = TypeVar("C", bound=TaskConfig)

CountTokens: TypeAlias = Callable[[Prompt], int]
"""Tokens of a prompt as the policy will see it; DataError when it cannot be tokenised."""


@dataclass(frozen=True)
class TaskContext(Generic[C]):
    """The settings of a task, and what the driver knows of the run. Further fields may be added."""

    settings: C
    """An object of the task's own settings class."""
    exact_match: bool = True
    """Whether the task's own verifier scores: `reward.function` is not set."""
    count_tokens: CountTokens | None = None

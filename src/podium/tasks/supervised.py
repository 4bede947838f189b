"""Targets of supervised warm-up: which text should follow a prompt, as a mixture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from podium.tasks.base import Problem

TARGETS: dict[Literal["answer", "copy"], Callable[[Problem], str]] = {
    "answer": lambda problem: problem.answer,
    "copy": lambda problem: problem.question.rstrip("\n"),
}


def draw_targets(
    problems: Sequence[Problem], weights: Mapping[Literal["answer", "copy"], float], *, seed: int, step: int
) -> list[str]:
    """A target text for each problem, drawn by weight from a stream keyed by (seed, step): nothing tells which was drawn."""
    names = list(weights)
    shares = np.array([weights[name] for name in names])
    drawn = np.random.default_rng([seed, step]).choice(len(names), size=len(problems), p=shares / shares.sum())
    return [TARGETS[names[choice]](problem) for problem, choice in zip(problems, drawn, strict=True)]

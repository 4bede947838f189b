"""The learning-rate schedule, worked out by hand."""

from __future__ import annotations

import math

import pytest

from podium.config import OptimConfig
from podium.engines.schedule import lr_factor


def factors(steps: list[int], total: int, **settings: object) -> list[float]:
    return [lr_factor(OptimConfig.model_validate({"lr": 1.0, **settings}), step, total) for step in steps]


def test_constant_is_one_after_a_warm_up_whose_first_step_moves() -> None:
    assert factors([0, 1, 2, 3, 4, 99], 10, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors([0, 5], 10) == [1.0, 1.0]


def test_linear_ends_at_the_floor_on_the_last_step_and_stays() -> None:
    assert factors([0, 2, 4, 5], 5, schedule="linear") == [1.0, 0.5, 0.0, 0.0]
    assert factors([0, 1, 2, 3, 9], 4, schedule="linear", warmup_steps=1, min_lr_ratio=0.5) == [1.0, 1.0, 0.75, 0.5, 0.5]


def test_cosine_is_half_way_in_the_middle() -> None:
    found = factors([0, 1, 2, 4, 8], 5, schedule="cosine", min_lr_ratio=0.2)
    assert found == pytest.approx([1.0, 0.2 + 0.4 * (1 + math.cos(math.pi / 4)), 0.6, 0.2, 0.2], abs=1e-15)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_runs_of_one_step_or_all_warm_up_are_fine(schedule: str) -> None:
    assert factors([0], 1, schedule=schedule) == [1.0]
    assert factors([0, 1], 2, schedule=schedule, warmup_steps=2) == [0.5, 1.0]
    assert factors([0, 1], 2, schedule=schedule, warmup_steps=10) == [0.1, 0.2]

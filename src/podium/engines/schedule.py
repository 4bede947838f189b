"""The learning-rate schedule, as a pure function of the optimizer step."""

from __future__ import annotations

import math

from podium.config import OptimConfig


def lr_factor(optim: OptimConfig, step: int, total_steps: int) -> float:
    """The fraction of `optim.lr` at optimizer step `step` (0 is the first) of `total_steps`.

    Rises linearly over `warmup_steps` (the first step already moves), then is constant, or falls to `min_lr_ratio` at the
    last step along a line or a half cosine.

    >>> linear = OptimConfig(lr=1.0, warmup_steps=2, schedule="linear", min_lr_ratio=0.1)
    >>> [round(lr_factor(linear, step, 12), 2) for step in (0, 1, 2, 11, 99)]
    [0.5, 1.0, 1.0, 0.1, 0.1]
    """
    if step < optim.warmup_steps:
        return (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return 1.0
    done = min(1.0, (step - optim.warmup_steps) / max(1, total_steps - 1 - optim.warmup_steps))
    shape = 1 - done if optim.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape

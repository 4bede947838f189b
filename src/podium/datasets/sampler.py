"""Which training problems a step sees: a pure function of (seed, step), so there is no state to save."""

from __future__ import annotations

import numpy as np


class StepSampler:
    """Batches of `batch_size` problems out of `num_problems`; every epoch goes through all of them once, newly shuffled.

    A batch may span two epochs. The order of an epoch depends on (seed, epoch) only.

    >>> sampler = StepSampler(num_problems=5, batch_size=2, seed=0)
    >>> sorted(sampler.rows(0) + sampler.rows(1) + sampler.rows(2)[:1])
    [0, 1, 2, 3, 4]
    """

    def __init__(self, *, num_problems: int, batch_size: int, seed: int) -> None:
        self._num_problems, self._batch_size, self._seed = num_problems, batch_size, seed
        self._orders: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """Numbers of the problems of step `step`, counted from 0."""
        first = step * self._batch_size
        return [
            self._order(place // self._num_problems)[place % self._num_problems]
            for place in range(first, first + self._batch_size)
        ]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = np.random.default_rng([self._seed, epoch]).permutation(self._num_problems).tolist()
            self._orders = {kept: rows for kept, rows in self._orders.items() if kept >= epoch - 1} | {epoch: order}
        return self._orders[epoch]

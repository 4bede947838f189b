"""Which training problems a step sees: a pure function of (seed, step), so there is no state to save."""

from __future__ import annotations

import numpy as np

from podium.errors import DataError


class StepSampler:
    """Batches of `batch_size` problems out of `num_problems`; every epoch goes through all of them once, newly shuffled.

    A batch may span two epochs, and still never holds a problem twice. The order depends on the seed only. DataError when a
    batch is larger than the number of problems.

    >>> sampler = StepSampler(num_problems=5, batch_size=2, seed=0)
    >>> sorted(sampler.rows(0) + sampler.rows(1) + sampler.rows(2)[:1])
    [0, 1, 2, 3, 4]
    """

    def __init__(self, *, num_problems: int, batch_size: int, seed: int) -> None:
        if batch_size > num_problems:
            raise DataError(f"a batch of {batch_size} different problems cannot be drawn from {num_problems}")
        self._num_problems, self._batch_size, self._seed = num_problems, batch_size, seed
        self._orders: dict[int, list[int]] = {}

    def rows(self, step: int) -> list[int]:
        """Numbers of the problems of step `step`, counted from 0; all different."""
        first = step * self._batch_size
        return [
            self._order(place // self._num_problems)[place % self._num_problems]
            for place in range(first, first + self._batch_size)
        ]

    def _order(self, epoch: int) -> list[int]:
        """The order of an epoch. Found from the first epoch on where an earlier one decides, and then remembered."""
        for number in range(max((known for known in self._orders if known <= epoch), default=-1) + 1, epoch + 1):
            shuffled = np.random.default_rng([self._seed, number]).permutation(self._num_problems).tolist()
            self._orders = {number - 1: self._orders.get(number - 1, []), number: self._without_repeats(shuffled, number)}
        return self._orders[epoch]

    def _without_repeats(self, order: list[int], epoch: int) -> list[int]:
        """The order with what the spanning batch has drawn already put behind that batch's share of this epoch."""
        drawn_before = (epoch * self._num_problems) % self._batch_size
        if not drawn_before:
            return order
        share = self._batch_size - drawn_before
        taken = set(self._orders[epoch - 1][-drawn_before:])
        fresh = [row for row in order if row not in taken]
        head = fresh[:share]
        chosen = set(head)
        return head + [row for row in order if row not in chosen]

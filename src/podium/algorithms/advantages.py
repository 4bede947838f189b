"""Advantages: what an estimator is given and returns, and the arithmetic of groups that several estimators share.

Legend: B rows, U groups (prompts), N response tokens of all rows, end to end. To add an estimator: a module beside this one
with a subclass of `AdvantageEstimator`, and a row in `podium.parts.tables`; docs/algorithms.md shows one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from podium.config import AdvantageConfig
from podium.errors import DataError


@dataclass(frozen=True)
class RewardedRows:
    """What an advantage estimator is given of the rows of a step; padding rows are not among them."""

    rewards: Tensor
    """float64. For an estimator of rows [B]: the reward of the response. For one of tokens [N]: the reward at the last token that
    the mask keeps, 0 at the others. The KL penalty is taken off already."""
    groups_B: Tensor
    """[B] int64: the rows of one prompt have the same number, counted from 0."""
    is_counted_B: Tensor
    """[B] bool: False for a row without a score or without a token to learn from. It must be in no statistic, and get 0."""
    num_tokens_B: Tensor
    """[B] int64: response tokens that the mask keeps."""
    mask_N: Tensor | None = None
    """[N] int64: 1 for a token that counts; only for an estimator of tokens."""
    offsets: Tensor | None = None
    """[B + 1] int64: where the tokens of each row begin; only for an estimator of tokens."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Those that the estimator `reads`: [B, ...] of a dense column, [N] of a jagged one."""


@dataclass(frozen=True)
class Advantages:
    """What an estimator returns: [B] or [N] as its `level` says, of any float dtype."""

    advantages: Tensor
    returns: Tensor | None = None
    """What a critic should have predicted, shaped alike; of an estimator that `gives_returns`."""


@dataclass(frozen=True)
class AdvantageEstimator(ABC):
    """From the rewards of a step to advantages: a pure function, built from the section `algorithm.adv_estimator`.

    An attribute `Settings`, a subclass of `podium.config.AdvantageConfig`, declares the keys of its own beside `name`.
    """

    level: ClassVar[Literal["row", "token"]] = "row"
    """Whether rewards and advantages are one for each row or one for each token. What is equal for all tokens of a row should be
    of rows: a number for each token is 250 times as much on the driver."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Further columns that it needs, such as `values`. The step that makes them is added to the run, with its role."""
    gives_returns: ClassVar[bool] = False
    """Whether it also returns what a critic should have predicted."""
    min_samples: ClassVar[int] = 1
    """Fewest samples of a prompt (`rollout.sampling.n`) with which it can tell rows apart."""

    settings: AdvantageConfig = field(default_factory=AdvantageConfig)

    @abstractmethod
    def __call__(self, rows: RewardedRows) -> Advantages:
        """The advantages of all rows, in their order."""


def group_ids(uids: Sequence[Hashable]) -> Tensor:
    """[B] int64: rows of the same uid get the same number, whatever their order; numbers follow first appearance.

    DataError for a row whose uid is None: it would share its baseline with every other such row.

    >>> group_ids(["b", "a", "b"])
    tensor([0, 1, 0])
    """
    for row in [row for row, uid in enumerate(uids) if uid is None][:1]:
        raise DataError(f"the uid of row {row} is None; it must name the prompt that the row answers")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


@dataclass(frozen=True)
class GroupStatistics:
    """Statistics of values by group, each as [B] float64: that of the row's own group."""

    count_B: Tensor
    mean_B: Tensor
    is_varied_B: Tensor
    """bool: whether the values of the group differ. False for a group of one."""
    _groups_B: Tensor

    @classmethod
    def of(cls, values_B: Tensor, groups_B: Tensor) -> GroupStatistics:
        """Of float64 values that are all finite."""
        num_groups = int(groups_B.max()) + 1 if len(groups_B) else 0
        count_U = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups_B, torch.ones_like(values_B))
        mean_U = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups_B, values_B) / count_U
        low_U = torch.full((num_groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, groups_B, values_B, "amin")
        high_U = torch.full((num_groups,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, groups_B, values_B, "amax")
        return cls(count_U[groups_B], mean_U[groups_B], (low_U < high_U)[groups_B], groups_B)

    def std(self, centred_B: Tensor) -> Tensor:
        """The unbiased standard deviation (n - 1) of each row's group, given each value minus its group's mean."""
        num_groups = int(self._groups_B.max()) + 1 if len(self._groups_B) else 0
        squares_U = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, self._groups_B, centred_B**2)
        return (squares_U[self._groups_B] / (self.count_B - 1).clamp(min=1)).sqrt()


def within_counted(rows: RewardedRows, values: Tensor) -> Tensor:
    """[B] float64: `values` at the rows that count, in their order, and 0 at the others."""
    advantages_B = torch.zeros(len(rows.is_counted_B), dtype=torch.float64)
    advantages_B[rows.is_counted_B] = values
    return advantages_B

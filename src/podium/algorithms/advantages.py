"""Advantages from outcome rewards. Pure functions; legend: B rows, U groups (prompts)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from podium.errors import DataError


def group_ids(uids: Sequence[Hashable]) -> Tensor:
    """[B] int64: rows of the same uid get the same number, whatever their order; numbers follow first appearance.

    DataError for a row whose uid is None: it would share its baseline with every other such row.

    >>> group_ids(["b", "a", "b"])
    tensor([0, 1, 0])
    """
    for row in [row for row, uid in enumerate(uids) if uid is None][:1]:
        raise DataError(f"row {row} has no uid, which says whose sample it is")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids], dtype=torch.int64)


def grpo_advantages(scores_B: Tensor, groups_B: Tensor, is_scored_B: Tensor | None = None, *, norm_by_std: bool = True) -> Tensor:
    """GRPO's advantage of each row: (score - mean of its group) / (standard deviation of its group + 1e-6), [B] float32.

    The deviation is the unbiased one (n - 1). Without `norm_by_std` the centred score alone (Dr.GRPO). A group whose scores
    are all equal, and so a group of one, gets exactly 0: it has no baseline to differ from. Rows where `is_scored_B` [B] bool
    is False get 0 and are in no group, whatever stands in their score: so a row without a token to learn from must be marked
    too (padding, or a mask of zeros). Computed in float64.
    Source: Shao et al. 2024, "DeepSeekMath", section 4.1.2 (outcome supervision); Liu et al. 2025, "Understanding
    R1-Zero-Like Training", for the variant. Raises DataError for the first score, by its row in the batch, that is not finite.
    """
    is_scored_B = torch.ones(len(scores_B), dtype=torch.bool) if is_scored_B is None else is_scored_B.bool()
    for row in (is_scored_B & ~torch.isfinite(scores_B)).nonzero().flatten()[:1].tolist():
        raise DataError(
            f"the score of row {row} is {float(scores_B[row])}; score it, or leave the row out by False in is_scored_B[{row}]"
        )
    advantages_B = torch.zeros(len(scores_B))
    advantages_B[is_scored_B] = _in_groups(scores_B[is_scored_B].double(), groups_B[is_scored_B], norm_by_std=norm_by_std).float()
    return advantages_B


def _in_groups(scores: Tensor, groups_B: Tensor, *, norm_by_std: bool) -> Tensor:
    """[B] float64: the advantages of rows that all have a finite score."""
    num_groups = int(groups_B.max()) + 1 if len(groups_B) else 0
    count_U = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups_B, torch.ones_like(scores))
    mean_U = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups_B, scores) / count_U
    centred_B = scores - mean_U[groups_B]
    low_U = torch.full((num_groups,), torch.inf, dtype=torch.float64).scatter_reduce_(0, groups_B, scores, "amin")
    high_U = torch.full((num_groups,), -torch.inf, dtype=torch.float64).scatter_reduce_(0, groups_B, scores, "amax")
    if norm_by_std:
        squares_U = torch.zeros(num_groups, dtype=torch.float64).index_add_(0, groups_B, centred_B**2)
        std_U = (squares_U / (count_U - 1).clamp(min=1)).sqrt()
        centred_B = centred_B / (std_U[groups_B] + 1e-6)
    return torch.where((low_U < high_U)[groups_B], centred_B, 0.0)

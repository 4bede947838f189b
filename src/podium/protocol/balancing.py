"""Orders of rows that make consecutive shards alike, for a driver that does not know how many shards there will be."""

from __future__ import annotations

import torch
from torch import Tensor


def interleave_groups(groups_B: Tensor) -> Tensor:
    """[B] row numbers: the first row of each group, then the second of each, and so on, rows of a group in their order.

    Any run of consecutive rows then holds each group's fair share, within one row where the groups are of one size. So when
    rows of several mini-batches are cut into shards, every rank has its part of each.

    >>> interleave_groups(torch.tensor([0, 0, 0, 1, 1, 1])).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    by_group = torch.argsort(groups_B, stable=True)
    sizes = torch.unique_consecutive(groups_B[by_group], return_counts=True)[1]
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    place_in_group = torch.empty_like(by_group)
    place_in_group[by_group] = torch.arange(len(groups_B)) - starts
    by_place = torch.argsort(place_in_group[by_group], stable=True)
    return by_group[by_place]

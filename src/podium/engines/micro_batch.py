"""How a rank's rows are cut into micro-batches: a pure decision from lengths to row numbers.

Two layouts compute the same numbers. *Bucketed*: rows of like length side by side, padded to the longest, so the computed
padding stays small. *Packed*: rows end to end in one long row, so there is no padding, but attention pays for a square mask
over the whole row. The plan that is estimated to cost less wins. A micro-batch never holds more than `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError

Layout = Literal["bucketed", "packed"]
MAX_PADDING_FRAC = 0.10
"""Most of a bucket that may be padding; rows too different to keep it are not put side by side."""


@dataclass(frozen=True)
class CostModel:
    """What a forward and backward pass costs, in units of one token through the model's matrices.

    `call_tokens`: the fixed cost of one pass. `mask_tokens`: the cost of one entry of a packed row's attention mask. The
    defaults were measured on a CPU with a model of hidden size 96; `for_hidden` scales them, since a token's matrices grow
    with the square of the hidden size, a call's overhead hardly at all, and the mask linearly.
    """

    call_tokens: float = 128.0
    mask_tokens: float = 1 / 512

    @classmethod
    def for_hidden(cls, hidden_size: int) -> CostModel:
        ratio = 96 / hidden_size
        return cls(cls.call_tokens * ratio**2, cls.mask_tokens * ratio)


@dataclass(frozen=True)
class MicroBatch:
    """Rows that go through the model together; `rows` may be empty where other ranks still have some."""

    rows: Tensor
    layout: Layout


def plan_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, layout: Literal["auto", "bucketed", "packed"], cost: CostModel
) -> list[MicroBatch]:
    """Cut rows of the given token counts into micro-batches; every row is in exactly one.

    DataError names the first row that is longer than `max_tokens` alone.
    """
    lengths_B = np.asarray(lengths, dtype=np.int64)
    for row in np.flatnonzero(lengths_B > max_tokens)[:1]:
        raise DataError(
            f"row {row} has {lengths_B[row]} tokens, a micro-batch holds at most {max_tokens}; raise max_tokens_per_micro_batch "
            "or shorten prompts and responses"
        )
    if not len(lengths_B):
        return []
    if layout == "packed":
        return _packed(lengths_B, max_tokens, cost)[1]
    price, micros = _bucketed(lengths_B, max_tokens, cost)
    cheapest_packing = float(lengths_B.sum()) * (1 + 2 * (cost.call_tokens * cost.mask_tokens) ** 0.5)
    if layout == "bucketed" or cheapest_packing >= price:
        return micros
    packed_price, packed_micros = _packed(lengths_B, max_tokens, cost)
    return packed_micros if packed_price < price else micros


def _bucketed(lengths_B: NDArray[np.int64], max_tokens: int, cost: CostModel) -> tuple[float, list[MicroBatch]]:
    order = np.argsort(lengths_B, kind="stable")
    total, micros, start = 0.0, [], 0
    for size in _bucket_sizes(lengths_B[order], cost):
        bucket, start = order[start : start + size], start + size
        rows_each = max_tokens // max(1, int(lengths_B[bucket[-1]]))
        for rows in np.array_split(bucket, -(-size // rows_each)):
            micros.append(MicroBatch(torch.from_numpy(rows), "bucketed"))
            total += cost.call_tokens + len(rows) * int(lengths_B[rows].max())
    return total, micros


def _bucket_sizes(sorted_lengths: NDArray[np.int64], cost: CostModel) -> list[int]:
    """Rows per bucket, shortest first: the cheapest cut of the sorted rows between distinct lengths (dynamic programming)."""
    distinct, counts = np.unique(sorted_lengths, return_counts=True)
    rows_before = np.concatenate([[0], np.cumsum(counts)])
    tokens_before = np.concatenate([[0], np.cumsum(counts * distinct)])
    best, cut = np.zeros(len(distinct) + 1), np.zeros(len(distinct) + 1, dtype=np.int64)
    for end in range(1, len(distinct) + 1):
        area = (rows_before[end] - rows_before[:end]) * distinct[end - 1]
        padding = area - (tokens_before[end] - tokens_before[:end])
        price = best[:end] + cost.call_tokens + area + np.where(padding > MAX_PADDING_FRAC * area, np.inf, 0.0)
        cut[end] = int(np.argmin(price))
        best[end] = price[cut[end]]
    sizes, end = [], len(distinct)
    while end:
        sizes.append(int(rows_before[end] - rows_before[cut[end]]))
        end = int(cut[end])
    return sizes[::-1]


def _packed(lengths_B: NDArray[np.int64], max_tokens: int, cost: CostModel) -> tuple[float, list[MicroBatch]]:
    """First fit over the rows from long to short, into packed rows as long as the mask makes worth while."""
    room = int(min(max_tokens, max(lengths_B.max(), (cost.call_tokens / cost.mask_tokens) ** 0.5)))
    bins: list[list[int]] = []
    filled: list[int] = []
    for row in np.argsort(-lengths_B, kind="stable"):
        slot = next((i for i, tokens in enumerate(filled) if tokens + lengths_B[row] <= room), len(bins))
        if slot == len(bins):
            bins.append([])
            filled.append(0)
        bins[slot].append(int(row))
        filled[slot] += int(lengths_B[row])
    price = sum(cost.call_tokens + tokens + cost.mask_tokens * tokens**2 for tokens in filled)
    return price, [MicroBatch(torch.tensor(sorted(rows)), "packed") for rows in bins]

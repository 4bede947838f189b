"""How a rank's rows are cut into micro-batches: a pure decision from lengths to row numbers.

The layouts of `layouts` compute the same numbers. *Bucketed* pads rows of like length to the longest, so the computed padding
stays small; *packed* pads nothing, but attention pays for a square mask over the whole sequence; *shared* computes the prompt
of several samples once, and pays for a mask over the unit. The plan that is estimated to cost less wins. A micro-batch never
holds more than `max_tokens`, padding included; a sequence that several rows share is never longer than `max_sequence`.
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
from podium.protocol import DataProto
from podium.protocol.jagged import is_jagged

Layout = Literal["bucketed", "packed", "shared"]
LAYOUTS: tuple[Layout, ...] = ("bucketed", "packed", "shared")
PlannedLayout = Literal["auto", "bucketed", "packed", "shared"]
MAX_PADDING_FRAC = 0.10
"""Most of a bucket that may be padding; rows too different to keep it are not put side by side."""


@dataclass(frozen=True)
class CostModel:
    """What a forward and backward pass costs, in units of one token through the model's matrices.

    `call_tokens`: the fixed cost of one pass. `mask_tokens`: the cost of one entry of a sequence's attention mask. The
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
    units: Tensor | None = None
    """Of the layout `shared`: which sequence each row goes into, counted from 0, rows of one side by side."""


@dataclass(frozen=True)
class Prompts:
    """What rows begin with: the same number means the same prompt; `lengths` in tokens."""

    ids: Sequence[int]
    lengths: Sequence[int]


def longest_sequence(micros: Sequence[MicroBatch], layout: Layout, lengths: Sequence[int], prompts: Prompts | None) -> int:
    """Tokens of the longest sequence in the layout `packed` or `shared`; 0 where no micro-batch has that layout."""
    lengths_B, longest = np.asarray(lengths, dtype=np.int64), 0
    for micro in micros:
        if micro.layout == layout:
            rows = micro.rows.numpy()
            units = np.zeros(len(rows), dtype=np.int64) if micro.units is None else micro.units.numpy()
            repeated = np.zeros(len(rows), dtype=np.int64)
            if micro.units is not None and prompts is not None:
                repeated = np.where(np.diff(units, prepend=-1) == 0, np.asarray(prompts.lengths, dtype=np.int64)[rows], 0)
            longest = max(longest, int(np.bincount(units, lengths_B[rows] - repeated).max(initial=0)))
    return longest


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    layout: PlannedLayout,
    cost: CostModel,
    prompts: Prompts | None = None,
    max_sequence: int | None = None,
) -> list[MicroBatch]:
    """Cut rows of the given token counts into micro-batches; every row is in exactly one.

    Without `prompts` the layout `shared` is left out; without `max_sequence` a sequence may have `max_tokens`. A row must not
    be longer than `max_tokens`.
    """
    assert max(lengths, default=0) <= max_tokens  # the engine has refused longer rows
    max_sequence = min(max_tokens, max_sequence or max_tokens)
    lengths_B = np.asarray(lengths, dtype=np.int64)
    if not len(lengths_B):
        return []
    plans = []
    if layout in ("auto", "bucketed"):
        plans.append(_bucketed(lengths_B, max_tokens, cost))
    if layout in ("auto", "shared") and prompts is not None:
        plans.append(_shared(lengths_B, prompts, max_tokens, max_sequence, cost))
    cheapest_packing = float(lengths_B.sum()) * (1 + 2 * (cost.call_tokens * cost.mask_tokens) ** 0.5)
    if layout == "packed" or (layout == "auto" and cheapest_packing < min(price for price, _ in plans)):
        plans.append(_packed(lengths_B, max_sequence, cost))
    return min(plans, key=lambda plan: plan[0])[1]


def plan_units(lengths: Sequence[int], units: Sequence[int], *, max_tokens: int | None) -> list[MicroBatch]:
    """Cut rows into micro-batches that keep the rows of each unit together, side by side; units from short to long.

    DataError for the first unit that is longer, padding included, than `max_tokens` (None: no limit).
    """
    rows_of: dict[int, list[int]] = {}
    for row, unit in enumerate(units):
        rows_of.setdefault(unit, []).append(row)
    micros: list[list[int]] = []
    for rows in sorted(rows_of.values(), key=lambda rows: max(lengths[row] for row in rows)):
        longest = max(lengths[row] for row in rows)
        if max_tokens is not None and len(rows) * longest > max_tokens:
            raise DataError(
                f"rows {', '.join(map(str, rows))} must be in one micro-batch and have {len(rows)} x {longest} tokens with "
                f"padding, a micro-batch holds at most {max_tokens}; raise max_tokens_per_micro_batch or shorten the rows"
            )
        if micros and (max_tokens is None or (len(micros[-1]) + len(rows)) * longest <= max_tokens):
            micros[-1] += rows
        else:
            micros.append(list(rows))
    return [MicroBatch(torch.tensor(rows), "bucketed") for rows in micros]


def unit_ids(batch: DataProto, column: str) -> list[int]:
    """The numbers that say which rows a loss compares. DataError unless the column is a dense int64 one, [B]."""
    found = batch.batch.get(column)
    if found is None:
        raise DataError(
            f"the loss keeps rows of one {column!r} together, which the batch does not have: it has {', '.join(batch.batch)}"
        )
    if is_jagged(found) or found.dtype != torch.int64 or found.dim() != 1:
        raise DataError(f"column {column!r} must be int64 [B], which says which rows belong together, got {found.dtype}")
    ids: list[int] = found.tolist()
    return ids


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


def _shared(
    lengths_B: NDArray[np.int64], prompts: Prompts, max_tokens: int, max_sequence: int, cost: CostModel
) -> tuple[float, list[MicroBatch]]:
    """Rows of one prompt in one sequence, or in a few shorter ones where the mask would cost more than the prompt saves."""
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts.ids):
        groups.setdefault(prompt, []).append(row)
    units = [
        unit
        for rows in groups.values()
        for unit in _units(np.array(rows), lengths_B, prompts.lengths[rows[0]], max_sequence, cost)
    ]
    unit_lengths = np.array([_unit_length(unit, lengths_B, prompts.lengths[unit[0]]) for unit in units])
    price, buckets = _bucketed(unit_lengths, max_tokens, cost)
    micros = []
    for bucket in buckets:
        chosen = [units[number] for number in bucket.rows.tolist()]
        price += cost.mask_tokens * len(chosen) * float(unit_lengths[bucket.rows.numpy()].max()) ** 2
        unit_of_row = np.repeat(np.arange(len(chosen)), [len(unit) for unit in chosen])
        micros.append(MicroBatch(torch.from_numpy(np.concatenate(chosen)), "shared", torch.from_numpy(unit_of_row)))
    return price, micros


def _units(
    rows: NDArray[np.int64], lengths_B: NDArray[np.int64], prompt_length: int, max_sequence: int, cost: CostModel
) -> list[NDArray[np.int64]]:
    """The cheapest cut of the rows of one prompt into 1, 2, 4, ... sequences that fit; one row each always does."""
    best, best_price = [rows[i : i + 1] for i in range(len(rows))], np.inf
    for num_parts in [2**power for power in range(len(rows).bit_length())]:
        parts = np.array_split(rows, min(num_parts, len(rows)))
        sizes = np.array([_unit_length(part, lengths_B, prompt_length) for part in parts], dtype=np.float64)
        price = float((sizes + cost.mask_tokens * sizes**2).sum())
        if sizes.max() <= max_sequence and price < best_price:
            best, best_price = parts, price
    return best


def _unit_length(rows: NDArray[np.int64], lengths_B: NDArray[np.int64], prompt_length: int) -> int:
    """Tokens of a sequence with the prompt once and these rows' responses."""
    return prompt_length + int((lengths_B[rows] - prompt_length).sum())


def _packed(lengths_B: NDArray[np.int64], max_sequence: int, cost: CostModel) -> tuple[float, list[MicroBatch]]:
    """First fit over the rows from long to short, into packed rows as long as the mask makes worth while."""
    room = int(min(max_sequence, max(lengths_B.max(), (cost.call_tokens / cost.mask_tokens) ** 0.5)))
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

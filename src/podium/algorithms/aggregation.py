"""How the losses of tokens become the loss of a batch: always as (sum, count), so that one place can divide.

Legend: N response tokens of B rows, end to end; `offsets` [B + 1] tells where the rows begin. Sums and counts of parts add
up to those of the whole, so the loss and its gradient do not depend on how a batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from podium.errors import ConfigError, unknown_name
from podium.protocol.jagged import row_ids

AggregationMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


@dataclass(frozen=True)
class Aggregation:
    """One of the modes of aggregation.

    `token-mean`: the mean over all tokens of the batch that the mask keeps. `seq-mean-token-mean`: the mean over rows of the
    mean over a row's tokens. `seq-mean-token-sum`: the mean over rows of the sum over a row's tokens.
    `seq-mean-token-sum-norm`: the same divided by the constant `scale`, which this mode requires and no other takes: a
    divisor read off the batch, its longest row say, would change with how it is cut. Rows without a kept token count in
    neither sum nor count. Raises ConfigError for an unknown mode, or for a scale that does not go with it.
    """

    mode: AggregationMode = "token-mean"
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(AggregationMode):
            raise ConfigError(unknown_name("aggregation mode", self.mode, get_args(AggregationMode)))
        if (self.scale is not None) != (self.mode == "seq-mean-token-sum-norm"):
            raise ConfigError(f"seq-mean-token-sum-norm needs a scale, no other mode takes one; got {self.mode}, {self.scale}")
        if self.scale is not None and not self.scale > 0:
            raise ConfigError(f"the scale of seq-mean-token-sum-norm must be positive, got {self.scale}")

    def sum(self, values_N: Tensor, mask_N: Tensor, offsets: Tensor) -> Tensor:
        """The numerator, a scalar. Values under a zero mask are never read: they may be NaN."""
        kept_N = torch.where(mask_N.bool(), values_N, torch.zeros_like(values_N))
        if self.mode != "seq-mean-token-mean":
            return kept_N.sum()
        return (kept_N / _tokens_per_row(mask_N, offsets).clamp(min=1)[row_ids(offsets)]).sum()

    def count(self, mask_N: Tensor, offsets: Tensor) -> float:
        """The denominator: kept tokens, or rows with at least one kept token (times `scale`)."""
        if self.mode == "token-mean":
            return float(mask_N.bool().sum())
        num_rows = float((_tokens_per_row(mask_N, offsets) > 0).sum())
        return num_rows * self.scale if self.scale is not None else num_rows


def _tokens_per_row(mask_N: Tensor, offsets: Tensor) -> Tensor:
    ends = torch.zeros(len(mask_N) + 1, dtype=torch.int64, device=mask_N.device)
    torch.cumsum(mask_N.bool(), dim=0, out=ends[1:])
    return ends[offsets].diff()

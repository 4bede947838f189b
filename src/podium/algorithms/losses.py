"""Losses over response tokens: each returns a sum and a count, and says which rows it need not see.

Legend: N response tokens of B rows, end to end, as in the jagged columns of the batch. A loss object is frozen and
picklable. It never divides: the engine divides by the count of the whole mini-batch over all ranks. The policy's loss is in
`policy`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from podium.algorithms.aggregation import Aggregation
from podium.algorithms.columns import response_column
from podium.observability import Metrics
from podium.protocol import DataProto
from podium.protocol.jagged import parts


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says of the response tokens of a micro-batch, each [N] float32 (float64 from a model in float64).

    `logprobs`: of the tokens. `entropies`: entropies of the distributions they were drawn from, in nats, after
    temperature; None unless the loss asked for them by `needs_entropy`.
    """

    logprobs: Tensor
    entropies: Tensor | None = None


@dataclass(frozen=True)
class LossSum:
    """What one micro-batch adds to the loss of its mini-batch.

    `total` is a scalar with a graph and `count` its share of the denominator. `terms` are the detached sums that `total` is
    made of by name, each before its coefficient, to be divided by the same count; `metrics` carry weights of their own.
    """

    total: Tensor
    count: float
    terms: dict[str, float]
    metrics: Metrics = field(default_factory=Metrics)


class Loss(Protocol):
    """What an engine needs of a loss."""

    @property
    def needs_entropy(self) -> bool:
        """Whether `TokenOutputs` must hold entropies; the same on every rank."""
        ...

    def count(self, batch: DataProto) -> float:
        """The denominator that these rows contribute, known before any forward pass. Padding rows are not among them."""
        ...

    def is_needed(self, batch: DataProto) -> Tensor:
        """[B] bool: rows that must be computed. The others have zero gradient; they still count."""
        ...

    def __call__(self, outputs: TokenOutputs, batch: DataProto) -> LossSum:
        """Loss of the rows of a micro-batch, given what the model says of their response tokens."""
        ...


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the response tokens that the jagged column `response_mask` keeps, token mean."""

    @property
    def needs_entropy(self) -> bool:
        return False

    def count(self, batch: DataProto) -> float:
        return Aggregation().count(response_column(batch, "response_mask"), parts(batch.batch["responses"])[1])

    def is_needed(self, batch: DataProto) -> Tensor:
        return torch.ones(len(batch), dtype=torch.bool)

    def __call__(self, outputs: TokenOutputs, batch: DataProto) -> LossSum:
        mask_N, offsets = response_column(batch, "response_mask"), parts(batch.batch["responses"])[1]
        total, count = Aggregation().sum(-outputs.logprobs, mask_N, offsets), self.count(batch)
        return LossSum(total, count, {"loss": float(total.detach())})

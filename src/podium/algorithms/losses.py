"""Losses over response tokens: each returns a sum and a count, and states what it reads.

Legend: N response tokens of B rows, end to end, as in the jagged columns of the batch. A loss object is frozen and
picklable. It never divides: the engine divides by the count of the whole mini-batch over all ranks. The policy's loss is in
`policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from podium.algorithms.aggregation import Aggregation
from podium.algorithms.columns import response_column
from podium.errors import DataError
from podium.observability import Metrics
from podium.protocol import DataProto
from podium.protocol.jagged import parts

LOG_PROBS, ENTROPIES = "log_probs", "entropies"

Outputs: TypeAlias = Mapping[str, Tensor]
"""What the model's head gives for the response tokens of a micro-batch, by name; float32, or float64 from a model in float64.

`log_probs` [N]: of the tokens. `entropies` [N]: of the distributions that they were drawn from, in nats, after temperature. An
engine lists the names that it can give (`BaseEngine.outputs`), and gives those that the loss asks for.
"""


def output_of(outputs: Outputs, name: str) -> Tensor:
    """One of the outputs. DataError where the engine did not give it."""
    if name not in outputs:
        raise DataError(
            f"the loss reads the output {name!r} of the model, got {', '.join(outputs)}; list it in the loss's `outputs`"
        )
    return outputs[name]


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
    def reads(self) -> tuple[str, ...]:
        """The columns that it reads beside `input_ids` and `responses`; the trainer sends these and no others."""
        ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of the model that it reads, by name; the same on every rank."""
        ...

    @property
    def together(self) -> str | None:
        """A dense int64 column [B]: rows that have the same number there must be in one micro-batch, such as the two of a pair.

        The trainer puts such rows on the same rank; the engine keeps them in one micro-batch. None: any rows may be apart.
        """
        ...

    def count(self, batch: DataProto) -> float:
        """The denominator that these rows contribute, known before any forward pass. Padding rows are not among them."""
        ...

    def is_needed(self, batch: DataProto) -> Tensor:
        """[B] bool: rows that must be computed. The others have zero gradient; they still count."""
        ...

    def __call__(self, outputs: Outputs, batch: DataProto) -> LossSum:
        """Loss of the rows of a micro-batch, given what the model says of their response tokens."""
        ...


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the response tokens that the jagged column `response_mask` keeps, token mean."""

    @property
    def reads(self) -> tuple[str, ...]:
        return ("response_mask",)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (LOG_PROBS,)

    @property
    def together(self) -> str | None:
        return None

    def count(self, batch: DataProto) -> float:
        return Aggregation().count(response_column(batch, "response_mask"), parts(batch.batch["responses"])[1])

    def is_needed(self, batch: DataProto) -> Tensor:
        return torch.ones(len(batch), dtype=torch.bool)

    def __call__(self, outputs: Outputs, batch: DataProto) -> LossSum:
        mask_N, offsets = response_column(batch, "response_mask"), parts(batch.batch["responses"])[1]
        total, count = Aggregation().sum(-output_of(outputs, LOG_PROBS), mask_N, offsets), self.count(batch)
        return LossSum(total, count, {"loss": float(total.detach())})

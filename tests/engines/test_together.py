"""Losses that compare rows, and losses that read outputs which an engine does not give."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from podium.algorithms import LossSum, Outputs, SFTLoss
from podium.engines.micro_batch import plan_units
from podium.errors import DataError, EngineError
from podium.protocol import DataProto
from tests.engines.builders import batch_of, engine_of


@dataclass(frozen=True)
class Paired(SFTLoss):
    """SFT that keeps the numbers of the pairs of each micro-batch."""

    seen: list[list[int]] = field(default_factory=list)

    @property
    def together(self) -> str | None:
        return "pair"

    def __call__(self, outputs: Outputs, batch: DataProto) -> LossSum:
        self.seen.append(batch.batch["pair"].tolist())
        return super().__call__(outputs, batch)


class Valued(SFTLoss):
    @property
    def outputs(self) -> tuple[str, ...]:
        return ("log_probs", "values")


def test_rows_that_a_loss_compares_are_in_one_micro_batch_and_the_update_is_the_same() -> None:
    """Rows of 7, 2, 5, 5, 1 and 8 tokens, in pairs: a micro-batch of 16 tokens holds one pair."""
    batch, loss = batch_of(), Paired()
    batch.batch["pair"] = torch.tensor([4, 4, 9, 9, 6, 6])
    paired, plain = engine_of("llama", budget=16), engine_of("llama", budget=16)
    found, expected = paired.train_batch(batch, loss).to_floats(), plain.train_batch(batch, SFTLoss()).to_floats()
    assert sorted(map(sorted, loss.seen)) == [[4, 4], [6, 6], [9, 9]]
    assert {name: found[name] for name in ("loss", "grad_norm")} == pytest.approx(
        {name: expected[name] for name in ("loss", "grad_norm")}, rel=1e-10
    )


def test_units_share_a_micro_batch_as_far_as_its_tokens_reach() -> None:
    plan = plan_units([3, 3, 9, 2, 2, 9], [0, 0, 1, 2, 2, 1], max_tokens=18)
    assert [micro.rows.tolist() for micro in plan] == [[3, 4, 0, 1], [2, 5]]
    assert [micro.rows.tolist() for micro in plan_units([3, 9], [0, 1], max_tokens=None)] == [[0, 1]]
    with pytest.raises(DataError, match="rows 2, 5 must be in one micro-batch and have 2 x 9 tokens with padding"):
        plan_units([3, 3, 9, 2, 2, 9], [0, 0, 1, 2, 2, 1], max_tokens=17)


def test_a_column_of_pairs_that_is_missing_or_of_another_type_is_named() -> None:
    with pytest.raises(DataError, match="the loss keeps rows of one 'pair' together, which the batch does not have"):
        engine_of("llama").train_batch(batch_of(), Paired())
    batch = batch_of()
    batch.batch["pair"] = torch.zeros(6)
    with pytest.raises(DataError, match=r"column 'pair' must be int64 \[B\]"):
        engine_of("llama").train_batch(batch, Paired())


def test_a_loss_that_reads_an_output_which_the_engine_does_not_give_is_refused() -> None:
    with pytest.raises(
        EngineError, match="Valued reads the output 'values' of the model; FSDP2Engine gives log_probs, entropies"
    ):
        engine_of("llama").train_batch(batch_of(), Valued())

"""Padding rows are worth nothing in an engine: the same numbers with them and without, to the last bit."""

from __future__ import annotations

import pytest
import torch

from podium.algorithms import Loss, SFTLoss
from podium.errors import DataError
from podium.protocol import DataProto, pad_dataproto_to_divisor
from podium.protocol.jagged import jagged, lengths_of, parts
from tests.algorithms.builders import clipped
from tests.engines.builders import LOSS, batch_of, engine_of, largest_difference, model_of, state_of, weights_of
from tests.engines.test_policy_terms import AGGREGATIONS, TERMS, batch_with_ref

LOSSES: dict[str, list[Loss]] = {
    "sft": [SFTLoss()],
    **{
        mode: [clipped(0.1, 0.1, aggregation, **terms) for terms in TERMS.values()]  # type: ignore[arg-type]
        for mode, aggregation in AGGREGATIONS.items()
    },
}


def padded(batch: DataProto, divisor: int = 4) -> DataProto:
    return pad_dataproto_to_divisor(batch, divisor)[0]


def trained(batch: DataProto, loss: Loss, *, layout: str = "auto") -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    engine = engine_of("llama", budget=20, layout=layout)  # type: ignore[arg-type]
    return weights_of(engine), engine.train_batch(batch, loss).to_floats() | {"version": engine.version}


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_gives_the_same_step_with_and_without_padding(kind: str) -> None:
    """Weights, gradient norm and all metrics."""
    batch = batch_with_ref()
    for loss in LOSSES[kind]:
        (weights, metrics), (found, seen) = (trained(rows, loss) for rows in (batch, padded(batch)))
        assert seen == metrics
        assert largest_difference(found, weights) == 0.0


def test_padding_may_stand_anywhere_and_be_more_than_the_real_rows() -> None:
    batch = batch_of()
    expected = trained(batch, LOSS)[1]
    for rows in (padded(batch, 16), DataProto.concat([padded(batch[:3]), padded(batch[3:])])):
        assert trained(rows, LOSS)[1] == expected


def test_rows_of_one_to_five_tokens_have_the_gradient_of_real_rows_alone() -> None:
    batch = batch_of([(2, length) for length in range(1, 6)])
    batch.batch["response_mask"].values().fill_(1)
    alone, filled = (trained(rows, SFTLoss())[1] for rows in (batch, padded(batch)))
    assert filled == alone


def test_mini_batches_filled_up_with_padding_train_on_their_real_rows() -> None:
    short, filled = (
        [trained(rows, LOSS)[1] for rows in batch_of().make_iterator(4, 1, seed=0, last=last)]  # type: ignore[arg-type]
        for last in ("short", "pad")
    )
    assert short == filled


def test_a_mini_batch_of_padding_alone_changes_nothing() -> None:
    engine = engine_of("llama", weight_decay=0.1)
    engine.train_batch(batch_of(), LOSS)
    before, _ = state_of(engine)
    metrics = engine.train_batch(padded(batch_of())[6:], LOSS).to_floats()
    assert metrics["skipped_updates"] == 1.0
    assert largest_difference(before, state_of(engine)[0]) == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_probs_of_padding_rows_are_zero_and_those_of_real_rows_the_same(dtype: torch.dtype) -> None:
    expected = engine_of(model_of("llama", dtype)).infer_batch(batch_of()).batch["log_probs"]
    for rows in (padded(batch_of()), padded(batch_of())[[7, 0, 1, 2, 6, 3, 4, 5]], padded(batch_of())[6:]):
        found = engine_of(model_of("llama", dtype)).infer_batch(rows)
        assert found.batch["log_probs"].dtype == dtype
        assert found.padding_mask.tolist() == rows.padding_mask.tolist()
        assert torch.equal(lengths_of(found.batch["log_probs"]), lengths_of(rows.batch["responses"]))
        assert not parts(found[found.padding_mask].batch["log_probs"])[0].any()
        real = parts(found[~found.padding_mask].batch["log_probs"])[0]
        assert torch.equal(real, parts(expected)[0] if len(real) else real)


def test_an_error_names_the_row_of_the_batch_and_not_its_copy() -> None:
    """The last row has no prompt, nor has its copy, which stands in front."""
    rows = padded(batch_of([(2, 1), (1, 2), (0, 2)]))[[3, 0, 1, 2]]
    for call in (engine_of("llama").infer_batch, lambda batch: engine_of("llama").train_batch(batch, LOSS)):
        with pytest.raises(DataError, match=r"row 3 must have at least one prompt token .*, got 0"):
            call(rows)


def test_a_column_that_does_not_fit_is_named_by_its_row_in_the_batch() -> None:
    """Not by the row's place in a micro-batch, of which each holds one row here."""
    batch = batch_of([(2, 2)] * 4)
    batch.batch["old_log_probs"] = jagged(torch.zeros(8, dtype=torch.float64), torch.tensor([0, 2, 4, 5, 8]))
    with pytest.raises(DataError, match="row 2 of column 'old_log_probs' must have 2 tokens as in 'responses', got 1"):
        engine_of("llama", budget=4).train_batch(batch, LOSS)


def test_a_row_that_is_too_long_is_named_by_its_place_in_the_batch() -> None:
    """Rows before it are padding, or have no advantage and would not be computed."""
    rows = padded(batch_of([(2, 1), (1, 2), (4, 9), (1, 1)], advantages=[0.0, 0.0, 1.0, 1.0]), 5)[[4, 0, 1, 2, 3]]
    for call in (
        engine_of("llama", budget=12).infer_batch,
        lambda batch: engine_of("llama", budget=12).train_batch(batch, clipped(0.1, 0.1, drop_zero_advantage=True)),
    ):
        with pytest.raises(DataError, match="row 3 has 13 tokens, more than a micro-batch holds"):
            call(rows)

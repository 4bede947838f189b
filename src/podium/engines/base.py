"""What every training engine shares: a mini-batch in, one optimizer step out.

Here: micro-batches with equal rounds on every rank, the loss as a sum over one global count, metrics, row
order. A backend defines how a micro-batch goes through its model and how its ranks agree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from podium.algorithms import LOG_PROBS, Loss, LossSum, Outputs
from podium.engines.context import EngineContext
from podium.engines.micro_batch import LAYOUTS, Layout, MicroBatch, plan_units, unit_ids
from podium.errors import DataError, EngineError
from podium.models import RowLimit
from podium.observability import Last, Mean, Metrics, Sum
from podium.protocol import DataProto, marks_of_padding, without_padding
from podium.protocol.jagged import gather_index, jagged, lengths_of, parts

MAX_SKIPPED_UPDATES = 10
"""Updates in a row whose loss or gradient is not finite, after which the run ends."""


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did: the gradient norm before clipping, and whether the step was taken."""

    grad_norm: float
    lr: float
    is_skipped: bool


class BaseEngine(ABC):
    """A model that can be trained. `version` counts the optimizer steps that were asked for, skipped ones included.

    Batches carry the jagged int64 columns `input_ids` (a prompt of at least one token, and the response) and `responses`,
    both [B, *]. DataError names the first row without a prompt, whose first token would not be predicted. Padding rows
    (`DataProto.padding_mask`) are not computed and do not count.
    """

    @abstractmethod
    def __init__(self, context: EngineContext[Any]) -> None:
        """Build this rank's part of the model, and the optimizer if there is one."""

    outputs: ClassVar[tuple[str, ...]] = (LOG_PROBS,)
    """What the model's head gives for response tokens, by name; a loss may ask for these (`Loss.outputs`)."""
    device: torch.device = torch.device("cpu")
    version: int = 0
    dp_rank: int = 0
    dp_size: int = 1
    is_collect: bool = True
    row_limits: Sequence[RowLimit] = ()
    """Most tokens of a row: what a micro-batch holds, and what the model computes alike everywhere."""
    max_micro_tokens: int | None = None
    """Most tokens of a micro-batch, padding included; None where the backend has no limit."""
    layouts: Mapping[Layout, int] = dict.fromkeys(LAYOUTS, 0)
    """Rows of the last `infer_batch` that were computed in each layout."""
    _skipped_in_a_row: int = 0

    def train_batch(self, batch: DataProto, loss: Loss, *, temperature: float = 1.0) -> Metrics:
        """One optimizer step on a mini-batch (this rank's rows of it).

        The gradient is that of `sum / count` over the mini-batch of all ranks, for any micro-batches. A loss or a gradient that
        is not finite leaves parameters and optimizer as they are; EngineError after MAX_SKIPPED_UPDATES of them in a row. A
        mini-batch of count 0 is skipped too, but is not one of them.
        """
        self._check_outputs(loss)
        self._check_rows(batch)
        batch = without_padding(batch)
        count = self._sum_over_ranks(loss.count(batch))
        is_computed = loss.is_needed(batch)
        terms, metrics, seen = dict[str, float](), Metrics(), loss.count(batch[~is_computed])
        total = torch.zeros((), device=self.device)
        with self._training():
            for micro, rows in self._rounds(batch[is_computed], together=loss.together):
                part = self._accumulate(loss, micro, rows, temperature, denominator=count or 1.0)
                seen, total = seen + part.count, total + part.total
                terms = {name: terms.get(name, 0.0) + value for name, value in part.terms.items()}
                metrics = metrics.merge([part.metrics])
            seen = self._sum_over_ranks(seen if bool(total.isfinite()) else math.nan)  # one rank's NaN reaches all
            is_finite = not math.isnan(seen)
            if is_finite and not math.isclose(seen, count, rel_tol=1e-9):  # counts may be fractions: their order matters
                raise EngineError(
                    f"{type(loss).__name__}.count gives {count} for the mini-batch, but its micro-batches add up to {seen}"
                )
            step = self._optimizer_step(is_skipped=count == 0 or not is_finite)
        self._note(step, is_finite=is_finite)
        own_share = count / self.dp_size
        metrics = metrics.merge([Metrics({name: Mean(value, own_share) for name, value in terms.items()})])
        return metrics.merge([_step_metrics(step, self.dp_size)])

    def infer_batch(self, batch: DataProto, *, temperature: float = 1.0) -> DataProto:
        """Log-probs of the response tokens: a batch with the one jagged column `log_probs` [B, *], rows in order.

        float32, whatever the dtype of the model, but float64 for one in float64; 0 in padding rows, which stay marked.
        """
        self._check_rows(batch)
        is_padding_B = batch.padding_mask
        real = (~is_padding_B).nonzero().flatten()
        values, offsets = parts(batch.batch["responses"])
        logprobs_N, layouts = torch.zeros(len(values), dtype=torch.float32), dict.fromkeys(LAYOUTS, 0)
        with self._inferring():
            for micro, rows in self._rounds(without_padding(batch)):
                layouts[micro.layout] += len(rows)
                index, _ = gather_index(offsets, real[micro.rows])
                part_N = self._token_outputs(rows, micro, temperature, (LOG_PROBS,))[LOG_PROBS].cpu()
                logprobs_N = logprobs_N.to(part_N.dtype)
                logprobs_N[index] = part_N
        self.layouts = layouts
        return DataProto({"log_probs": jagged(logprobs_N, offsets)}, meta_info=marks_of_padding(is_padding_B))

    def _rounds(self, batch: DataProto, *, together: str | None = None) -> Iterator[tuple[MicroBatch, DataProto]]:
        """This rank's micro-batches, and empty ones until every rank has had its last: all make the same number of passes.

        At least one pass: with no gradient at all, unlike with a gradient of zero, the optimizer would not decay its moments.
        """
        micros = self._plan(batch) if together is None else self._plan_together(batch, together)
        num_empty = int(self._max_over_ranks(max(1, len(micros)))) - len(micros)
        for micro in [*micros, *[MicroBatch(torch.arange(0), "bucketed")] * num_empty]:
            yield micro, batch[micro.rows].to(self.device)

    def _accumulate(self, loss: Loss, micro: MicroBatch, rows: DataProto, temperature: float, *, denominator: float) -> LossSum:
        """Forward and backward of one micro-batch. The result has no graph, so that its memory is free for the next one."""
        part = loss(self._token_outputs(rows, micro, temperature, loss.outputs), rows)
        self._backward(part.total / denominator)
        return replace(part, total=part.total.detach())

    def _plan_together(self, batch: DataProto, column: str) -> list[MicroBatch]:
        """Micro-batches for a loss that compares rows: rows with the same number in the column are in one micro-batch."""
        lengths = lengths_of(batch.batch["input_ids"]).tolist()
        return plan_units(lengths, unit_ids(batch, column), max_tokens=self.max_micro_tokens)

    def _check_outputs(self, loss: Loss) -> None:
        if lacking := [name for name in loss.outputs if name not in self.outputs]:
            raise EngineError(
                f"{type(loss).__name__} reads the output {lacking[0]!r} of the model; {type(self).__name__} gives "
                f"{', '.join(self.outputs)}: use a loss that reads these, or another engine"
            )

    def _check_rows(self, batch: DataProto) -> None:
        """DataError by the row's number in the batch, before rows are left out or cut into micro-batches."""
        lengths_B = lengths_of(batch.batch["input_ids"])
        is_real_B = ~batch.padding_mask.to(lengths_B.device)
        prompt_lengths_B = lengths_B - lengths_of(batch.batch["responses"])
        for row in ((prompt_lengths_B < 1) & is_real_B).nonzero().flatten()[:1].tolist():
            raise DataError(
                f"row {row} must have at least one prompt token (input_ids minus responses), got "
                f"{int(prompt_lengths_B[row])}; begin the prompt with a beginning-of-sequence token"
            )
        for limit in self.row_limits:
            for row in ((lengths_B > limit.tokens) & is_real_B).nonzero().flatten()[:1].tolist():
                raise DataError(
                    f"row {row} has {int(lengths_B[row])} tokens, more than {limit.reason}; shorten prompts and responses"
                )

    def _note(self, step: StepResult, *, is_finite: bool) -> None:
        self.version += 1
        if not step.is_skipped:
            self._skipped_in_a_row = 0
        elif not (is_finite and math.isfinite(step.grad_norm)):
            self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_UPDATES:
            raise EngineError(
                f"in {MAX_SKIPPED_UPDATES} updates in a row the loss or the gradient was not finite (norm {step.grad_norm}); the "
                "parameters are those before the first of them. Lower the learning rate, or look at the rewards and the loss"
            )

    # -- what a backend provides --------------------------------------------------------------------------------------

    @abstractmethod
    def _plan(self, batch: DataProto) -> list[MicroBatch]:
        """Micro-batches of this rank's rows, all of them once; other ranks may have another number of them."""

    @abstractmethod
    def _token_outputs(self, rows: DataProto, micro: MicroBatch, temperature: float, names: Sequence[str]) -> Outputs:
        """These of `outputs`, of the rows' response tokens, end to end, with a graph where gradients are on.

        Without rows: none, but with the same collectives as any pass.
        """

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's part of the loss."""

    @abstractmethod
    def _optimizer_step(self, *, is_skipped: bool) -> StepResult:
        """Clip, step and advance the schedule; forget the gradients. Also skips a gradient that is not finite."""

    @abstractmethod
    def _sum_over_ranks(self, value: float) -> float:
        """The sum of a number over the data-parallel ranks, the same on each."""

    @abstractmethod
    def _max_over_ranks(self, value: float) -> float:
        """The largest of a number over the data-parallel ranks, the same on each."""

    @abstractmethod
    def _training(self) -> AbstractContextManager[None]:
        """With gradients, which are cleared on exit; noise only with `dropout`, seeded by (seed, rank, version)."""

    @abstractmethod
    def _inferring(self) -> AbstractContextManager[None]:
        """Evaluation mode without gradients. On exit the earlier mode is restored, since this may run inside `_training`."""

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """All parameters and buffers, whole, tied ones once. Every rank must exhaust it."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Everything that a resumed run needs: tensors (weights and optimizer) and numbers. Every rank must call it.

        Rank 0 alone has the tensors, whole for any number of ranks. They may be the engine's own, which the next step changes:
        copy or write them before it.
        """

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """Restore what rank 0's `state` gave. Every rank must call it; their number may differ from the one that saved.

        EngineError names what is missing or does not fit; then nothing is changed.
        """

    @abstractmethod
    def save_hf(self, path: str) -> None:
        """Write the model as a folder that `AutoModelForCausalLM.from_pretrained` loads. Every rank must call it."""


def _step_metrics(step: StepResult, dp_size: int) -> Metrics:
    """Every rank reports the same step, so each counts for its share."""
    kept = {} if step.is_skipped else {"grad_norm": Mean(step.grad_norm / dp_size, 1.0 / dp_size)}
    return Metrics({**kept, "lr": Last(step.lr), "skipped_updates": Sum(float(step.is_skipped) / dp_size)})

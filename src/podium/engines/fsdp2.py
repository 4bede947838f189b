"""The torch engine: any causal language model of transformers, trained with AdamW, sharded over the ranks with FSDP2."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from podium.algorithms import ENTROPIES, LOG_PROBS, Outputs, logprobs_and_entropies
from podium.config import FSDP2Config, OptimConfig
from podium.engines.base import BaseEngine, StepResult
from podium.engines.context import EngineContext
from podium.engines.device import is_out_of_memory, rng_devices
from podium.engines.layout_trials import (
    MASKED_LAYOUTS,
    LayoutTrials,
    LayoutUnsupported,
    MaskedLayout,
    Reach,
    max_sequence,
)
from podium.engines.layouts import ModelInput, bucketed, packed, shared
from podium.engines.micro_batch import (
    CostModel,
    MicroBatch,
    PlannedLayout,
    Prompts,
    longest_sequence,
    plan_micro_batches,
)
from podium.engines.precision import LowPrecisionCopies, prepare, sharding_policy
from podium.engines.ranks import DataParallelRanks, fill, sharded_like, whole
from podium.engines.schedule import lr_factor
from podium.errors import EngineError
from podium.models import RowLimit, row_limit, save_model
from podium.protocol import DataProto, whole_number
from podium.protocol.jagged import lengths_of, parts
from podium.weights import named_weights

logger = logging.getLogger(__name__)

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


class FSDP2Engine(BaseEngine):
    """A `PreTrainedModel`, its optimizer and its schedule; parameters, gradients and optimizer state spread over the ranks.

    The ranks are those of torch.distributed's default group, which must exist before the engine does; without one the
    engine is alone. Every rank must make the same calls. With `compute_dtype` forward and backward are in that dtype and all
    else in the parameters' own, but a forward-only model is rounded to it for good.
    """

    Settings = FSDP2Config
    outputs: ClassVar[tuple[str, ...]] = (LOG_PROBS, ENTROPIES)

    def __init__(self, context: EngineContext[FSDP2Config]) -> None:
        engine, optim, self.device = context.settings, context.optim, context.device
        model: PreTrainedModel = context.load_model()
        self.model: PreTrainedModel = model.to(self.device)  # type: ignore[arg-type] # transformers hides `to`'s signature
        self._ranks = DataParallelRanks(self.device)
        self.dp_rank, self.dp_size = self._ranks.rank, self._ranks.size
        dtype = prepare(self.model, engine.compute_dtype, is_trained=optim is not None)
        self._ranks.shard(self.model, set(getattr(model, "_no_split_modules", None) or ()), sharding_policy(model, dtype))
        self._low_copies = LowPrecisionCopies(model, dtype) if dtype is not None and not self._ranks.is_sharded else None
        self._config, self._optim_config, self._total_steps = engine, optim, context.total_steps
        self._seed, self._rank, self._dropout = whole_number("seed", context.seed), context.rank, context.dropout
        self._adamw = None if optim is None else _adamw(model, optim)
        if optim is None:
            model.requires_grad_(False)
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cost = CostModel.for_hidden(model.config.get_text_config().hidden_size)
        self._max_sequence, of_model = max_sequence(model), row_limit(model.config)
        most = engine.max_tokens_per_micro_batch
        held = RowLimit(most, f"a micro-batch holds (max_tokens_per_micro_batch={most}, which may be raised)")
        self.max_micro_tokens = most
        self.row_limits = (held, of_model) if of_model else (held,)
        self._trials = LayoutTrials(
            model.config.to_dict(),
            num_tokens=model.config.get_text_config().vocab_size,
            max_tokens=min(engine.max_tokens_per_micro_batch, self._max_sequence or engine.max_tokens_per_micro_batch),
            dtype=dtype or next(model.parameters()).dtype,
        )

    # -- micro-batches ------------------------------------------------------------------------------------------------

    def _plan(self, batch: DataProto) -> list[MicroBatch]:
        layout, lengths = self._config.layout, lengths_of(batch.batch["input_ids"]).tolist()
        prompts = _prompts(batch) if layout in ("auto", "shared") else None
        micros = self._plan_in(layout, lengths, prompts)
        if layout == "bucketed":
            return micros
        longest_row = int(self._ranks.max(max(lengths, default=0)))
        for masked in MASKED_LAYOUTS:
            sequence = int(self._ranks.max(longest_sequence(micros, masked, lengths, prompts)))
            if sequence and not self._trials.verdict(masked, Reach(longest_row, sequence), partial(self._try_layout, masked)):
                if layout == masked:
                    raise EngineError(f"{type(self.model).__name__} mixes rows in the layout {masked}; use layout=bucketed")
                if any(micro.layout == masked for micro in micros):
                    micros = self._plan_in("bucketed", lengths, None)
        return micros

    def _plan_in(self, layout: PlannedLayout, lengths: list[int], prompts: Prompts | None) -> list[MicroBatch]:
        return plan_micro_batches(
            lengths,
            max_tokens=self._config.max_tokens_per_micro_batch,
            layout=layout,
            cost=self._cost,
            prompts=prompts,
            max_sequence=self._max_sequence,
        )

    def _try_layout(self, layout: MaskedLayout, reach: Reach) -> bool:
        """Whether this model keeps rows apart in a layout on every rank: ranks must plan alike, or their collectives differ."""
        with self._inferring():
            try:
                is_exact = self._trials.try_out(layout, reach, self._trial_pass)
            except LayoutUnsupported as exc:
                logger.info("%s does not run in the layout %r: %s", type(self.model).__name__, layout, exc)
                return False
        return self._ranks.max(float(not is_exact)) == 0.0

    def _trial_pass(self, rows: DataProto, micro: MicroBatch) -> Tensor:
        """Log-probs of a trial's rows, or LayoutUnsupported on every rank where the pass fails on one.

        A failed allocation says nothing about the layout and is raised as it is.
        """
        found, failure = torch.empty(0), None
        try:
            found = self._log_probs(rows.to(self.device), micro)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as exc:
            if is_out_of_memory(exc):
                raise
            failure = exc
        if self._ranks.max(float(failure is not None)):
            raise LayoutUnsupported(failure or "the pass failed on another rank") from failure
        return found

    def _log_probs(self, rows: DataProto, micro: MicroBatch) -> Tensor:
        return self._token_outputs(rows, micro, 1.0, (LOG_PROBS,))[LOG_PROBS]

    def _token_outputs(self, rows: DataProto, micro: MicroBatch, temperature: float, names: Sequence[str]) -> Outputs:
        targets_N, _ = parts(rows.batch["responses"])
        logits_NV = self._row_logits(rows, micro) if len(rows) else self._forward_nothing()
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        if ENTROPIES in names:
            logprobs_N, entropies_N = logprobs_and_entropies(logits_NV, targets_N)
            return {LOG_PROBS: logprobs_N, ENTROPIES: entropies_N}
        return {LOG_PROBS: -functional.cross_entropy(logits_NV, targets_N, reduction="none")}

    def _row_logits(self, rows: DataProto, micro: MicroBatch) -> Tensor:
        columns = rows.batch["input_ids"], rows.batch["responses"]
        if micro.units is not None:
            return self._logits(shared(*columns, micro.units.to(self.device)))
        return self._logits(packed(*columns) if micro.layout == "packed" else bucketed(*columns))

    def _logits(self, inputs: ModelInput) -> Tensor:
        """[N, V] logits that predict the response tokens; other positions are not computed where the model allows it."""
        keep, column_N = dict[str, Tensor](), inputs.columns
        if self._takes_logits_to_keep and len(column_N):
            first, last = int(column_N.min()), int(column_N.max())
            keep, column_N = {"logits_to_keep": torch.arange(first, last + 1, device=self.device)}, column_N - first
        logits_SKV: Tensor = self.model(input_ids=inputs.input_ids, use_cache=False, **inputs.extra, **keep).logits
        return logits_SKV[inputs.sequences, column_N]

    def _forward_nothing(self) -> Tensor:
        """[0, V] logits, with a graph: a rank without rows takes part in the gathering of its peers' passes."""
        logits_11V: Tensor = self.model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device), use_cache=False
        ).logits
        return logits_11V[0, :0]

    # -- optimizer ----------------------------------------------------------------------------------------------------

    @property
    def _optimizer(self) -> torch.optim.AdamW:
        if self._adamw is None:
            raise EngineError("a forward-only engine (optim=None) has no optimizer: it cannot train, and has no state to save")
        return self._adamw

    def _backward(self, loss: Tensor) -> None:
        (loss * self.dp_size).backward()  # FSDP2 takes the mean over the ranks, the loss is a part of their sum

    def _optimizer_step(self, *, is_skipped: bool) -> StepResult:
        optim = self._optim_config
        assert optim is not None  # `_training` has refused
        lr = optim.lr * lr_factor(optim, self.version, self._total_steps)
        masters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        norm = float(whole(torch.nn.utils.clip_grad_norm_(masters, optim.clip_grad)))
        is_skipped = is_skipped or not math.isfinite(norm)
        if not is_skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        return StepResult(grad_norm=norm, lr=lr, is_skipped=is_skipped)

    def _sum_over_ranks(self, value: float) -> float:
        return self._ranks.sum(value)

    def _max_over_ranks(self, value: float) -> float:
        return self._ranks.max(value)

    @contextmanager
    def _training(self) -> Iterator[None]:
        self.model.train(self._dropout)  # evaluation mode is free of every noise that a model has, and has the same gradient
        self._optimizer.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=rng_devices(self.device)):
            # torch takes 64 bits of seed; any integer may be given as ours, a date for one
            torch.manual_seed(((self._seed * 1_000_003 + self._rank) * 1_000_003 + self.version) % 2**63)
            try:
                with self._computing():
                    yield
            finally:
                self._optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def _inferring(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self._computing():
                yield
        finally:
            self._ranks.reshard(self.model)
            self.model.train(was_training)

    def _computing(self) -> AbstractContextManager[None]:
        """The model in the dtype of its passes, where FSDP2 does not see to that."""
        return self._low_copies.in_place() if self._low_copies else nullcontext()

    # -- state --------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(tensor)) for name, tensor in named_weights(self.model))

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        pieces = chain(((f"model.{name}", tensor) for name, tensor in named_weights(self.model)), self._optimizer_state())
        gathered = ((name, whole(tensor)) for name, tensor in pieces)
        tensors = {name: tensor for name, tensor in gathered if self.dp_rank == 0}
        return tensors, {"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}

    def _optimizer_state(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{name}.{key}", value

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        weights = {f"model.{name}": tensor for name, tensor in named_weights(self.model)}
        self._check_saved(weights, tensors, numbers)
        for name, tensor in weights.items():
            fill(tensor, tensors[name])
        self._optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            if f"optimizer.{name}.step" in tensors:
                saved = {key: tensors[f"optimizer.{name}.{key}"] for key in ADAM_STATE}
                moments = {key: sharded_like(parameter, tensor) for key, tensor in saved.items() if key != "step"}
                self._optimizer.state[parameter] = {"step": saved["step"].to(self.device, copy=True), **moments}
        self.version, self._skipped_in_a_row = int(numbers["version"]), int(numbers["skipped_in_a_row"])

    def _check_saved(self, weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        """A parameter that never had a gradient has no optimizer state; any other has all of it."""
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        for name, parameter in self.model.named_parameters():
            if any(f"optimizer.{name}.{key}" in tensors for key in ADAM_STATE):
                shapes |= {f"optimizer.{name}.{key}": torch.Size() if key == "step" else parameter.shape for key in ADAM_STATE}
        missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
        missing += sorted({"version", "skipped_in_a_row"} - numbers.keys())
        if missing or unknown:
            raise EngineError(f"the saved model differs: missing {missing}, unknown {unknown}")
        for name, shape in shapes.items():
            if shape != tensors[name].shape:
                raise EngineError(f"{name} was saved as {list(tensors[name].shape)}, this model has {list(shape)}")

    def save_hf(self, path: str) -> None:
        weights = {name: tensor.cpu() for name, tensor in self.named_weights() if self.dp_rank == 0}
        if self.dp_rank == 0:
            save_model(self.model, path, {name: weights[name] for name in self.model.state_dict() if name in weights})


def _adamw(model: PreTrainedModel, optim: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True,
    )  # fmt: skip


def _prompts(batch: DataProto) -> Prompts:
    """Which rows begin with the same tokens."""
    values, offsets = parts(batch.batch["input_ids"])
    lengths = (offsets.diff() - lengths_of(batch.batch["responses"])).tolist()
    tokens, numbers = values.cpu().numpy(), dict[bytes, int]()
    beginnings = [tokens[start : start + length].tobytes() for start, length in zip(offsets.tolist(), lengths, strict=False)]
    return Prompts([numbers.setdefault(beginning, len(numbers)) for beginning in beginnings], lengths)

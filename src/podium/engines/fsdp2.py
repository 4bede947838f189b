"""The torch engine: any causal language model of transformers, trained with AdamW.

At world size 1, so far; sharding over ranks with FSDP2 goes behind this same class. Two layouts of a micro-batch: rows side
by side, padded on the right (causal attention never looks there, so no mask is needed), or end to end in one row with
restarting positions, from which transformers builds a block-diagonal mask.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from podium.config import EngineConfig, OptimConfig
from podium.engines.base import BaseEngine, StepResult
from podium.engines.device import rng_devices
from podium.engines.micro_batch import CostModel, MicroBatch, plan_micro_batches
from podium.engines.schedule import lr_factor
from podium.errors import EngineError
from podium.models import save_model
from podium.protocol import DataProto
from podium.protocol.jagged import lengths_of, parts, row_ids, to_padded
from podium.weights import named_weights

ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


class FSDP2Engine(BaseEngine):
    """A `PreTrainedModel` on one device, its optimizer and its schedule.

    `total_steps` is the number of optimizer steps after which a decaying schedule has ended; `seed` and `rank` key dropout.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        engine: EngineConfig,
        optim: OptimConfig,
        *,
        total_steps: int,
        seed: int,
        rank: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        self.model: PreTrainedModel = model.to(self.device)  # type: ignore[arg-type] # transformers hides `to`'s signature
        self._config, self._optim_config, self._total_steps = engine, optim, total_steps
        self._seed, self._rank = seed, rank
        self._optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay, fused=True,
        )  # fmt: skip
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cost = CostModel.for_hidden(model.config.get_text_config().hidden_size)
        self._can_pack: bool | None = None

    # -- micro-batches ------------------------------------------------------------------------------------------------

    def _plan(self, batch: DataProto) -> list[MicroBatch]:
        lengths = lengths_of(batch.batch["input_ids"]).tolist()
        budget, layout = self._config.max_tokens_per_micro_batch, self._config.layout
        micros = plan_micro_batches(lengths, max_tokens=budget, layout=layout, cost=self._cost)
        if not any(micro.layout == "packed" for micro in micros) or self._packing_is_exact():
            return micros
        if layout == "packed":
            raise EngineError(f"{type(self.model).__name__} mixes rows that are packed end to end; use layout=bucketed")
        return plan_micro_batches(lengths, max_tokens=budget, layout="bucketed", cost=self._cost)

    def _packing_is_exact(self) -> bool:
        """Whether this model keeps packed rows apart, tried once on two short rows: not every architecture does.

        The second row must give what it gives alone, within rounding, and must not see what the first one is: that shows to
        the last bit, even in a model whose rows mix so little that it could be taken for rounding.
        """
        if self._can_pack is None:
            ids, other_ids = (torch.tensor([row], device=self.device) for row in ([2, 3, 4, 5, 6, 7], [9, 1, 8, 5, 6, 7]))
            num_tokens = self.model.config.get_text_config().vocab_size
            positions = torch.tensor([[0, 1, 2, 0, 1, 2]], device=self.device)
            with self._inferring():
                alone = self.model(input_ids=ids[:, 3:] % num_tokens, use_cache=False).logits.float()
                packed, other = (
                    self.model(input_ids=both % num_tokens, position_ids=positions, use_cache=False).logits[:, 3:].float()
                    for both in (ids, other_ids)
                )
            mixed = float((packed - other).abs().max())
            self._can_pack = mixed <= 1e-5 * float(alone.abs().max()) and torch.allclose(alone, packed, rtol=1e-2, atol=1e-3)
        return self._can_pack

    def _logprobs(self, rows: DataProto, micro: MicroBatch, temperature: float) -> Tensor:
        targets_N, response_offsets = parts(rows.batch["responses"])
        forward = self._forward_packed if micro.layout == "packed" else self._forward_bucketed
        logits_NV = forward(rows.batch["input_ids"], response_offsets)
        logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        if temperature != 1.0:
            logits_NV = logits_NV / temperature
        return -functional.cross_entropy(logits_NV, targets_N, reduction="none")

    def _forward_bucketed(self, input_ids: Tensor, response_offsets: Tensor) -> Tensor:
        """[N, V] logits that predict the response tokens, from rows side by side."""
        lengths_B, responses_B = lengths_of(input_ids), response_offsets.diff()
        ids_BT = to_padded(input_ids)
        first = int((lengths_B - responses_B).min()) - 1
        keep = {"logits_to_keep": torch.arange(first, ids_BT.shape[1], device=self.device)} if self._takes_logits_to_keep else {}
        logits_BKV: Tensor = self.model(input_ids=ids_BT, use_cache=False, **keep).logits
        first = first if keep else 0
        row_N = row_ids(response_offsets)
        starts_B = lengths_B - responses_B - 1 - first - response_offsets[:-1]
        column_N = starts_B[row_N] + torch.arange(len(row_N), device=self.device)
        return logits_BKV[row_N, column_N]

    def _forward_packed(self, input_ids: Tensor, response_offsets: Tensor) -> Tensor:
        """[N, V] logits that predict the response tokens, from rows end to end."""
        ids_T, offsets = parts(input_ids)
        positions_T = torch.arange(len(ids_T), device=self.device) - offsets[row_ids(offsets)]
        row_N = row_ids(response_offsets)
        starts_B = offsets[1:] - response_offsets.diff() - 1 - response_offsets[:-1]
        column_N = starts_B[row_N] + torch.arange(len(row_N), device=self.device)
        keep = {"logits_to_keep": column_N} if self._takes_logits_to_keep else {}
        logits_KV: Tensor = self.model(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, **keep).logits[0]
        return logits_KV if keep else logits_KV[column_N]

    # -- optimizer ----------------------------------------------------------------------------------------------------

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _optimizer_step(self, *, is_empty: bool) -> StepResult:
        lr = self._optim_config.lr * lr_factor(self._optim_config, self.version, self._total_steps)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._optim_config.clip_grad))
        is_skipped = is_empty or not math.isfinite(norm)
        if not is_skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        return StepResult(grad_norm=norm, lr=lr, is_skipped=is_skipped)

    def _sum_over_ranks(self, value: float) -> float:
        return value

    @contextmanager
    def _training(self) -> Iterator[None]:
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=rng_devices(self.device)):
            # torch takes 64 bits of seed; any integer may be given as ours, a date for one
            torch.manual_seed(((self._seed * 1_000_003 + self._rank) * 1_000_003 + self.version) % 2**63)
            try:
                yield
            finally:
                self._optimizer.zero_grad(set_to_none=True)

    @contextmanager
    def _inferring(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)

    # -- state --------------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return named_weights(self.model)

    def state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        tensors = {f"model.{name}": tensor for name, tensor in self.named_weights()}
        for name, parameter in self.model.named_parameters():
            tensors |= {f"optimizer.{name}.{key}": value for key, value in self._optimizer.state.get(parameter, {}).items()}
        return tensors, {"version": self.version, "skipped_in_a_row": self._skipped_in_a_row}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, float]) -> None:
        weights = {f"model.{name}": tensor for name, tensor in self.named_weights()}
        self._check_saved(weights, tensors, numbers)
        for name, tensor in weights.items():
            tensor.copy_(tensors[name])
        self._optimizer.state.clear()
        for name, parameter in self.model.named_parameters():
            if f"optimizer.{name}.step" in tensors:
                saved = {key: tensors[f"optimizer.{name}.{key}"] for key in ADAM_STATE}
                self._optimizer.state[parameter] = {key: tensor.to(self.device, copy=True) for key, tensor in saved.items()}
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
        save_model(self.model, path)

"""`TrainingWorker`: a model that the driver trains and evaluates, one engine a rank."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from podium.algorithms import Loss
from podium.checkpoint import WrittenFiles, load_state, save_state
from podium.config import EngineConfig, ModelConfig, OptimConfig
from podium.engines import BaseEngine, EngineContext, pick_device
from podium.errors import CheckpointError, DataError, EngineError
from podium.models import load_tokenizer
from podium.observability import Last, Metrics
from podium.parts import ENGINES
from podium.protocol import DataProto, Field, check_fields
from podium.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from podium.workers.fields import FIELDS

STATE_NAME = "train"
"""Of the two files in a checkpoint that hold the engine's state, whole, so that any number of ranks can load it."""

TOKEN_COLUMNS = ("input_ids", "responses")
"""What every method that computes reads; a loss reads more, and says so itself where it lacks something."""

TRAIN_MESH = make_nd_compute_dataproto_dispatch_fn("train")


@dataclass(frozen=True)
class TrainingSpec:
    """What a training worker is built from; `total_steps` counts optimizer steps and ends the schedule.

    Without `optim` it is forward only; `dropout` keeps the model's own noise in training passes.
    """

    model: ModelConfig
    engine: EngineConfig
    optim: OptimConfig | None
    total_steps: int
    seed: int
    dropout: bool = False


class TrainingWorker(Worker):
    """Training and inference of one model.

    Batches are those of `BaseEngine`; `temperature` in their meta (default 1.0) divides the logits. Methods that train answer
    with a batch of no rows whose meta holds `metrics`.
    """

    def __init__(self, spec: TrainingSpec, model: PreTrainedModel | None = None) -> None:
        """`model` is for an outer worker that has loaded it already."""
        self.spec = spec
        device = pick_device()
        if self.world_size > 1:
            self.init_process_group()
        context = EngineContext(
            model=spec.model,
            settings=spec.engine,
            optim=spec.optim,
            total_steps=spec.total_steps,
            seed=spec.seed,
            dropout=spec.dropout,
            rank=self.rank,
            world_size=self.world_size,
            device=device,
            loader=None if model is None else lambda: model,
        )
        self.engine: BaseEngine = ENGINES.resolve(spec.engine.name, spec.engine.source)(context)
        self._loss: Loss | None = None
        self._register_dispatch_collect_info("train", self.engine.dp_rank, self.engine.is_collect)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_loss_fn(self, loss: Loss) -> None:
        """The loss of `train_batch` and `train_mini_batch`; must be picklable."""
        self._loss = loss

    @register(dispatch_mode=TRAIN_MESH, reads=TOKEN_COLUMNS, writes=[])
    def train_batch(self, batch: DataProto) -> DataProto:
        """One optimizer step on the whole batch."""
        check_fields(batch, _fields(*TOKEN_COLUMNS))
        return _as_batch(self._step(batch))

    @register(dispatch_mode=TRAIN_MESH, reads=[*TOKEN_COLUMNS, "mini_batch"], writes=[])
    def train_mini_batch(self, batch: DataProto) -> DataProto:
        """One optimizer step per mini-batch, epoch after epoch.

        The dense int64 column `mini_batch` [B, epochs] says to which mini-batch a row belongs in each epoch, and
        `num_mini_batches` in the meta how many there are; so every rank takes part in each, with no rows if need be.
        """
        check_fields(batch, _fields(*TOKEN_COLUMNS, "mini_batch"))
        assignments = batch.pop(["mini_batch"]).batch["mini_batch"]
        metrics = Metrics()
        for epoch in range(assignments.shape[1]):
            for number in range(batch.meta_info["num_mini_batches"]):
                metrics = metrics.merge([self._step(batch[assignments[:, epoch] == number])])
        return _as_batch(metrics)

    @register(dispatch_mode=TRAIN_MESH, reads=TOKEN_COLUMNS, writes=["log_probs"])
    def infer_batch(self, batch: DataProto) -> DataProto:
        """Log-probs of the response tokens: jagged `log_probs` [B, *] float32, or float64 for a model in float64."""
        check_fields(batch, _fields(*TOKEN_COLUMNS))
        return self.engine.infer_batch(batch, temperature=_temperature(batch))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> WrittenFiles:
        """Write what a resumed run needs into the existing folder `local_path`; the list of what this rank wrote there."""
        folder = self._folder(local_path)
        tensors, numbers = self.engine.state()
        if self.rank == 0:
            save_state(folder / STATE_NAME, tensors, numbers)
        return self._written(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Take back what `save_checkpoint` wrote."""
        tensors, numbers = load_state(Path(local_path) / STATE_NAME)
        self.engine.load_state(tensors, _numbers(numbers))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, local_path: str) -> WrittenFiles:
        """Write model and tokenizer into the existing folder `local_path`, which `from_pretrained` loads then; the list of what
        this rank wrote there."""
        folder = self._folder(local_path)
        self.engine.save_hf(local_path)
        if self.rank == 0:
            load_tokenizer(self.spec.model).save_pretrained(local_path)
        return self._written(folder)

    def _folder(self, local_path: str) -> Path:
        """CheckpointError where this rank writes and does not see the folder: to make one would hide the files on this node."""
        folder = Path(local_path)
        if self.rank == 0 and not folder.is_dir():
            raise CheckpointError(
                f"{self._name} does not see the folder {folder}, into which it should write: use a folder that all nodes share"
            )
        return folder

    def _written(self, folder: Path) -> WrittenFiles:
        return WrittenFiles.of(folder, self._name, None if self.rank == 0 else ())

    @property
    def _name(self) -> str:
        return f"rank {self.rank} on {platform.node()}"

    def _step(self, batch: DataProto) -> Metrics:
        if self._loss is None:
            raise EngineError("no loss is set: call set_loss_fn(...) before training")
        return self.engine.train_batch(batch, self._loss, temperature=_temperature(batch))


def _fields(*names: str) -> list[Field]:
    return [FIELDS[name] for name in names]


def _temperature(batch: DataProto) -> float:
    temperature = batch.meta_info.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or temperature <= 0:
        raise DataError(f"meta 'temperature' must be a positive number, got {temperature!r}")
    return float(temperature)


def _as_batch(metrics: Metrics) -> DataProto:
    """Metrics travel as meta; the thread count is one of them, since bits depend on it."""
    return DataProto(meta_info={"metrics": metrics.merge([{"threads_per_rank": Last(torch.get_num_threads())}])})


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}

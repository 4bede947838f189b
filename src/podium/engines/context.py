"""`EngineContext`: what a training engine is constructed from, the same for engines of ours and of users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from transformers import PreTrainedModel

from podium.config import EngineConfig, ModelConfig, OptimConfig
from podium.models import load_model

C = TypeVar("C", bound=EngineConfig)


@dataclass(frozen=True)
class EngineContext(Generic[C]):
    """One rank's view of the model that it helps to train. Further fields may be added; an engine reads those that it needs."""

    model: ModelConfig
    settings: C
    """An object of the engine's own settings class."""
    optim: OptimConfig | None
    """None for an engine that only computes log-probs: parameters take no gradient, and training and state are EngineErrors."""
    total_steps: int
    """Optimizer steps of the whole run, after which a decaying schedule has ended."""
    seed: int
    """Keys a model with fresh weights, and together with the rank the noise of training passes."""
    dropout: bool = False
    """Whether training passes have the model's own noise (dropout, layer drop, router jitter); otherwise they compute what
    inference computes."""
    rank: int = 0
    """This rank's number among `world_size`. torch.distributed's default group exists where there are several."""
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    loader: Callable[[], PreTrainedModel] | None = None
    """Stands in for the model's files, where a caller has the model already."""

    def load_model(self) -> PreTrainedModel:
        """The whole model, on the CPU or on `device`; the engine owns it from then on. Call it once."""
        return self.loader() if self.loader is not None else load_model(self.model, seed=self.seed)

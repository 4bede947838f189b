"""`RolloutContext`: what a rollout engine is constructed from, the same for engines of ours and of users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from podium.config import ModelConfig, RolloutConfig
from podium.models import load_model

C = TypeVar("C", bound=RolloutConfig)


@dataclass(frozen=True)
class RolloutContext(Generic[C]):
    """One rank's view of the model that it generates with. Further fields may be added; an engine reads those that it needs."""

    model: ModelConfig
    settings: C
    """An object of the engine's own settings class."""
    tokenizer: PreTrainedTokenizerBase
    seed: int
    """Keys a model with fresh weights; `generate` is given its own seed."""
    rank: int = 0
    """This rank's number among `world_size`. Each rank answers its own prompts."""
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    loader: Callable[[], PreTrainedModel] | None = None
    """Stands in for the model's files, where a caller has the model already."""

    def load_model(self) -> PreTrainedModel:
        """The whole model, on the CPU or on `device`; the engine owns it from then on. Call it once.

        Its weights are those that the run starts from. The engine has no version of weights before `update_weights`.
        """
        return self.loader() if self.loader is not None else load_model(self.model, seed=self.seed)

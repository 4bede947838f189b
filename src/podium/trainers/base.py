"""What every trainer offers to `launch`: its dataflow, the groups that it needs, and its loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from podium.config import ModelConfig, RunConfig
from podium.tasks import Scorer, Task
from podium.trainers.dataflow import Step
from podium.trainers.roles import GroupPlan, Groups
from podium.trainers.session import Session


@dataclass(frozen=True)
class TrainerContext:
    """What a trainer is built from."""

    config: RunConfig
    groups: Groups
    task: Task
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    session: Session


class Trainer(ABC):
    """A loop of the driver over the groups of a run. A subclass takes a `TrainerContext`."""

    def __init__(self, context: TrainerContext) -> None:
        self.context = context

    @staticmethod
    @abstractmethod
    def dataflow(config: RunConfig) -> list[Step]:
        """The steps of `fit` in order, as the settings make them; checked before anything starts."""

    @staticmethod
    @abstractmethod
    def plans(config: RunConfig, model: ModelConfig) -> list[GroupPlan]:
        """The groups that it needs, when training starts from `model`."""

    @abstractmethod
    def fit(self) -> None:
        """From the newest checkpoint, or from the start, through all steps."""

    @abstractmethod
    def finish(self) -> None:
        """After the last step: the final scores, and the model in `hf/` of the run directory."""

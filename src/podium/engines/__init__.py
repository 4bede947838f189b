"""Training a model: one contract, several backends."""

from podium.engines.base import BaseEngine, StepResult
from podium.engines.device import collective_backend, pick_device
from podium.engines.registry import EngineRegistry

__all__ = ["BaseEngine", "EngineRegistry", "StepResult", "collective_backend", "pick_device"]

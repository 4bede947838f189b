"""Training a model: one contract, several backends; and the devices that it runs on."""

from podium.engines.base import BaseEngine, StepResult
from podium.engines.context import EngineContext
from podium.engines.device import (
    get_device_name,
    get_nccl_backend,
    get_torch_device,
    get_visible_devices_keyword,
    pick_device,
)
from podium.engines.numa import set_numa_affinity

__all__ = [
    "BaseEngine",
    "EngineContext",
    "StepResult",
    "get_device_name",
    "get_nccl_backend",
    "get_torch_device",
    "get_visible_devices_keyword",
    "pick_device",
    "set_numa_affinity",
]

"""Every setting of a run: the schema, reading it, and its arithmetic."""

from podium.config.arithmetic import check, explain, optimizer_steps_per_step, rows_per_step, total_optimizer_steps
from podium.config.base import Json, Settings
from podium.config.load import read_yaml, resolve, settings_called, to_yaml
from podium.config.parts import PartOf, PartSettings, part_sections, sources_of, with_absolute_names
from podium.config.reading import write_value
from podium.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    EngineConfig,
    FSDP2Config,
    HFRolloutConfig,
    ModelConfig,
    OptimConfig,
    ProfilerConfig,
    RefConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrackerConfig,
    TrainerConfig,
    WarmupConfig,
)

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "EngineConfig",
    "FSDP2Config",
    "HFRolloutConfig",
    "Json",
    "ModelConfig",
    "OptimConfig",
    "PartOf",
    "PartSettings",
    "ProfilerConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "Settings",
    "TaskConfig",
    "TrackerConfig",
    "TrainerConfig",
    "WarmupConfig",
    "check",
    "explain",
    "optimizer_steps_per_step",
    "part_sections",
    "read_yaml",
    "resolve",
    "rows_per_step",
    "settings_called",
    "sources_of",
    "to_yaml",
    "total_optimizer_steps",
    "with_absolute_names",
    "write_value",
]

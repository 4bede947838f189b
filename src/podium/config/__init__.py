"""Every setting of a run: the schema, reading it, and its arithmetic."""

from podium.config.arithmetic import check, explain, optimizer_steps_per_step, rows_per_step, total_optimizer_steps
from podium.config.load import read_yaml, resolve, settings_called, to_yaml
from podium.config.reading import write_value
from podium.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    ProfilerConfig,
    RefConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    Settings,
    TaskConfig,
    TrainerConfig,
    WarmupConfig,
)

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "EngineConfig",
    "ModelConfig",
    "OptimConfig",
    "ProfilerConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "Settings",
    "TaskConfig",
    "TrainerConfig",
    "WarmupConfig",
    "check",
    "explain",
    "optimizer_steps_per_step",
    "read_yaml",
    "resolve",
    "rows_per_step",
    "settings_called",
    "to_yaml",
    "total_optimizer_steps",
    "write_value",
]

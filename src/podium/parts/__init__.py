"""Parts that a user may replace, each chosen by one string: how a string becomes a class or a function."""

from podium.parts.source import SourceFile, Sources
from podium.parts.stored import edited, read_sources, write_sources
from podium.parts.table import PartTable, Row, split_name
from podium.parts.tables import ADVANTAGE_ESTIMATORS, ENGINES, POLICY_LOSSES, REWARDS, ROLLOUTS, TASKS, TRACKERS, TRAINERS

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "ENGINES",
    "POLICY_LOSSES",
    "REWARDS",
    "ROLLOUTS",
    "TASKS",
    "TRACKERS",
    "TRAINERS",
    "PartTable",
    "Row",
    "SourceFile",
    "Sources",
    "edited",
    "read_sources",
    "split_name",
    "write_sources",
]

"""The roles of a run and the worker groups that play them: which roles a trainer needs, which share processes, in which pool.

Roles that share processes have one group. Today all groups are in `global_pool`, which takes all ranks of the run; a group with
nodes of its own will be one more pool in `placing.pools` and one more `GroupPlan`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from podium.checkpoint import Saver, load_roles, save_roles
from podium.config import ModelConfig, RunConfig
from podium.errors import ConfigError
from podium.single_controller import Init, Worker, WorkerGroup
from podium.trainers.node_setup import ModelFiles, NodeSetup, SharedFolder
from podium.trainers.placing import GLOBAL_POOL, start_group

W = TypeVar("W", bound=Worker)


class Groups:
    """The worker groups of a run, by role."""

    def __init__(self, groups: Mapping[str, WorkerGroup[Any]], *, saved: Sequence[str] = ()) -> None:
        """`saved`: the roles whose state a checkpoint keeps; the others are built from their models again."""
        self._groups = dict(groups)
        self._saved = tuple(saved)

    def __getitem__(self, role: str) -> WorkerGroup[Any]:
        if role not in self._groups:
            raise ConfigError(f"this run does not have the role {role!r}; it has {', '.join(self._groups)}")
        return self._groups[role]

    def __contains__(self, role: object) -> bool:
        return role in self._groups

    def of(self, role: str, kind: type[W]) -> WorkerGroup[W]:
        """The group of a role, with the typed calls of its workers' class."""
        group: WorkerGroup[W] = self[role]
        return group

    def distinct(self) -> list[WorkerGroup[Any]]:
        """Each group once, however many roles share it."""
        return list({id(group): group for group in self._groups.values()}.values())

    def is_busy(self) -> bool:
        """Whether any group is still at a call."""
        return any(group.status().calls for group in self.distinct())

    @property
    def save(self) -> Saver:
        """Writes a checkpoint: a folder for each saved role."""
        return save_roles({role: self[role].call.save_checkpoint for role in self._saved})

    def load(self, checkpoint: Path) -> None:
        """Take back what `save` wrote."""
        load_roles({role: self[role].call.load_checkpoint for role in self._saved}, checkpoint)


@dataclass(frozen=True)
class GroupPlan:
    """One group that a trainer asks for."""

    name: str
    roles: tuple[str, ...]
    """That its processes play."""
    init: Init[Any]
    models: Mapping[str, ModelConfig]
    """What it reads, by the setting that names the model; each node is asked whether it has them."""
    saved: tuple[str, ...] = ("actor",)
    """Of its roles, those with a state that checkpoints keep."""
    pool: str = GLOBAL_POOL


@contextmanager
def started(config: RunConfig, plans: Sequence[GroupPlan], folder: SharedFolder | None = None) -> Iterator[Groups]:
    """The groups of the plans, each in its pool, until the end of the block."""
    with ExitStack() as stack:
        groups: dict[str, WorkerGroup[Any]] = {}
        for plan in plans:
            files = tuple(ModelFiles.of(setting, model) for setting, model in plan.models.items())
            group = start_group(config, plan.init, plan.name, NodeSetup(files, folder), pool=plan.pool)
            stack.enter_context(group)
            groups |= dict.fromkeys(plan.roles, group)
        yield Groups(groups, saved=[role for plan in plans for role in plan.saved])

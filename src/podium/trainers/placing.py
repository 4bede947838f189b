"""The group of a run's workers: where its ranks go by the settings, and what is wrong with these where there is no room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

from podium.config import RunConfig
from podium.errors import NoRoomError, ResourceError
from podium.runtimes import capabilities_of
from podium.single_controller import Init, ResourcePool, Worker, WorkerGroup
from podium.trainers.node_setup import NodeSetup
from podium.trainers.threads import threads_per_rank

W = TypeVar("W", bound=Worker)

GLOBAL_POOL: Final = "global_pool"
"""The pool of all ranks of a run."""


def pools(config: RunConfig) -> dict[str, ResourcePool]:
    """The pools of a run, by name."""
    return {GLOBAL_POOL: ResourcePool([config.ranks_per_node] * config.nodes, use_gpu=config.use_gpu)}


def start_group(config: RunConfig, init: Init[W], name: str, setup: NodeSetup, *, pool: str = GLOBAL_POOL) -> WorkerGroup[W]:
    """A group of a run on the nodes of its pool. ResourceError, in the words of the settings, where they have no room, or where
    a node is not as `setup` wants it."""
    try:
        return WorkerGroup(
            pools(config)[pool],
            init,
            runtime=config.runtime_name,
            name=name,
            threads_per_rank=threads_per_rank(config),
            call_timeout_s=config.call_timeout_s if capabilities_of(config.runtime_name).timeouts else None,
            start_timeout_s=config.start_timeout_s,
            worker_env=config.worker_env,
            node_setup=setup,
        )
    except NoRoomError as error:
        raise ResourceError(no_room(config, error)) from error


def no_room(config: RunConfig, error: NoRoomError) -> str:
    """The error in the words of the settings, with what to change."""
    asked = f"num_workers={config.num_workers} on nodes={config.nodes}"
    wanted = f"{asked} is {config.ranks_per_node} rank(s) on each node, and each takes {error.need}; that does not fit:"
    return "\n".join([wanted, error.table, *(f"- {line}" for line in _remedies(config, error))])


def _remedies(config: RunConfig, error: NoRoomError) -> list[str]:
    lines = []
    if holds(error.total, config.num_workers, config.nodes):
        lines.append("it fits once other programs give back what they hold: wait for them, or end them")
    elif nodes := next((n for n in range(2, len(error.total) + 1) if holds(error.total, config.num_workers, n)), None):
        lines.append(f"nodes={nodes} puts {config.num_workers // nodes} rank(s) on each of {nodes} nodes")
    if room := max((n for n in range(1, config.num_workers) if holds(error.free, n, config.nodes)), default=0):
        lines.append(f"num_workers={room} is the most that fits on nodes={config.nodes} now")
    if "GPU" in error.scarce:
        lines.append("use_gpu=false runs the ranks on CPUs")
    if "CPU" in error.scarce:
        lines.append("a rank counts as one logical CPU of Ray: start the cluster with a larger num_cpus")
    return lines or ["start more nodes, or lower num_workers"]


def holds(rooms: Sequence[int], num_workers: int, nodes: int) -> bool:
    """Whether nodes with room for so many ranks each can hold equal shares of `num_workers`, perhaps several on one node.

    >>> holds([8, 8, 8, 8], 32, 4), holds([8, 8, 8, 8], 32, 1), holds([8, 8], 9, 2)
    (True, False, False)
    """
    return num_workers % nodes == 0 and sum(room // (num_workers // nodes) for room in rooms) >= nodes

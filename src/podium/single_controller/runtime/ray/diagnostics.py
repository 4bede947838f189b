"""Diagnostics of ranks on any node: each node is asked by a task of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from podium.single_controller.runtime.diagnostics import Diagnostics, diagnose
from podium.single_controller.runtime.ray.actor import Place
from podium.single_controller.runtime.ray.cluster import here

DIAGNOSTICS_TIMEOUT_S = 20.0
"""How long other nodes may take to answer: a process has to start there."""


def diagnostics_by_node(places: Mapping[str, Sequence[Place]], stacks: bool) -> dict[str, list[Diagnostics]]:
    """Of the ranks at these places, by node. All nodes are asked at once, and together they have `DIAGNOSTICS_TIMEOUT_S`."""
    ours = here()
    if ours is None:  # a task would start another cluster
        return {node_id: [_unknown(place, "Ray was shut down") for place in group] for node_id, group in places.items()}
    asked = {node_id: _ask_node(node_id, group, stacks) for node_id, group in places.items() if node_id != ours}
    found = {node_id: diagnose(*_probes(group), stacks) for node_id, group in places.items() if node_id == ours}
    give_up = time.monotonic() + DIAGNOSTICS_TIMEOUT_S
    for node_id, ref in asked.items():
        try:
            found[node_id] = ray.get(ref, timeout=max(0.0, give_up - time.monotonic()))
        except (RayError, TimeoutError) as error:  # the node is gone, or does not answer
            found[node_id] = [_unknown(place, str(error)) for place in places[node_id]]
    return found


def _probes(places: Sequence[Place]) -> tuple[str, list[Any]]:
    return places[0].node, [place.probe for place in places]


def _unknown(place: Place, why: str) -> Diagnostics:
    return Diagnostics(place.node, place.probe.pid, False, f"node {place.node} cannot be asked: {why}")


def _ask_node(node_id: str, places: Sequence[Place], stacks: bool) -> Any:
    task: Any = ray.remote(diagnose)
    on_node = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return task.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node).remote(*_probes(places), stacks)

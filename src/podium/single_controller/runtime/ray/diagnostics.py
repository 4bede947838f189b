"""Looking at ranks from outside, each from its own node, however stuck or dead it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from podium.single_controller.runtime import process_probe
from podium.single_controller.runtime.base import Diagnostics
from podium.single_controller.runtime.ray.actor import Place
from podium.single_controller.runtime.ray.cluster import here

DIAGNOSTICS_TIMEOUT_S = 20.0
"""How long a look at ranks of other nodes may take: a process has to start there."""
LOOKS_AT_ONCE = 32
"""Ranks of a node that are looked at at the same time."""


def diagnose(places: Sequence[Place], stacks: bool) -> list[Diagnostics]:
    """What can be seen of these processes from their own node; in threads, since a stuck one takes a second to look at."""
    with ThreadPoolExecutor(min(len(places), LOOKS_AT_ONCE)) as threads:
        return list(threads.map(lambda place: _diagnose(place, stacks), places))


def _diagnose(place: Place, stacks: bool) -> Diagnostics:
    is_alive = process_probe.is_alive(place.probe)
    where = (
        process_probe.take_stacks(place.probe)
        if is_alive and stacks
        else ""
        if is_alive
        else process_probe.fatal_trace(place.probe)
    )
    return Diagnostics(place.node, place.pid, is_alive, process_probe.last_lines(place.probe), where)


def diagnostics_by_node(places: Mapping[str, Sequence[Place]], stacks: bool) -> dict[str, list[Diagnostics]]:
    """All nodes are asked at once, and together they have `DIAGNOSTICS_TIMEOUT_S`."""
    ours = here()
    if ours is None:  # a task would start another cluster
        return {node_id: [_unknown(place, "Ray was shut down") for place in group] for node_id, group in places.items()}
    asked = {node_id: _ask_node(node_id, group, stacks) for node_id, group in places.items() if node_id != ours}
    told = {node_id: diagnose(group, stacks) for node_id, group in places.items() if node_id == ours}
    give_up = time.monotonic() + DIAGNOSTICS_TIMEOUT_S
    for node_id, ref in asked.items():
        try:
            told[node_id] = ray.get(ref, timeout=max(0.0, give_up - time.monotonic()))
        except (RayError, TimeoutError) as error:  # the node is gone, or does not answer
            told[node_id] = [_unknown(place, str(error)) for place in places[node_id]]
    return told


def _unknown(place: Place, why: str) -> Diagnostics:
    return Diagnostics(place.node, place.pid, False, f"node {place.node} cannot be asked: {why}")


def _ask_node(node_id: str, places: Sequence[Place], stacks: bool) -> Any:
    look: Any = ray.remote(diagnose)
    pinned = look.options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
    return pinned.remote(places, stacks)

"""Looking at ranks from outside, each from its own node, however stuck or dead it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from podium.single_controller.runtime import witness
from podium.single_controller.runtime.base import Testimony
from podium.single_controller.runtime.ray.actor import Place
from podium.single_controller.runtime.ray.cluster import here

TESTIMONY_TIMEOUT_S = 20.0
"""How long a look at ranks of other nodes may take: a process has to start there."""
LOOKS_AT_ONCE = 32
"""Ranks of a node that are looked at at the same time."""


def testify(places: Sequence[Place], stacks: bool) -> list[Testimony]:
    """What can be seen of these processes from their own node; in threads, since a stuck one takes a second to look at."""
    with ThreadPoolExecutor(min(len(places), LOOKS_AT_ONCE)) as threads:
        return list(threads.map(lambda place: _testimony(place, stacks), places))


def _testimony(place: Place, stacks: bool) -> Testimony:
    is_alive = witness.is_alive(place.witness)
    where = witness.take_stacks(place.witness) if is_alive and stacks else "" if is_alive else witness.fatal_trace(place.witness)
    return Testimony(place.node, place.pid, is_alive, witness.last_lines(place.witness), where)


def testimony_by_node(places: Mapping[str, Sequence[Place]], stacks: bool) -> dict[str, list[Testimony]]:
    """All nodes are asked at once, and together they have `TESTIMONY_TIMEOUT_S`."""
    ours = here()
    if ours is None:  # a task would start another cluster
        return {node_id: [_unknown(place, "Ray was shut down") for place in group] for node_id, group in places.items()}
    asked = {node_id: _ask_node(node_id, group, stacks) for node_id, group in places.items() if node_id != ours}
    told = {node_id: testify(group, stacks) for node_id, group in places.items() if node_id == ours}
    give_up = time.monotonic() + TESTIMONY_TIMEOUT_S
    for node_id, ref in asked.items():
        try:
            told[node_id] = ray.get(ref, timeout=max(0.0, give_up - time.monotonic()))
        except (RayError, TimeoutError) as error:  # the node is gone, or does not answer
            told[node_id] = [_unknown(place, str(error)) for place in places[node_id]]
    return told


def _unknown(place: Place, why: str) -> Testimony:
    return Testimony(place.node, place.pid, False, f"node {place.node} cannot be asked: {why}")


def _ask_node(node_id: str, places: Sequence[Place], stacks: bool) -> Any:
    look: Any = ray.remote(testify)
    pinned = look.options(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
    return pinned.remote(places, stacks)

"""Attach to ranks that another driver has started, by name or by handle."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from podium.errors import ResourceError, nearest
from podium.single_controller.runtime.ray.actor import RankAddress


def named_actor(name: str) -> Any:
    """The rank of that name."""
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise ResourceError(f"no rank is named {name!r} {_searched()}") from error


def names_with(prefix: str | None, worker_class: type) -> list[str]:
    """The names of the ranks of that class whose group has the prefix."""
    if prefix is None:
        raise ResourceError("give the name_prefix, worker_names or worker_handles of the detached group")
    pattern = re.compile(rf"{re.escape(f'{prefix}{worker_class.__name__}')}_\d+:\d+")
    known = cast(Any, ray.util).list_named_actors()
    names = sorted(filter(pattern.fullmatch, known))
    if not names:
        raise ResourceError(
            f"no group of {worker_class.__name__} has name_prefix {prefix!r}{nearest(prefix, known)} {_searched()}"
        )
    return names


def _searched() -> str:
    context = ray.get_runtime_context()
    return (
        f"in the cluster at {context.gcs_address}, namespace {context.namespace!r}: both drivers call ray.init with the same "
        "address and namespace before they make or look for groups"
    )


def rank_addresses(actors: Sequence[Any], timeout_s: float) -> list[RankAddress]:
    """Where these ranks are, as each of them reports. ResourceError unless all answer in time."""
    if not actors or not all(hasattr(actor, "podium_rank_address") for actor in actors):
        raise ResourceError(f"worker_handles must be actors of a WorkerGroup, its `workers`, got {list(actors)}")
    try:
        found: list[RankAddress] = ray.get([actor.podium_rank_address.remote() for actor in actors], timeout=timeout_s)
        return [replace(address, handle=actor) for address, actor in zip(found, actors, strict=True)]
    except GetTimeoutError as error:
        raise ResourceError(
            f"the group's ranks did not answer within {timeout_s:g} s: they work on another driver's call; wait until it is "
            "over, or give a longer start_timeout_s"
        ) from error
    except RayError as error:
        raise ResourceError(f"a rank of the group has died: {error}") from error


def in_rank_order(ranks: Sequence[RankAddress]) -> list[RankAddress]:
    """Groups in the order of their first rank here, the ranks of each in their own order.

    ResourceError for a rank that is given twice.
    """
    by_group: dict[Hashable, dict[int, RankAddress]] = {}
    for rank in ranks:
        group = by_group.setdefault(_group_of(rank), {})
        if rank.context.rank in group:
            raise ResourceError(f"rank {rank.context.rank} of group {rank.context.group!r} is given twice; give each rank once")
        group[rank.context.rank] = rank
    return [group[number] for group in by_group.values() for number in sorted(group)]


def check_all_found(ranks: Sequence[RankAddress]) -> None:
    """ResourceError unless these are all the ranks of one group."""
    first = ranks[0].context
    numbers = [rank.context.rank for rank in ranks]
    if numbers != list(range(first.world_size)) or len(set(map(_group_of, ranks))) > 1:
        raise ResourceError(
            f"group {first.group!r} has {first.world_size} ranks, found were {numbers}: to attach to some of its ranks, or to "
            "those of several groups, give their worker_names or worker_handles"
        )


def _group_of(rank: RankAddress) -> Hashable:
    return rank.context.group, rank.context.master_addr, rank.context.master_port

"""Finding ranks that another driver has started, by name or by handle."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayError

from podium.errors import ResourceError, nearest
from podium.single_controller.runtime.ray.actor import Whereabouts


def named_actor(name: str) -> Any:
    """The rank of that name."""
    try:
        return ray.get_actor(name)
    except ValueError as error:
        raise ResourceError(f"no rank is named {name!r} {_searched()}") from error


def names_with(prefix: str | None, worker_class: type) -> list[str]:
    """The names of the ranks of that class whose group has the prefix."""
    if prefix is None:
        raise ResourceError("a detached group is found by its name_prefix, worker_names or worker_handles: give one")
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


def whereabouts(actors: Sequence[Any], timeout_s: float) -> list[Whereabouts]:
    """What these ranks tell of themselves."""
    if not actors or not all(hasattr(actor, "podium_whereabouts") for actor in actors):
        raise ResourceError(f"worker_handles are actors of a WorkerGroup, its `workers`, got {list(actors)}")
    try:
        found: list[Whereabouts] = ray.get([actor.podium_whereabouts.remote() for actor in actors], timeout=timeout_s)
    except GetTimeoutError as error:
        raise ResourceError(
            f"the group's ranks did not answer within {timeout_s:g} s: they work on another driver's call; wait until it is "
            "over, or give a longer start_timeout_s"
        ) from error
    except RayError as error:
        raise ResourceError(f"the group has ranks that do not live: {error}") from error
    return found

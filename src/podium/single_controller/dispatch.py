"""How a group call's arguments are split over the ranks, and how the ranks' results become one.

A dispatch mode names a `Route`: `dispatch_fn` says for every argument whether it is scattered (`PerRank`) or copied (`Copy`),
and `collect_fn` joins the results. Whether a value is scattered is said here, never guessed from its type or length later.

Rows are split over a mesh: shard i goes to every rank whose dp_rank is i, and results come back in dp_rank order.
DP_COMPUTE_PROTO is the plainest mesh, in which each rank has a shard of its own.

These are pure functions of a group's size and meshes. Sending and waiting is `group_call`'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

from podium.errors import DispatchError, RegistrationError, unknown_name
from podium.protocol import DataProto
from podium.single_controller.mesh import Mesh

# -- what can be asked for -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DispatchMode:
    """A mode by its name in `ROUTES`. The two subclasses tell a type checker what a group call returns."""

    name: str


class ListMode(DispatchMode):
    """The group returns a list: what each rank returned, in rank order."""


class BatchMode(DispatchMode):
    """The group returns what one worker would have returned for the whole batch."""


@dataclass(frozen=True)
class MeshMode(BatchMode):
    """A batch split over the mesh that the workers registered under `mesh_name`."""

    mesh_name: str


class Dispatch:
    """The modes that need nothing but their name; `make_nd_compute_dataproto_dispatch_fn` makes one for a mesh."""

    ONE_TO_ALL: ClassVar[ListMode] = ListMode("ONE_TO_ALL")
    DP_COMPUTE_PROTO: ClassVar[BatchMode] = BatchMode("DP_COMPUTE_PROTO")


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> MeshMode:
    """The mode that splits batches over the workers' mesh of that name."""
    return MeshMode("ND_COMPUTE_PROTO", mesh_name)


class Execute(Enum):
    """Which ranks run a call. RANK_ZERO takes arguments as they are and returns rank 0's result itself."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


# -- what a mode does ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copy:
    """Every rank receives this value."""

    value: Any

    def for_rank(self, rank: int) -> Any:
        return self.value


@dataclass(frozen=True)
class PerRank:
    """Rank r receives `values[r]`."""

    values: Sequence[Any]

    def for_rank(self, rank: int) -> Any:
        return self.values[rank]


Sent: TypeAlias = Copy | PerRank
SentArguments: TypeAlias = tuple[tuple[Sent, ...], dict[str, Sent]]


class Ranks(Protocol):
    """What routing needs to know of a group."""

    @property
    def world_size(self) -> int: ...

    def mesh(self, name: str | None) -> Mesh:
        """The mesh of that name; None is the one in which every rank has its own shard."""
        ...


@dataclass(frozen=True)
class Route:
    """`dispatch_fn(group, *args, **kwargs) -> SentArguments` and `collect_fn(group, outputs) -> result`.

    Only the mesh's collecting ranks send a result; the other entries of `outputs` are None.
    """

    dispatch_fn: Callable[..., SentArguments]
    collect_fn: Callable[[Ranks, Sequence[Any]], Any]
    mesh_name: str | None = None


def copy_to_every_rank(group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    """Every argument goes to every rank as it is."""
    return _map_arguments(Copy, args, kwargs)


def list_every_rank(group: Ranks, outputs: Sequence[Any]) -> list[Any]:
    """One result per rank, in rank order."""
    return list(outputs)


def scatter_rows(mesh_name: str | None, group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    """Each DataProto is cut into dp_size shards, uneven ones and empty ones included; anything else is copied.

    DispatchError when there is no DataProto to cut, or two of them disagree on the number of rows.
    """
    mesh = group.mesh(mesh_name)
    _check_row_counts(args, kwargs)

    def send(value: Any) -> Sent:
        if not isinstance(value, DataProto):
            return Copy(value)
        shards = value.partition(mesh.dp_size)
        return PerRank([shards[dp_rank] for dp_rank in mesh.dp_ranks])

    return _map_arguments(send, args, kwargs)


def join_rows(mesh_name: str | None, group: Ranks, outputs: Sequence[Any]) -> DataProto | None:
    """The collecting ranks' batches, concatenated in dp_rank order; None when all of them returned None."""
    answers = {rank: outputs[rank] for rank in group.mesh(mesh_name).collecting_ranks}
    if all(answer is None for answer in answers.values()):
        return None
    for rank, answer in answers.items():
        if not isinstance(answer, DataProto):
            raise DispatchError(f"rank {rank} returned {type(answer).__name__}, expected DataProto (or None from every rank)")
    return DataProto.concat(list(answers.values()))


def rows_over(mesh_name: str | None) -> Route:
    """The route that splits and joins rows over a mesh."""
    return Route(partial(scatter_rows, mesh_name), partial(join_rows, mesh_name), mesh_name)


ROUTES: dict[str, Route] = {
    "ONE_TO_ALL": Route(copy_to_every_rank, list_every_rank),
    "DP_COMPUTE_PROTO": rows_over(None),
}


def route_of(mode: DispatchMode) -> Route:
    """What the mode does. RegistrationError for a name that is not in the table."""
    if isinstance(mode, MeshMode):
        return rows_over(mode.mesh_name)
    if mode.name not in ROUTES:
        raise RegistrationError(unknown_name("dispatch mode", mode.name, ROUTES))
    return ROUTES[mode.name]


# -- inside --------------------------------------------------------------------------------------------------------------


def _map_arguments(send: Callable[[Any], Sent], args: tuple[Any, ...], kwargs: dict[str, Any]) -> SentArguments:
    return tuple(map(send, args)), {name: send(value) for name, value in kwargs.items()}


def _check_row_counts(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    named = {f"argument {position}": value for position, value in enumerate(args)}
    named |= {f"argument {name!r}": value for name, value in kwargs.items()}
    rows = {name: len(value) for name, value in named.items() if isinstance(value, DataProto)}
    if not rows:
        got = ", ".join(type(value).__name__ for value in named.values()) or "no arguments"
        raise DispatchError(f"needs a DataProto whose rows can be split over the ranks, got {got}")
    first, count = next(iter(rows.items()))
    for name, other in rows.items():
        if other != count:
            raise DispatchError(f"batches of one call need equal row counts: {first} has {count} rows, {name} has {other}")

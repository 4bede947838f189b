"""How the arguments of a group call are split over the ranks, and how the ranks' results become one.

A dispatch mode names a `Route`: `dispatch_fn` says for every argument whether it is scattered (`PerRank`) or copied (`Copy`),
and `collect_fn` joins the results. Later code never guesses from a value's type or length whether it is scattered.

Rows are split over a mesh: shard i goes to every rank whose dp_rank is i, and results come back in dp_rank order.
DP_COMPUTE_PROTO is the plainest mesh, in which each rank has a shard of its own.

These are pure functions of a group's size and meshes. `group_call` sends and waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, TypeAlias, cast

from podium.errors import DispatchError, RegistrationError, unknown_name
from podium.protocol import DataProto
from podium.protocol.meta import is_marked
from podium.protocol.remote_rows import RemoteRows
from podium.protocol.rows import (
    concat_rows,
    drop_last,
    drop_padding,
    is_padding_enabled,
    is_rows,
    num_padding,
    num_rows,
    partition_padded,
    partition_rows,
)
from podium.single_controller.routing.mesh import Mesh
from podium.single_controller.routing.modes import (
    BatchMode,
    DirectMode,
    Dispatch,
    DispatchMode,
    Execute,
    InPlaceMode,
    MeshMode,
    UserMode,
    add_mode,
    check_functions,
)

# -- what is sent --------------------------------------------------------------------------------------------------------


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

    def part_of(self, rank: int) -> int:
        """The number of the part that the rank receives: ranks with the same number receive the same value."""
        return rank


@dataclass(frozen=True)
class Shards(PerRank):
    """Rows cut over a mesh. The last `padding[r]` rows of `values[r]` are padding, and so are rows computed from them."""

    padding: tuple[int, ...]
    dp_ranks: tuple[int, ...]

    def part_of(self, rank: int) -> int:
        return self.dp_ranks[rank]

    def trim(self, rank: int, result: Any, *, is_of_user: bool = False) -> Any:
        """The result without the rows that were computed from the padding of this call.

        If the result marks its padding, they are its last marked rows: the caller's own padding stays. If it has k rows for
        each that was sent, they are the last k x padding. A result of any other number of rows is left as it is in a user's
        mode, and is a DispatchError in ours.
        """
        padding = self.padding[rank]
        if not padding or not is_rows(result):
            return result
        sent, returned = num_rows(self.values[rank]), num_rows(result)
        if isinstance(result, DataProto | RemoteRows) and is_marked(result.meta_info, returned):
            return drop_padding(result, padding, of=num_padding(self.values[rank]))
        copies, rest = divmod(returned, sent)
        if rest and is_of_user:
            return result
        if rest:
            raise DispatchError(
                f"rank {rank} must return a multiple of the {sent} rows that it was sent, {padding} of them padding, got "
                f"{returned}: change the method, or call without auto padding"
            )
        return drop_last(result, copies * padding)


Sent: TypeAlias = Copy | PerRank
SentArguments: TypeAlias = tuple[tuple[Sent, ...], dict[str, Sent]]


class Ranks(Protocol):
    """What routing needs to know of a group."""

    @property
    def world_size(self) -> int: ...

    @property
    def auto_padding(self) -> bool:
        """Whether every batch is padded to shards of equal size, and not only one that asks for it."""
        ...

    def mesh(self, name: str | None) -> Mesh:
        """The mesh of that name; None is the one in which every rank has its own shard."""
        ...


@dataclass(frozen=True)
class Route:
    """`dispatch_fn(group, *args, **kwargs) -> (args, kwargs)` and `collect_fn(group, outputs) -> result`.

    For each argument `dispatch_fn` gives `Copy(x)`, `PerRank([...])`, or a list or tuple with one value per rank; any other
    value is copied. `outputs` has one entry per rank; only the mesh's collecting ranks send theirs, the others' are None.
    """

    mode: DispatchMode
    """The mode that has this route."""
    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[[Any, Any], Any]
    mesh_name: str | None = None
    is_built_in: bool = False
    """Whether both functions are Podium's; False for a user's mode, and for a built-in one that a user has updated."""


# -- every rank the same, or each its own --------------------------------------------------------------------------------


def dispatch_one_to_all(group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    """Every argument goes to every rank as it is."""
    if not args and not kwargs:
        return (), {}
    return _map_named(partial(as_copy, group.world_size), args, kwargs)


def dispatch_all_to_all(group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    """A list or tuple holds one value per rank; anything else, and `Copy(x)`, is copied."""
    return _map_named(partial(one_per_rank_or_copy, group.world_size), args, kwargs)


def dispatch_dp_compute(group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    """Every argument is a list or tuple with one value per rank, or says `Copy(x)`."""

    def send(name: str, value: Any) -> Sent:
        if not isinstance(value, list | tuple | Copy | PerRank):
            kind = type(value).__name__
            raise DispatchError(
                f"{name} must be a list with one value for each of the {group.world_size} ranks, got {kind}; or use Copy(x)"
            )
        return one_per_rank_or_copy(group.world_size, name, value)

    return _map_named(send, args, kwargs)


def collect_all_to_all(group: Ranks, outputs: Sequence[Any]) -> list[Any]:
    """One result per rank, in rank order."""
    return list(outputs)


def collect_rank_zero(group: Ranks, output: Any) -> Any:
    """What rank 0 returned."""
    return output


def for_rank_zero(world_size: int, name: str, value: Any) -> Sent:
    """The value for rank 0; of a PerRank its first, which may be the only one."""
    if isinstance(value, PerRank) and isinstance(value.values, list | tuple) and len(value.values) == 1:
        return value
    return as_copy(world_size, name, value)


def as_copy(world_size: int, name: str, value: Any) -> Sent:
    """The value for every rank, or a PerRank as it is. DispatchError for a PerRank of another number of values."""
    return one_per_rank_or_copy(world_size, name, value) if isinstance(value, PerRank) else _copy(value)


def one_per_rank_or_copy(world_size: int, name: str, value: Any) -> Sent:
    """A list's or tuple's items for a rank each, any other value for all. DispatchError for a list of another length."""
    is_per_rank = isinstance(value, PerRank)
    values = value.values if is_per_rank else value
    if not is_per_rank and not isinstance(values, list | tuple):
        return _copy(value)
    if not hasattr(values, "__len__") or not hasattr(values, "__getitem__") or isinstance(values, Mapping):
        raise DispatchError(f"{name} must be PerRank of a list with one value for each rank, got {type(values).__name__}")
    if len(values) != world_size:
        raise DispatchError(
            f"{name} must have one value per rank, got {len(values)} values for {world_size} ranks; Copy(x) sends all to each"
        )
    return value if is_per_rank else PerRank(values)


# -- rows over a mesh ----------------------------------------------------------------------------------------------------


def dispatch_nd_compute_dataproto(mesh_name: str | None, group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    """Each DataProto or TensorDict is cut into dp_size shards, uneven and empty ones included; anything else is copied.

    With auto padding, the group's or the batch's own, all shards are as long as the longest; the added rows are copies of
    the last one. DispatchError when there are no rows to cut, or two batches disagree on their number.
    """
    mesh = group.mesh(mesh_name)
    batches = _batches_of_equal_length(args, kwargs)
    padded = group.auto_padding or any(map(is_padding_enabled, batches.values()))

    def send(name: str, value: Any) -> Sent:
        if name not in batches:
            return as_copy(group.world_size, name, value)
        shards, padding = (
            partition_padded(value, mesh.dp_size) if padded else (partition_rows(value, mesh.dp_size), (0,) * mesh.dp_size)
        )
        ranks = mesh.dp_ranks
        return Shards([shards[dp_rank] for dp_rank in ranks], tuple([padding[dp_rank] for dp_rank in ranks]), ranks)

    return _map_named(send, args, kwargs)


def collect_nd_compute_dataproto(mesh_name: str | None, group: Ranks, outputs: Sequence[Any]) -> Any:
    """The collecting ranks' batches, concatenated in dp_rank order; None when all of them returned None."""
    ranks = group.mesh(mesh_name).collecting_ranks
    answers = [outputs[rank] for rank in ranks]
    if all(answer is None for answer in answers):
        return None
    for rank, answer in zip(ranks, answers, strict=True):
        if not is_rows(answer):
            kind = type(answer).__name__
            raise DispatchError(f"rank {rank} returned {kind}, but must return a DataProto or TensorDict, or None on every rank")
    return concat_rows(answers)


def dispatch_dp_compute_data_proto(group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    """`dispatch_nd_compute_dataproto` with a shard for every rank."""
    return dispatch_nd_compute_dataproto(None, group, *args, **kwargs)


def dispatch_dp_compute_data_proto_with_func(group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    """The first argument is a callable, which every rank receives; the rows of the others are split."""
    if not args or not callable(args[0]):
        got = type(args[0]).__name__ if args else "no positional argument"
        raise DispatchError(f"the first argument must be the function that the ranks run, got {got}")
    return dispatch_nd_compute_dataproto(None, group, Copy(args[0]), *args[1:], **kwargs)


def collect_dp_compute_data_proto(group: Ranks, outputs: Sequence[Any]) -> Any:
    """`collect_nd_compute_dataproto` of every rank's rows."""
    return collect_nd_compute_dataproto(None, group, outputs)


def _refuse_direct(group: Ranks, /, *args: Any, **kwargs: Any) -> SentArguments:
    raise DispatchError("the group cannot call a direct method; call it on a worker's own handle, group.workers[rank]")


# -- the modes -----------------------------------------------------------------------------------------------------------

_BUILT_IN = {
    Dispatch.RANK_ZERO: (dispatch_one_to_all, collect_rank_zero),
    Dispatch.ONE_TO_ALL: (dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: (dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: (dispatch_dp_compute, collect_all_to_all),
    Dispatch.DP_COMPUTE_PROTO: (dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: (dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_METRIC: (dispatch_dp_compute_data_proto, collect_all_to_all),
    Dispatch.DIRECT_ROLLOUT_METHOD: (_refuse_direct, collect_all_to_all),
}
ROUTES: dict[DispatchMode, Route] = {mode: Route(mode, *functions, is_built_in=True) for mode, functions in _BUILT_IN.items()}
"""The route of each member of `Dispatch`. Every call reads it, so an update reaches groups that exist already."""


def register_dispatch_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[[Any, Any], Any]) -> UserMode:
    """Add a mode: a new member of `Dispatch`, which `@register` takes. `Route` documents the two functions.

    A process that only runs workers need not know the mode. RegistrationError when the name is taken.
    """
    check_functions(dispatch_fn, collect_fn)
    mode = add_mode(name)
    ROUTES[mode] = Route(mode, dispatch_fn, collect_fn)
    return mode


def update_dispatch_mode(mode: DispatchMode, dispatch_fn: Callable[..., Any], collect_fn: Callable[[Any, Any], Any]) -> None:
    """Change what a mode does, from the next call on and for groups that exist already."""
    if isinstance(mode, DispatchMode):
        route_of(mode)
    set_route(mode, dispatch_fn, collect_fn)


def set_route(mode: DispatchMode, dispatch_fn: Callable[..., Any], collect_fn: Callable[[Any, Any], Any]) -> None:
    """`update_dispatch_mode`, also for a mode that does not have a route yet."""
    check_functions(dispatch_fn, collect_fn)
    if not isinstance(mode, DispatchMode):
        raise RegistrationError(f"the mode to update must be a member of Dispatch, got {mode!r}")
    ROUTES[mode] = Route(mode, dispatch_fn, collect_fn, is_built_in=_BUILT_IN.get(mode) == (dispatch_fn, collect_fn))


def get_predefined_dispatch_fn(mode: DispatchMode) -> dict[str, Callable[..., Any]]:
    """The two functions of a mode, by name."""
    route = route_of(mode)
    return {"dispatch_fn": route.dispatch_fn, "collect_fn": route.collect_fn}


def route_of(mode: DispatchMode) -> Route:
    """The route of the mode. RegistrationError for a mode that this process does not know."""
    route = ROUTES.get(mode)
    if route is not None:
        return route
    if isinstance(mode, MeshMode):
        return _mesh_route(mode)
    if isinstance(mode, InPlaceMode):
        return Route(mode, mode.dispatch_fn, mode.collect_fn)
    raise RegistrationError(unknown_name("dispatch mode", mode.name, Dispatch.names()))


@cache
def _mesh_route(mode: MeshMode) -> Route:
    name = mode.mesh_name
    dispatch_fn, collect_fn = partial(dispatch_nd_compute_dataproto, name), partial(collect_nd_compute_dataproto, name)
    return Route(mode, dispatch_fn, collect_fn, name, is_built_in=True)


TRIMMED = (BatchMode, UserMode)
"""Modes whose results lose padding rows. A user's mode is among them, since it may cut rows by one of our functions."""


def dispatch(group: Ranks, route: Route, execute: Execute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SentArguments:
    """What every rank is sent. DispatchError if the arguments, or the results of a user's dispatch function, do not fit.

    With Execute.RANK_ZERO a built-in mode leaves the arguments as they are.
    """
    if execute is Execute.RANK_ZERO and not isinstance(route.mode, UserMode | DirectMode):
        return _map_named(partial(for_rank_zero, group.world_size), args, kwargs)
    dispatched = route.dispatch_fn(group, *args, **kwargs)
    if route.is_built_in:
        return cast(SentArguments, dispatched)
    if not (isinstance(dispatched, tuple) and len(dispatched) == 2 and isinstance(dispatched[1], Mapping)):
        raise DispatchError(f"a dispatch_fn must return (args, kwargs), got {dispatched!r}")
    one_value = for_rank_zero if execute is Execute.RANK_ZERO else one_per_rank_or_copy
    return _map_named(partial(one_value, group.world_size), *dispatched)


def ranks_together(sent: SentArguments, ranks: Sequence[int]) -> list[Sequence[int]]:
    """The ranks by what they are sent: those in one entry are sent the same values."""
    scattered = [value for value in (*sent[0], *sent[1].values()) if isinstance(value, PerRank)]
    if not scattered:
        return [ranks]
    together: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        together.setdefault(tuple([value.part_of(rank) for value in scattered]), []).append(rank)
    return list(together.values())


def collect(group: Ranks, route: Route, execute: Execute, answers: Mapping[int, Any], sent: SentArguments) -> Any:
    """The result of the call, from the ranks' answers. DispatchError if they do not fit together."""
    if execute is Execute.RANK_ZERO:
        return route.collect_fn(group, answers[0]) if isinstance(route.mode, UserMode) else answers[0]
    if isinstance(route.mode, TRIMMED):
        padded = next((value for value in (*sent[0], *sent[1].values()) if isinstance(value, Shards)), None)
        if padded is not None and any(padded.padding):
            is_of_user = isinstance(route.mode, UserMode)
            answers = {rank: padded.trim(rank, answer, is_of_user=is_of_user) for rank, answer in answers.items()}
    return route.collect_fn(group, list(answers.values()))


# -- inside --------------------------------------------------------------------------------------------------------------


def _copy(value: Any) -> Copy:
    return value if isinstance(value, Copy) else Copy(value)


def _map_named(send: Callable[[str, Any], Sent], args: Iterable[Any], kwargs: Mapping[str, Any]) -> SentArguments:
    positional = tuple([send(_position(number), value) for number, value in enumerate(args)])
    return positional, {name: send(_keyword(name), value) for name, value in kwargs.items()}


def _batches_of_equal_length(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that are rows, by their name in messages. DispatchError if they differ in length."""
    named = {_position(number): value for number, value in enumerate(args)}
    if kwargs:
        named |= {_keyword(name): value for name, value in kwargs.items()}
    batches = {name: value for name, value in named.items() if is_rows(value)}
    if len(batches) == 1:
        return batches
    if not batches:
        got = ", ".join(type(value).__name__ for value in named.values()) or "no arguments"
        raise DispatchError(f"an argument must be a DataProto or TensorDict, whose rows are split over the ranks, got {got}")
    rows = {name: num_rows(value) for name, value in batches.items()}
    first, count = next(iter(rows.items()))
    for name, other in rows.items():
        if other != count:
            raise DispatchError(f"batches of one call must have equal row counts: {first} has {count} rows, {name} has {other}")
    return batches


def _position(number: int) -> str:
    return f"argument {number}"


def _keyword(name: str) -> str:
    return f"argument {name!r}"

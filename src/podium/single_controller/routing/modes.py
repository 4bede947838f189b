"""The dispatch modes by name, as `@register` takes them and type checkers see them. `dispatch` has what they do.

Modes travel by name. A process that does not know a user's mode can load, compare and print it, but not call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from podium.errors import RegistrationError, unknown_name


@dataclass(frozen=True, repr=False)
class DispatchMode:
    """A mode by its name. The subclasses tell a type checker what a group call returns."""

    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (type(self), self.name)

    def __repr__(self) -> str:
        return f"<Dispatch.{self.name}>"


class ListMode(DispatchMode):
    """The group returns a list: what each rank returned, in rank order."""


class BatchMode(DispatchMode):
    """The group returns what one worker would have returned for the whole batch."""


class RankZeroMode(DispatchMode):
    """Rank 0 alone runs the method, and the group returns its result."""


class DirectMode(DispatchMode):
    """The method is called on a worker's own handle, never through the group."""


class UserMode(DispatchMode):
    """A mode that a user registered; what the group returns is what its `collect_fn` returns."""


@dataclass(frozen=True, repr=False)
class MeshMode(BatchMode):
    """A batch split over the mesh that the workers registered under `mesh_name`. RegistrationError unless that is a name."""

    mesh_name: str

    def __post_init__(self) -> None:
        check_mesh_name(self.mesh_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return MeshMode, (self.name, self.mesh_name)


class DispatchPair(TypedDict):
    """A mode written in place, as `register(dispatch_mode={"dispatch_fn": ..., "collect_fn": ...})`."""

    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]


@dataclass(frozen=True, repr=False)
class InPlaceMode(UserMode):
    """What a `DispatchPair` becomes."""

    dispatch_fn: Callable[..., Any]
    collect_fn: Callable[..., Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return InPlaceMode, (self.name, self.dispatch_fn, self.collect_fn)


class Execute(Enum):
    """Which ranks run a call. RANK_ZERO takes arguments as they are and returns rank 0's result itself."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


class _Members(type):
    """`Dispatch` as a collection of its members, like an Enum that can grow."""

    _members: dict[str, DispatchMode]

    def __iter__(cls) -> Iterator[DispatchMode]:
        return iter(cls._members.values())

    def __len__(cls) -> int:
        return len(cls._members)

    def __contains__(cls, item: object) -> bool:
        return item in cls._members if isinstance(item, str) else item in cls._members.values()

    def __getitem__(cls, name: str) -> DispatchMode:
        return cls._members[name]

    def from_name(cls, name: object) -> DispatchMode | None:
        """The member of that name in any case, or None."""
        return cls._members.get(name.upper()) if isinstance(name, str) else None

    def remove(cls, name: str) -> None:
        """Remove a mode that `register_dispatch_mode` added. RegistrationError for a built-in or an unknown one."""
        mode = cls.from_name(name)
        if mode is None or not isinstance(mode, UserMode):
            known = [member.name for member in cls if isinstance(member, UserMode)]
            raise RegistrationError(
                f"the mode to remove must be one that register_dispatch_mode added: {unknown_name('dispatch mode', name, known)}"
            )
        del cls._members[mode.name]

    def names(cls) -> list[str]:
        """The names of all members, built-in ones first."""
        return list(cls._members)

    if not TYPE_CHECKING:  # type checkers must still report a name that is not built in

        def __getattr__(cls, name: str) -> DispatchMode:
            members = type.__getattribute__(cls, "_members")
            if name in members:
                return members[name]
            raise AttributeError(unknown_name("dispatch mode", name, members))


class Dispatch(metaclass=_Members):
    """The built-in modes, and those that `register_dispatch_mode` adds.

    `make_nd_compute_dataproto_dispatch_fn` makes one for a mesh.
    """

    RANK_ZERO: ClassVar[RankZeroMode] = RankZeroMode("RANK_ZERO")
    ONE_TO_ALL: ClassVar[ListMode] = ListMode("ONE_TO_ALL")
    ALL_TO_ALL: ClassVar[ListMode] = ListMode("ALL_TO_ALL")
    DP_COMPUTE: ClassVar[ListMode] = ListMode("DP_COMPUTE")
    DP_COMPUTE_PROTO: ClassVar[BatchMode] = BatchMode("DP_COMPUTE_PROTO")
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[BatchMode] = BatchMode("DP_COMPUTE_PROTO_WITH_FUNC")
    DP_COMPUTE_METRIC: ClassVar[ListMode] = ListMode("DP_COMPUTE_METRIC")
    DIRECT_ROLLOUT_METHOD: ClassVar[DirectMode] = DirectMode("DIRECT_ROLLOUT_METHOD")

    _members: ClassVar[dict[str, DispatchMode]] = {}


Dispatch._members.update({name: mode for name, mode in vars(Dispatch).items() if isinstance(mode, DispatchMode)})


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> MeshMode:
    """The mode that splits batches over the workers' mesh of that name. RegistrationError unless it is a name."""
    return MeshMode("ND_COMPUTE_PROTO", mesh_name)


def add_mode(name: str) -> UserMode:
    """A new member of `Dispatch`. RegistrationError when the name is taken or cannot be one."""
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise RegistrationError(f"the name of a dispatch mode must be an identifier without a leading underscore, got {name!r}")
    if Dispatch.from_name(name) is not None:
        raise RegistrationError(f"dispatch mode {name.upper()!r} exists already; update_dispatch_mode changes what it does")
    mode = UserMode(name.upper())
    Dispatch._members[mode.name] = mode
    return mode


def check_mesh_name(name: object) -> None:
    """RegistrationError unless it can be the name of a mesh."""
    if not isinstance(name, str) or not name:
        raise RegistrationError(
            f"the name of a mesh must be a string, such as 'actor', got {name!r}; give the name that the workers register"
        )


def check_functions(dispatch_fn: object, collect_fn: object) -> None:
    """RegistrationError unless both functions of a user's mode can be called."""
    for name, function in (("dispatch_fn", dispatch_fn), ("collect_fn", collect_fn)):
        if not callable(function):
            raise RegistrationError(f"{name} of a dispatch mode must be a function, got {function!r}")


def _load(kind: type[DispatchMode], name: str) -> DispatchMode:
    return Dispatch.from_name(name) or kind(name)

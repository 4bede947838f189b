"""The types of registered methods for type checkers: one in the worker, another on the group.

At run time `@register` returns the function itself, and nothing here is used. A checker sees a descriptor instead: on an instance
it is the method, on the class it is the group call (`wg.call` is typed as the class).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar, overload

if TYPE_CHECKING:
    from podium.single_controller.calls.futures import FutureList, GroupFuture
    from podium.single_controller.calls.group_call import GroupCall
    from podium.single_controller.calls.row_futures import DataProtoFuture

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
LocalT = TypeVar("LocalT")
GroupT = TypeVar("GroupT")


class Registered(Generic[P, LocalT, GroupT]):
    """A method with parameters P that returns LocalT in its worker and GroupT on the group."""

    @overload
    def __get__(self, worker: None, owner: Any) -> GroupCall[P, GroupT]: ...
    @overload
    def __get__(self, worker: object, owner: Any) -> Callable[P, LocalT]: ...
    def __get__(self, worker: object, owner: Any) -> GroupCall[P, GroupT] | Callable[P, LocalT]:
        raise NotImplementedError("for type checkers only; `register` returns plain functions")


class RegisterList(Protocol):
    """`list[R]` on the group: one result per rank."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
    ) -> Registered[P, Coroutine[Any, Any, R], list[R]]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[S, P], R], /) -> Registered[P, R, list[R]]: ...


class RegisterListFuture(Protocol):
    """`FutureList[R]` on the group."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
    ) -> Registered[P, Coroutine[Any, Any, R], FutureList[R]]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[S, P], R], /) -> Registered[P, R, FutureList[R]]: ...


class RegisterOne(Protocol):
    """`R` on the group, as in the worker."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
    ) -> Registered[P, Coroutine[Any, Any, R], R]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[S, P], R], /) -> Registered[P, R, R]: ...


class RegisterOneFuture(Protocol):
    """`GroupFuture[R]` on the group."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
    ) -> Registered[P, Coroutine[Any, Any, R], GroupFuture[R]]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[S, P], R], /) -> Registered[P, R, GroupFuture[R]]: ...


class RegisterReference(Protocol):
    """A `DataProtoFuture` on the group, whose rows stay where they were made."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
    ) -> Registered[P, Coroutine[Any, Any, R], DataProtoFuture]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[S, P], R], /) -> Registered[P, R, DataProtoFuture]: ...


class RegisterAny(Protocol):
    """Whatever the mode's own `collect_fn` returns."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
    ) -> Registered[P, Coroutine[Any, Any, R], Any]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[S, P], R], /) -> Registered[P, R, Any]: ...


class RegisterDirect(Protocol):
    """The group cannot call it."""

    @overload
    def __call__(
        self, method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
    ) -> Registered[P, Coroutine[Any, Any, R], NoReturn]: ...
    @overload
    def __call__(self, method: Callable[Concatenate[S, P], R], /) -> Registered[P, R, NoReturn]: ...

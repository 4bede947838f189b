"""A method as its group offers it: bind, dispatch, send, wait, collect. Blocking or not, a call takes this one path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from podium.errors import CallTimeoutError, DataError, DispatchError
from podium.single_controller.dispatch import Execute, Ranks, Route, SentArguments, route_of
from podium.single_controller.pending_call import PendingCall
from podium.single_controller.registration import Registration
from podium.single_controller.runtime.base import RankCall

P = ParamSpec("P")
R = TypeVar("R")


class Group(Ranks, Protocol):
    """What a call needs of its group."""

    @property
    def name(self) -> str: ...

    def submit(self, method: str, calls: Mapping[int, RankCall], timeout_s: float | None) -> PendingCall:
        """Send the calls; `timeout_s` None is the group's own limit."""
        ...


@dataclass(frozen=True)
class Method:
    """What a group knows of one of its workers' methods, found out once."""

    name: str
    registration: Registration
    route: Route
    signature: inspect.Signature
    doc: str | None

    @classmethod
    def of(cls, function: Callable[..., Any], registration: Registration) -> Method:
        """`signature` is the function's without self."""
        signature = inspect.signature(function)
        without_self = signature.replace(parameters=list(signature.parameters.values())[1:])
        return cls(function.__name__, registration, route_of(registration.dispatch_mode), without_self, function.__doc__)


class GroupFuture(Generic[R]):
    """The result of a group call that is still running, or the error it ended with."""

    def __init__(self, pending: PendingCall, collect: Callable[[dict[int, Any]], R]) -> None:
        self._pending = pending
        self._collect = collect
        self._settled: R | Exception | None = None
        self._is_settled = False

    def done(self) -> bool:
        """Whether `get` would return, or raise, without waiting for a rank's work."""
        return self._is_settled or self._pending.is_over()

    def get(self, timeout: float | None = None) -> R:
        """Wait for the result; every call returns the same object or raises the same error.

        `timeout` bounds this wait only: CallTimeoutError then leaves the call running, and it may be asked again. The
        call's own limit breaks the group.
        """
        if not self._is_settled:
            self._wait(timeout)
            self._settle()
        if isinstance(self._settled, Exception):
            raise self._settled
        return cast(R, self._settled)

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None and not self._pending.is_over(timeout):
            message = f"method {self._pending.method!r} has not finished within {timeout:g} s; it goes on, ask again"
            raise CallTimeoutError(message, silent_ranks=self._pending.silent_ranks)

    def _settle(self) -> None:
        try:
            self._settled = self._collect(self._pending.finish())
        except Exception as error:
            self._settled = error  # raised by `get`, now and every time
        self._is_settled = True


class GroupCall(Generic[P, R]):
    """Calls one method on the ranks of a group, as its `@register` says."""

    def __init__(self, group: Group, method: Method, timeout_s: float | None = None) -> None:
        self._group = group
        self._method = method
        self._timeout_s = timeout_s
        self.__signature__ = method.signature

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_arguments(args, kwargs)
        future = self._send(args, kwargs)
        return cast(R, future.get() if self._method.registration.blocking else future)

    def options(self, *, timeout: float | None = None) -> GroupCall[P, R]:
        """The same call with a time limit of its own, in seconds."""
        return type(self)(self._group, self._method, timeout)

    def _check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._method.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._method.name}(): {error}; its signature is {self._method.signature}") from None

    def _send(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GroupFuture[Any]:
        with self._named_errors():
            sent = self._method.route.dispatch_fn(self._group, *args, **kwargs)
            collects = self._group.mesh(self._method.route.mesh_name).collects
        ranks = range(self._group.world_size) if self._method.registration.execute_mode is Execute.ALL else range(1)
        calls = {rank: self._rank_call(rank, sent, collects[rank]) for rank in ranks}
        return GroupFuture(self._group.submit(self._method.name, calls, self._timeout_s), self._collect)

    def _rank_call(self, rank: int, sent: SentArguments, answers: bool) -> RankCall:
        args, kwargs = sent
        named = {name: value.for_rank(rank) for name, value in kwargs.items()}
        return RankCall(self._method.name, tuple(value.for_rank(rank) for value in args), named, answers)

    def _collect(self, answers: dict[int, Any]) -> Any:
        if self._method.registration.execute_mode is Execute.RANK_ZERO:
            return answers[0]
        with self._named_errors():
            return self._method.route.collect_fn(self._group, list(answers.values()))

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (DispatchError, DataError) as error:
            mode = self._method.registration.dispatch_mode.name
            raise DispatchError(f"{self._group.name}.{self._method.name} ({mode}): {error}") from error

    def __repr__(self) -> str:
        return f"<{self._group.name}.{self._method.name}{self._method.signature}>"


def group_call(group: Group, method: Method) -> GroupCall[..., Any]:
    """A call whose type has the method's name and documentation, as they appear in traces and in `help()`."""
    call_type = type(method.name, (GroupCall,), {"__doc__": method.doc})
    call: GroupCall[..., Any] = call_type(group, method)
    return call

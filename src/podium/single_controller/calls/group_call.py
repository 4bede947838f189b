"""One call of a group: bind, dispatch, send, wait, collect. Blocking or not, every call takes this path."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from podium.errors import DataError, DispatchError
from podium.single_controller.calls.futures import FutureList, GroupFuture, is_future
from podium.single_controller.calls.row_futures import DataProtoFuture
from podium.single_controller.calls.traffic import recording
from podium.single_controller.processes.deferred import DeferredCall
from podium.single_controller.processes.pending_call import PendingCall
from podium.single_controller.processes.worker_processes import WorkerProcesses
from podium.single_controller.routing.column_checks import check_reads, check_writes
from podium.single_controller.routing.dispatch import TRIMMED, Ranks, SentArguments, collect, dispatch, ranks_together, route_of
from podium.single_controller.routing.mesh import Mesh
from podium.single_controller.routing.modes import BatchMode, Execute, ListMode
from podium.single_controller.routing.registration import Registration
from podium.single_controller.runtime.base import RankCall, Reply

P = ParamSpec("P")
R = TypeVar("R")


class Group(Ranks, Protocol):
    """What a call needs of its group."""

    @property
    def name(self) -> str: ...

    @property
    def processes(self) -> WorkerProcesses: ...

    def mesh(self, name: str | None, timeout_s: float | None = None) -> Mesh: ...


@dataclass(frozen=True)
class Method:
    """What a group knows of a method of its workers; inspected once."""

    name: str
    role: str | None
    """The role whose worker has the method; None for the worker class that the group was made of."""
    registration: Registration
    signature: inspect.Signature
    doc: str | None

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], registration: Registration, role: str | None) -> Method:
        """The method of that name; `signature` is the function's without self."""
        signature = inspect.signature(function)
        without_self = signature.replace(parameters=list(signature.parameters.values())[1:])
        return cls(name, role, registration, without_self, function.__doc__)

    @cached_property
    def full_name(self) -> str:
        return self.name if self.role is None else f"{self.role}.{self.name}"

    @cached_property
    def returns_list(self) -> bool:
        """Whether the group returns one result per rank."""
        return isinstance(self.registration.dispatch_mode, ListMode) and self.registration.execute_mode is Execute.ALL


class Invocation:
    """One call of a method with its arguments: sent once, collected once."""

    def __init__(
        self, group: Group, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float | None
    ) -> None:
        self._group = group
        self._method = method
        self._args = args
        self._kwargs = kwargs
        self._timeout_s = timeout_s
        self._route = route_of(method.registration.dispatch_mode)
        self._joins_rows = self._route.is_built_in and isinstance(self._route.mode, BatchMode)
        """Whether a built-in mode joins the ranks' rows into one batch, so that a user's function never reads them."""
        self._sent: SentArguments = ((), {})
        self._traffic = recording()

    def blocking(self) -> Any:
        """Send, wait and return the result."""
        self._group.processes.admit(self._method.full_name)
        self._group.processes.wait_for_deferred()
        result = self._collect(self._send_now().finish())
        return DataProtoFuture.owning(result) if self._method.registration.by_reference else result

    def future(self) -> GroupFuture[Any] | FutureList[Any]:
        """Send the call and return the future of its result.

        The call is deferred while its arguments are still being computed, or while earlier calls are deferred. A `FutureList`
        refers to a call that was sent, so for it the driver waits.
        """
        processes = self._group.processes
        processes.admit(self._method.full_name)
        if self._method.returns_list:
            processes.wait_for_deferred()
            pending = self._send_now()
            references = [processes.runtime.reference(ticket) for ticket in pending.tickets.values()]
            return FutureList(references, self._tracked(GroupFuture(pending, self._collect)))
        must_wait = processes.has_deferred or self._has_running_arguments()
        sent = self._send_later() if must_wait else self._send_now()
        kind: type[GroupFuture[Any]] = DataProtoFuture if self._joins_rows else GroupFuture
        return self._tracked(kind(sent, self._collect))

    def _tracked(self, future: GroupFuture[Any]) -> GroupFuture[Any]:
        self._group.processes.expect_reader(future)
        return future

    def _has_running_arguments(self) -> bool:
        values = (*self._args, *self._kwargs.values()) if self._method.registration.materialize_futures else ()
        return any(is_future(value) and not value.done() for value in values)

    def _send_later(self) -> DeferredCall:
        self._copy_arguments()
        resolve = partial(copy_context().run, self._resolve)  # traffic of the arguments is recorded as this thread's
        return self._group.processes.later(self._method.full_name, resolve, self._send)

    def _copy_arguments(self) -> None:
        """Ranks get the values that were passed, even if the caller writes into them later."""
        futures = {id(value): value for value in (*self._args, *self._kwargs.values()) if is_future(value)}
        try:
            self._args, self._kwargs = copy.deepcopy((self._args, self._kwargs), futures)
        except DataError as error:  # a future inside a list or dict
            raise self._named(error) from error
        except (TypeError, RuntimeError) as error:
            reason = f"an argument of a deferred call cannot be copied: {error}"
            raise self._named(DispatchError(f"{reason}. Call .get() on the futures among the arguments first")) from error

    def _resolve(self) -> None:
        """Replace futures by their values."""
        if (self._args or self._kwargs) and self._method.registration.materialize_futures:
            value = _value if self._route.is_built_in else _whole_value
            self._args = tuple(map(value, self._args))
            self._kwargs = {name: value(argument) for name, argument in self._kwargs.items()}

    def _send_now(self) -> PendingCall:
        self._resolve()
        return self._send()

    def _send(self) -> PendingCall:
        registration = self._method.registration
        try:
            if self._timeout_s is not None and self._route.mesh_name is not None:
                self._timeout_s = self._left_after_mesh(self._route.mesh_name, self._timeout_s)
            self._sent = dispatch(self._group, self._route, registration.execute_mode, self._args, self._kwargs)
            if registration.reads:
                check_reads(self._group, registration.reads, self._sent)
            quiet = self._group.mesh(self._route.mesh_name).quiet_ranks
        except (DispatchError, DataError) as error:
            raise self._named(error) from error
        self._args, self._kwargs = (), {}
        ranks = range(self._group.world_size) if registration.execute_mode is Execute.ALL else range(1)
        calls = [self._rank_call(together) for together in ranks_together(self._sent, ranks)]
        if self._traffic is not None:
            for call in calls:
                self._traffic.sent(self._method.full_name, (*call.args, *call.kwargs.values()))
        if not isinstance(self._route.mode, TRIMMED):
            self._sent = ((), {})  # only the padding of rows is needed again: let the data be freed
        return self._group.processes.submit(self._method.full_name, calls, self._reply(), quiet, self._timeout_s)

    def _left_after_mesh(self, name: str, timeout_s: float) -> float:
        """Query the mesh, at its first use, within the call's own limit; return what is left for the call.

        That is at least half of the limit, so query and call together may take one and a half times the limit.
        """
        began = time.monotonic()
        self._group.mesh(name, timeout_s)
        return max(timeout_s - (time.monotonic() - began), timeout_s / 2)

    def _reply(self) -> Reply:
        """What the ranks send back. Rows of a call that does not block stay where they were made."""
        registration = self._method.registration
        if self._joins_rows and (registration.by_reference or not registration.blocking):
            return Reply.REFERENCE
        return Reply.PLAIN if self._method.returns_list and not registration.blocking else Reply.VALUE

    def _rank_call(self, ranks: Sequence[int]) -> RankCall:
        """The call of ranks that are sent the same arguments."""
        args, kwargs = self._sent
        mine = tuple([value.for_rank(ranks[0]) for value in args])
        named = {name: value.for_rank(ranks[0]) for name, value in kwargs.items()}
        method = self._method
        return RankCall(ranks, method.role, method.name, mine, named, self._joins_rows)

    def _collect(self, answers: dict[int, Any]) -> Any:
        registration = self._method.registration
        if self._traffic is not None:
            self._traffic.returned(self._method.full_name, answers.values())
        try:
            if registration.writes:
                check_writes(self._group, self._route, registration.writes, answers)
            return collect(self._group, self._route, registration.execute_mode, answers, self._sent)
        except (DispatchError, DataError) as error:
            raise self._named(error) from error

    def _named(self, error: Exception) -> DispatchError:
        return DispatchError(f"{self._group.processes.name}.{self._method.full_name} ({self._route.mode.name}): {error}")


class GroupCall(Generic[P, R]):
    """Calls one method on the ranks of a group, as its `@register` says."""

    def __init__(self, group: Group, method: Method, timeout_s: float | None = None) -> None:
        self._group = group
        self._method = method
        self._timeout_s = timeout_s
        self.__signature__ = method.signature
        self.__name__ = method.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            self._method.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._method.name}(): {error}; its signature is {self._method.signature}") from None
        invocation = Invocation(self._group, self._method, args, kwargs, self._timeout_s)
        run: Callable[[], Any] = invocation.blocking if self._method.registration.blocking else invocation.future
        result: R = run()  # the type that `register` declares
        return result

    def options(self, *, timeout: float | None = None) -> GroupCall[P, R]:
        """The same call with a time limit of its own, in seconds."""
        return type(self)(self._group, self._method, timeout)

    def __repr__(self) -> str:
        return f"<{self._group.processes.name}.{self._method.full_name}{self._method.signature}>"


def group_call(group: Group, method: Method) -> GroupCall[..., Any]:
    """A call whose type has the method's name and docstring, for traces and `help()`."""
    call_type = type(method.name, (GroupCall,), {"__doc__": method.doc})
    call: GroupCall[..., Any] = call_type(group, method)
    return call


def _value(argument: Any) -> Any:
    return argument.value() if isinstance(argument, DataProtoFuture) else _whole_value(argument)


def _whole_value(argument: Any) -> Any:
    """The value for a user's dispatch function, which cannot read rows that lie elsewhere."""
    return argument.get() if is_future(argument) else argument

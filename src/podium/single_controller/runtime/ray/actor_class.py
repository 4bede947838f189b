"""The actor class that Ray runs: a subclass of the user's class, with an entry for each registered method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import ray

from podium.single_controller.rank.user_code import called_as
from podium.single_controller.routing.registration import classes_by_role, registration_of
from podium.single_controller.runtime.base import Reply
from podium.single_controller.runtime.ray.actor import AsyncRankActor, RankActor
from podium.single_controller.runtime.ray.call_message import EMPTY, CallMessage


def entry_name(role: str | None, method: str, reply: Reply) -> str:
    """The actor's method behind a method of the worker."""
    return f"podium_{reply.value}_{called_as(role, method)}"


ANY_METHOD = "podium_any"
"""The entry for methods without one of their own: `(role, name, reply, *message)`."""


def actor_class(worker_class: type) -> type:
    """A subclass of the user's class with its name and methods, and entries for its registered methods and its roles'."""
    # Being found under no module, it is pickled by value; so is its base, if that was defined in the driver's __main__, and
    # any other base is imported by the worker.
    known = entries_of(worker_class)
    is_async = is_asynchronous(worker_class, known)
    make, any_method = (_async_entry, _any_async) if is_async else (_entry, _any)
    entries = {
        entry_name(role, name, reply): _returning(reply, (_awaiting_entry if is_coroutine else make)(role, name, reply))
        for (role, name), is_coroutine in known.items()
        for reply in Reply
    }
    members = {"__module__": worker_class.__module__, ANY_METHOD: any_method, **entries}
    return type(worker_class.__name__, (AsyncRankActor if is_async else RankActor, worker_class), members)


def is_asynchronous(worker_class: type, entries: Mapping[tuple[str | None, str], bool]) -> bool:
    """Whether a rank of this class is an asynchronous actor: for a coroutine method of its own, or of one of its roles.

    `entries` are those of `entries_of`.
    """
    return any(entries.values()) or _has_coroutines(worker_class)


def entries_of(worker_class: type) -> dict[tuple[str | None, str], bool]:
    """(role, name) of the registered methods, the roles' included, and whether each is a coroutine function."""
    return {
        (role, name): registration.is_async
        for role, owner in classes_by_role(worker_class).items()
        for name in dir(owner)
        if (registration := registration_of(inspect.getattr_static(owner, name)))
    }


@contextmanager
def signatures_kept(worker_class: type) -> Iterator[None]:
    """Put back what Ray writes into the signatures of a class's methods, in the driver, when it makes an actor class of it."""
    members = (inspect.getattr_static(worker_class, name) for name in dir(worker_class))
    functions = {inspect.unwrap(member) for member in members if inspect.isfunction(member)}
    before = {function: function.__dict__.get("__signature__") for function in functions}
    try:
        yield
    finally:
        for function, signature in before.items():
            if signature is None:
                function.__dict__.pop("__signature__", None)
            else:
                function.__dict__["__signature__"] = signature


def _has_coroutines(worker_class: type) -> bool:
    """Ray makes an actor asynchronous for any coroutine method, registered or not."""
    members = [inspect.getattr_static(worker_class, name) for name in dir(worker_class)]
    return any(inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member) for member in members)


def num_returns(reply: Reply) -> int:
    """How many objects an entry returns."""
    return 2 if reply is Reply.REFERENCE else 1


def _returning(reply: Reply, entry: Callable[..., Any]) -> Callable[..., Any]:
    return cast(Callable[..., Any], ray.method(num_returns=num_returns(reply))(entry))


def _entry(role: str | None, name: str, reply: Reply) -> Callable[..., Any]:
    # One entry per method: to send its name as an argument of a common entry costs Ray 20 to 30 % of an empty call.
    def call(self: RankActor, *message: Any) -> Any:
        return self._podium_call(role, name, reply, CallMessage.from_positional(message) if message else EMPTY)

    return call


def _async_entry(role: str | None, name: str, reply: Reply) -> Callable[..., Any]:
    async def call(self: AsyncRankActor, *message: Any) -> Any:
        read = CallMessage.from_positional(message)
        await self._podium_gate.wait_turn(read.number)
        return await self._podium_on_thread(self._podium_call, role, name, reply, read)

    return call


def _awaiting_entry(role: str | None, name: str, reply: Reply) -> Callable[..., Any]:
    async def call(self: AsyncRankActor, *message: Any) -> Any:
        return await self._podium_await(role, name, reply, CallMessage.from_positional(message))

    return call


def _any(self: RankActor, role: str | None, name: str, reply: Reply, *message: Any) -> Any:
    return self._podium_call(role, name, reply, CallMessage.from_positional(message))


async def _any_async(self: AsyncRankActor, role: str | None, name: str, reply: Reply, *message: Any) -> Any:
    target = self if role is None else self.fused_worker_dict.get(role)  # type: ignore[attr-defined]  # a Worker's
    is_coroutine = inspect.iscoroutinefunction(getattr(target, name, None))
    entry = (_awaiting_entry if is_coroutine else _async_entry)(role, name, reply)
    return await entry(self, *message)

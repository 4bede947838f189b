"""What runs in a rank's process on Ray: an actor class made of the user's class, with an entry for each method.

A rank's constructor and sync methods run on one thread in call order: the actor's own, or, where a method is a coroutine
function, a thread beside the loop that all coroutines share. Ray's construction of the actor does nothing: the worker is
built by a call, so that a constructor's failure is told like any other, and after the ranks know where to meet.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import CoroutineType
from typing import Any, NoReturn, cast

import cloudpickle
import psutil  # Ray brings it along, and `import ray` makes it importable
import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

from podium.cores import num_cores
from podium.errors import ResourceError, WorkerError
from podium.protocol.rows import parted_result
from podium.single_controller.placement.plan import GPU
from podium.single_controller.rank.context import RankContext, become
from podium.single_controller.rank.devices import device_index
from podium.single_controller.rank.interfaces import socket_interfaces
from podium.single_controller.rank.user_code import (
    call_method,
    called_as,
    method_of,
    run_on_loop,
    run_to_end,
    setup_failure,
    use_torch_threads,
    worker_error,
)
from podium.single_controller.routing.registration import classes_by_role, registration_of
from podium.single_controller.runtime.base import CONSTRUCTOR, Reply
from podium.single_controller.runtime.copies import detached, detached_copy
from podium.single_controller.runtime.payload import NOTHING, HoldsReference, pack
from podium.single_controller.runtime.process_probe import ProcessProbe, install_probe
from podium.single_controller.runtime.ray.call_message import EMPTY, CallMessage
from podium.single_controller.runtime.ray.store import encode_body, fetch_argument, read_beside_loop
from podium.single_controller.runtime.sequencing import SequenceGate

LOOPBACK = "127.0.0.1"
ACCOUNT = "_podium_account"
"""The attribute of an exception that holds the WorkerError made of it."""


@dataclass(frozen=True)
class Place:
    """Where a rank's process is."""

    node_id: str
    node: str
    address: str
    pid: int
    cores: int
    """That this process may use."""
    probe: ProcessProbe


@dataclass(frozen=True)
class RankAddress:
    """What a process that did not start a rank has to know of it."""

    context: RankContext
    place: Place
    name: str
    """Its name in the cluster, empty where it has none."""
    placement_group: PlacementGroup | None = None
    handle: Any = None
    """Its actor."""


def is_reference(value: object) -> bool:
    """Whether only Ray may carry the value, which counts who holds it."""
    return isinstance(value, ray.ObjectRef | ray.actor.ActorHandle)


class RankActor:
    """What the runtime adds in front of the user's class."""

    _rank_context: RankContext  # the very attribute of `Worker`, which was made before its rank was known

    def __init__(self) -> None:
        pass

    def podium_locate(self) -> Place:
        """Where this process is; from here on it can be watched from outside."""
        node_id = ray.get_runtime_context().get_node_id()
        return Place(node_id, socket.gethostname(), _address(), os.getpid(), num_cores(), install_probe())

    def podium_rank_address(self) -> RankAddress:
        """For a driver that did not start this rank."""
        name = ray.get_runtime_context().get_actor_name() or ""
        return RankAddress(self._rank_context, RankActor.podium_locate(self), name, get_current_placement_group())

    def podium_host_store(self, address: str, port_range: tuple[int, int] | None) -> int:
        """Open the rendezvous of the group in this process; returns its port."""
        # We bind the socket and hand it over: the port cannot be taken in between, and nothing else listens.
        listener = _listen(address, port_range)
        port: int = listener.getsockname()[1]
        self._podium_store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return port

    def podium_set_up_node(self, setup: Callable[[], object]) -> str | None:
        """Why this node is not ready, None where it is."""
        return setup_failure(setup)

    def podium_start(self, context: RankContext, *message: Any) -> None:
        """Construct the user's worker as this rank, with the arguments of the message."""
        context = self._rank_context = _with_device(context)
        _set_environment(context)
        become(context)
        use_torch_threads(context.threads)  # of this thread, which is the one that runs sync methods
        args, kwargs = CallMessage.from_positional(message).arguments()
        self._podium_run(None, CONSTRUCTOR, cast(Any, super()).__init__, args, kwargs)

    def _podium_call(self, role: str | None, name: str, reply: Reply, message: CallMessage) -> Any:
        args, kwargs = self._podium_arguments(role, name, message)
        result = self._podium_run(role, name, call_method, (self, role, name, *args), kwargs)
        try:
            return self._podium_reply(result, reply)
        except Exception as error:  # whatever a foreign class does when it is pickled
            raise _with_account(self._rank_context, called_as(role, name), error) from None

    def _podium_reply(self, result: Any, reply: Reply) -> Any:
        if reply is Reply.NOTHING:
            return NOTHING
        if reply is Reply.PLAIN:
            return self._podium_plain(result)
        found = parted_result(result) if reply is Reply.REFERENCE else None
        header, body = (result, None) if found is None else (found[0], encode_body(found[1]))
        try:
            packed: Any = pack(header, is_reference)
        except HoldsReference:
            packed = self._podium_plain(header)
        return (packed, body) if reply is Reply.REFERENCE else packed

    def _podium_plain(self, value: Any) -> Any:
        """What Ray is to write down itself."""
        return detached(value)

    def _podium_arguments(self, role: str | None, name: str, message: CallMessage) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if message is EMPTY:
            return (), {}
        args, kwargs = message.arguments()
        if not message.bodies:
            return args, kwargs
        try:
            rows = partial(fetch_argument, refs=message.bodies)
            return tuple(map(rows, args)), {key: rows(value) for key, value in kwargs.items()}
        except Exception as error:  # the call's failure
            raise _with_account(self._rank_context, called_as(role, name), error) from None

    def _podium_run(self, role: str | None, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return self._podium_finish(function(*args, **kwargs))
        except SystemExit as error:
            self._podium_leave(error)
        except BaseException as error:  # whatever it is, it is the call's failure and not the actor's
            raise _with_account(self._rank_context, called_as(role, name), error) from None

    def _podium_finish(self, result: Any) -> Any:
        return run_to_end(result, self._rank_context)

    def _podium_leave(self, error: SystemExit) -> NoReturn:
        raise error  # Ray ends the process

    def __repr__(self) -> str:
        """Ray shows it beside what the rank prints, and asks for it before the user's constructor has run."""
        shown = super().__repr__  # the user's
        try:
            return shown() if getattr(shown, "__objclass__", None) is not object else type(self).__name__
        except Exception:  # it needs what the constructor sets
            return type(self).__name__


class AsyncRankActor(RankActor):
    """A rank with coroutine methods. They share Ray's loop; everything else runs on one thread beside it."""

    def __init__(self) -> None:
        self._podium_thread = ThreadPoolExecutor(1, "podium-rank")
        self._podium_gate = SequenceGate()
        read_beside_loop()

    async def podium_locate(self) -> Place:  # type: ignore[override]  # Ray awaits what an actor's methods return
        return super().podium_locate()

    async def podium_host_store(self, address: str, port_range: tuple[int, int] | None) -> int:  # type: ignore[override]
        return super().podium_host_store(address, port_range)

    async def podium_set_up_node(self, setup: Callable[[], object]) -> str | None:  # type: ignore[override]
        found: str | None = await self._podium_on_thread(super().podium_set_up_node, setup)
        return found

    async def podium_start(self, context: RankContext, *message: Any) -> None:  # type: ignore[override]
        use_torch_threads(context.threads)  # the count is per thread, and this is the loop's
        self._podium_loop = asyncio.get_running_loop()
        await self._podium_on_thread(super().podium_start, context, *message)

    def _podium_plain(self, value: Any) -> Any:
        return detached_copy(value)  # Ray writes it down on its loop, when the next call may be changing it already

    def _podium_leave(self, error: SystemExit) -> NoReturn:
        # Raised on a loop or in its thread it would end that alone, and leave a process that answers nobody.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))

    def _podium_finish(self, result: Any) -> Any:
        # A coroutine, of a method that does not look like one, runs where the others do: they share locks and queues.
        return run_on_loop(result, self._rank_context, self._podium_loop) if type(result) is CoroutineType else result

    async def _podium_on_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._podium_thread, function, *args)

    async def _podium_await(self, role: str | None, name: str, reply: Reply, message: CallMessage) -> Any:
        try:
            if message.bodies:  # to read them waits, and the loop shall not
                args, kwargs = await asyncio.to_thread(self._podium_arguments, role, name, message)
        finally:
            await self._podium_gate.wait_turn(message.number)  # also where nothing could be read: those behind wait for this one
        if not message.bodies:
            args, kwargs = self._podium_arguments(role, name, message)
        try:
            return self._podium_reply(await method_of(self, role, name)(*args, **kwargs), reply)
        except SystemExit as error:
            self._podium_leave(error)
        except BaseException as error:
            raise _with_account(self._rank_context, called_as(role, name), error) from None


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


def _with_account(context: RankContext, method: str, error: BaseException) -> Exception:
    """The error itself, for those who read it from Ray, with our account of it; only the account, if it does not travel."""
    account = worker_error(context, method, error)
    if not isinstance(error, Exception) or isinstance(error, StopIteration | WorkerError):
        return account  # a StopIteration cannot leave a coroutine; and another group's WorkerError must not be taken for ours
    try:
        setattr(error, ACCOUNT, account)
        str(error).encode()
        cloudpickle.loads(cloudpickle.dumps(error))
    except Exception:  # whatever a foreign exception does when it is printed or pickled
        return account
    return error


def _listen(address: str, port_range: tuple[int, int] | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in (0,) if port_range is None else range(*port_range):
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            taken = error
    if port_range is None:
        raise ResourceError(f"the ranks cannot meet at {address}: {taken}; master_addr is an address of rank 0's node")
    low, high = port_range
    raise ResourceError(f"no port of master_port_range [{low}, {high}) is free on {address}: {taken}; give a longer range")


def _address() -> str:
    """Ray's address of this node."""
    return str(cast(Any, ray.util).get_node_ip_address())


def _with_device(context: RankContext) -> RankContext:
    """The context with what Ray reserved for this process."""
    reserved = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()[GPU]]
    index = device_index(reserved, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return replace(context, device_type="cuda" if reserved else "cpu", device_index=index)


def _set_environment(context: RankContext) -> None:
    os.environ.update(rank_environment(context))
    addresses = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
    address = LOOPBACK if context.master_addr == LOOPBACK else _address()
    for name, value in socket_interfaces(address, addresses).items():
        os.environ.setdefault(name, value)  # what the user has set stays


def rank_environment(context: RankContext) -> Mapping[str, str]:
    """The variables that tell torch.distributed, and code ported from verl, where a rank is."""
    return {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(context.local_rank),
        "LOCAL_WORLD_SIZE": str(context.local_world_size),
        "RAY_LOCAL_WORLD_SIZE": str(context.local_world_size),
        "MASTER_ADDR": str(context.master_addr),
        "MASTER_PORT": str(context.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 of init_process_group("gloo") then joins our store and opens none
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WG_BACKEND": "ray",
        "WG_PREFIX": context.group,
    }

"""The Ray runtime: every rank is an actor, on this machine or on a cluster that the driver has joined. Alone here imports ray.

A rank's constructor and methods run on one thread in call order, which a plain actor does and one with `async def`
methods does not: the actor class shows Ray no coroutine function. Where ranks of several nodes are placed is not here yet.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

from podium.errors import MissingExtraError, Origin, ResourceError, WorkerError, WorkerLostError
from podium.protocol import DataProto, object_column
from podium.single_controller.context import RankContext
from podium.single_controller.registration import registration_of
from podium.single_controller.resource_pool import ResourcePool
from podium.single_controller.runtime.base import CONSTRUCTOR, Answer, GroupSpec, Outcome, RankCall, Runtime, num_cores
from podium.single_controller.runtime.rank import run_as_rank, worker_error
from podium.single_controller.worker import Worker

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
except ImportError as error:
    raise MissingExtraError("ray", "ray", "runtime 'ray'") from error

LOCAL_CPUS = 64
"""Ranks that may live at once in a cluster that we start. Ray's CPUs are only counted, so this costs nothing."""
PLACEMENT_TIMEOUT_S = 120.0
"""Actors that have no process by then never get one: the cluster has no room."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Place:
    """Where a rank's process is."""

    node_id: str
    node: str
    pid: int


class RankActor:
    """What the runtime adds in front of the user's class. Ray's construction does nothing: the worker is built by a call,

    so that a constructor's failure is told like any other, and after the ranks know where to meet.
    """

    _rank_context: RankContext

    def __init__(self) -> None:
        pass

    def _podium_locate(self) -> Place:
        return Place(ray.get_runtime_context().get_node_id(), socket.gethostname(), os.getpid())

    def _podium_host_store(self) -> int:
        """Open the rendezvous of the group in this process; returns its port, on loopback."""
        # We bind the socket and hand it over: the port cannot be taken in between, and only loopback listens.
        listener = socket.create_server((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        self._podium_store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return port

    def _podium_start(self, context: RankContext, /, *args: Any, **kwargs: Any) -> None:
        self._rank_context = context
        _set_environment(context)
        self._podium_run(CONSTRUCTOR, cast(Any, super()).__init__, args, kwargs)

    def _podium_run(self, method: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return run_as_rank(self._rank_context, function, _writable(args), _writable(kwargs))
        except Exception as error:
            raise worker_error(self._rank_context, method, error) from None


@dataclass(frozen=True)
class RayTicket:
    """A call that an actor has been sent."""

    method: str
    ref: Any


class RayRuntime(Runtime):
    """One actor per rank of the group."""

    def __init__(self) -> None:
        self._actors: dict[int, Any] = {}
        self._contexts: list[RankContext] = []
        self._places: list[Place] = []

    def start(self, spec: GroupSpec) -> dict[int, RayTicket]:
        _connect(spec.pool.world_size)
        actor_class: Any = ray.remote(num_cpus=1, num_gpus=_gpus_per_rank(spec.pool))(_actor_class(spec.worker_class))
        self._actors = {rank: actor_class.remote() for rank in range(spec.pool.world_size)}
        self._places = self._await_places(spec)
        port = ray.get(self._actors[0]._podium_host_store.remote(), timeout=PLACEMENT_TIMEOUT_S)
        self._contexts = [replace(context, master_addr=LOOPBACK, master_port=port) for context in spec.contexts("ray")]
        return {
            rank: RayTicket(CONSTRUCTOR, actor._podium_start.remote(self._contexts[rank], *spec.args, **spec.kwargs))
            for rank, actor in self._actors.items()
        }

    def submit(self, rank: int, call: RankCall) -> RayTicket:
        # each argument is one of Ray's own, so that Ray carries a batch's buffers beside the pickle and not in it
        entry = getattr(self._actors[rank], _entry_name(call.method, call.answers))
        return RayTicket(call.method, entry.remote(*call.args, **call.kwargs))

    def wait(self, tickets: Mapping[int, RayTicket], timeout_s: float) -> dict[int, Outcome]:
        refs = [ticket.ref for ticket in tickets.values()]
        try:  # one round trip when all is well; ray.get also comes back at the first failure
            values = ray.get(refs, timeout=timeout_s)
        except RayError:
            ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
            return {rank: self._outcome(rank, ticket) for rank, ticket in tickets.items() if ticket.ref in ready}
        return {rank: Answer(_writable(value)) for rank, value in zip(tickets, values, strict=True)}

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            actor = self._actors.pop(rank, None)
            if actor is not None and ray.is_initialized():
                ray.kill(actor, no_restart=True)

    def close(self) -> None:
        # The cluster stays for the next group: starting one takes seconds. Ray's own atexit hook ends what `_connect` began.
        self.kill(list(self._actors))

    def _await_places(self, spec: GroupSpec) -> list[Place]:
        try:
            located = [actor._podium_locate.remote() for actor in self._actors.values()]
            places: list[Place] = ray.get(located, timeout=PLACEMENT_TIMEOUT_S)
        except GetTimeoutError:
            raise ResourceError(
                f"group {spec.name!r} needs {spec.pool.world_size} of Ray's {_total('CPU'):g} logical CPUs, which were not free "
                f"within {PLACEMENT_TIMEOUT_S:g} s: close another group, or first ray.init(address='local', num_cpus=...)"
            ) from None
        except RayError as error:
            raise ResourceError(f"the actors of group {spec.name!r} could not start: {error}") from error
        if len({place.node_id for place in places}) > 1:
            nodes = ", ".join(f"rank {rank} on {place.node}" for rank, place in enumerate(places))
            raise ResourceError(f"Ray put group {spec.name!r} on several nodes, which Podium cannot place yet: {nodes}")
        return places

    def _outcome(self, rank: int, ticket: RayTicket) -> Outcome:
        origin = Origin(self._contexts[rank].group, ticket.method, rank, self._places[rank].node, self._places[rank].pid)
        try:
            return Answer(_writable(ray.get(ticket.ref)))
        except RayActorError as error:
            message = "the rank's process died; Ray does not report the exit code"
            return WorkerLostError(origin, cause_type="ProcessDied", cause_message=message, remote_traceback=str(error))
        except RayTaskError as error:  # what the worker raised, or what Ray met when it packed the result
            if isinstance(error.cause, WorkerError):
                return error.cause
            kind, message = type(error.cause).__name__, str(error.cause)
            return WorkerError(origin, cause_type=kind, cause_message=message, remote_traceback=str(error))
        except RayError as error:
            return WorkerError(origin, cause_type=type(error).__name__, cause_message=str(error), remote_traceback="")


def _connect(world_size: int) -> None:
    if not ray.is_initialized():
        ray.init(
            address="local",  # a bare init would join whatever cluster another job runs on this machine
            include_dashboard=False,
            num_cpus=max(LOCAL_CPUS, num_cores(), world_size),
            logging_level=logging.ERROR,
            log_to_driver=True,  # what workers print is for whoever runs the driver
            _system_config={"prestart_worker_first_driver": False},  # else Ray starts an idle process for each logical CPU
        )
    total = _total("CPU")
    if total < world_size:
        raise ResourceError(
            f"{world_size} ranks need as many of Ray's logical CPUs, this cluster has {total:g}: call "
            f"ray.init(address='local', num_cpus={world_size}) before the first group"
        )


def _total(resource: str) -> float:
    resources: dict[str, float] = cast(Any, ray).cluster_resources()
    return resources.get(resource, 0)


def _gpus_per_rank(pool: ResourcePool) -> float:
    share = 1 / pool.max_colocate_count
    there = _total("GPU")
    enough = there >= pool.world_size * share
    if not enough and (pool.use_gpu or (pool.use_gpu is None and there)):
        raise ResourceError(
            f"{pool.world_size} ranks need {pool.world_size} x {share:g} GPUs, Ray has {there:g}: use fewer ranks, or say "
            "use_gpu=False for the CPU"
        )
    return share if enough and pool.use_gpu is not False else 0


def _actor_class(worker_class: type[Worker]) -> type:
    """A subclass of the user's class with its name and methods, and two entries for each registered method."""
    # Being found under no module, it is pickled by value; so is its base, if that was defined in the driver's __main__, and
    # any other base is imported by the worker.
    members = dict(inspect.getmembers_static(worker_class))
    registered = [name for name, member in members.items() if registration_of(member)]
    entries = {_entry_name(name, answers): _entry(name, answers) for name in registered for answers in (True, False)}
    hidden = {name: _not_async(member) for name, member in members.items() if _is_async(member)}
    return type(worker_class.__name__, (RankActor, worker_class), {"__module__": worker_class.__module__, **entries, **hidden})


def _entry_name(method: str, answers: bool) -> str:
    return f"_call_{method}" if answers else f"_call_{method}_quietly"


def _entry(method: str, answers: bool) -> Callable[..., Any]:
    # One entry per method: to send its name as an argument of a common entry costs Ray 20 to 30 % of an empty call.
    def call(self: RankActor, /, *args: Any, **kwargs: Any) -> Any:
        result = self._podium_run(method, getattr(self, method), args, kwargs)
        return result if answers else None

    return call


def _is_async(member: object) -> bool:
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)


def _not_async(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, still awaitable in the worker, which Ray does not recognise as a coroutine function."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def _set_environment(context: RankContext) -> None:
    local_size = str(context.local_world_size)
    os.environ.update(
        RANK=str(context.rank),
        WORLD_SIZE=str(context.world_size),
        LOCAL_RANK=str(context.local_rank),
        LOCAL_WORLD_SIZE=local_size,
        MASTER_ADDR=str(context.master_addr),
        MASTER_PORT=str(context.master_port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 of init_process_group("gloo") then joins our store and opens none
        TORCHELASTIC_RESTART_COUNT="0",
        WG_BACKEND="ray",
        RAY_LOCAL_WORLD_SIZE=local_size,
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def _writable(value: Any) -> Any:
    """The value with private arrays: those that Ray hands out are read-only views of memory that everyone shares."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if isinstance(value, DataProto):  # its tensors are private already, what its rows and its meta hold may not be
        for rows in value.non_tensor_batch.values():
            rows[:] = object_column([_writable(row) for row in rows])
        value.meta_info = _writable(value.meta_info)
        return value
    if type(value) is dict:
        return {key: _writable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_writable, value))
    return value

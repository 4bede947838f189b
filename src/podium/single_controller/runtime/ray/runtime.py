"""The Ray runtime: every rank is an actor, on this machine or on a cluster that the driver has joined.

Only this package imports ray: `actor` is what runs in a rank, `reservations` where ranks go, `cluster` what there is;
`attach` to ranks of another driver, `diagnostics` of ranks from outside.
"""

from __future__ import annotations

import copy
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from podium import process_probe
from podium.errors import (
    ConfigError,
    GroupClosedError,
    MissingExtraError,
    Origin,
    ResourceError,
    WorkerError,
    WorkerLostError,
)
from podium.protocol.blocks import Header
from podium.protocol.remote_rows import RemoteRows
from podium.single_controller.placement.rank_order import RankOrder
from podium.single_controller.placement.resource_pool import ResourcePool
from podium.single_controller.rank.context import RankContext
from podium.single_controller.rank.environment import forwarded
from podium.single_controller.rank.failures import report_of
from podium.single_controller.rank.rendezvous import LOOPBACK, rank_environment
from podium.single_controller.rank.user_code import called_as
from podium.single_controller.runtime.base import (
    CONSTRUCTOR,
    Answer,
    GroupSpec,
    Outcome,
    RankCall,
    Reply,
    Runtime,
    nodes_not_ready,
)
from podium.single_controller.runtime.diagnostics import Diagnostics
from podium.single_controller.runtime.replies import decode_reply

try:
    import ray
    from ray.exceptions import (
        ActorAlreadyExistsError,
        ActorHandleNotFoundError,
        GetTimeoutError,
        RayActorError,
        RayError,
        RayTaskError,
    )
except ImportError as error:
    raise MissingExtraError("ray", "ray", "runtime 'ray'") from error

from podium.single_controller.runtime.ray import cluster, reservations
from podium.single_controller.runtime.ray.actor import AsyncRankActor, Place, RankAddress
from podium.single_controller.runtime.ray.actor_class import (
    ANY_METHOD,
    actor_class,
    entries_of,
    entry_name,
    is_asynchronous,
    num_returns,
    signatures_kept,
)
from podium.single_controller.runtime.ray.attach import check_all_found, in_rank_order, named_actor, names_with, rank_addresses
from podium.single_controller.runtime.ray.call_message import CallMessage
from podium.single_controller.runtime.ray.diagnostics import diagnostics_by_node
from podium.single_controller.runtime.ray.store import block_of
from podium.single_controller.runtime.sequencing import OWNER, CallSequencer

SHUT_DOWN = "the Ray session that the ranks were started in was shut down: make the group anew"
ASYNC_CALLS = 10_000
"""Coroutine methods that may wait on one rank at once; Ray's own limit is 1,000, and the next call would hang unseen."""


Entry: TypeAlias = Callable[..., Any]
"""Sends a call to one method of one actor; returns what stands for its result."""


class RayTicket(NamedTuple):
    """A call that an actor has been sent."""

    method: str
    ref: Any
    reply: Reply = Reply.VALUE
    is_joined: bool = False
    block: Any = None
    """Of a reply by reference, the rows that stay."""


class RayRuntime(Runtime):
    """One actor per rank of the group."""

    def __init__(self) -> None:
        self._actors: dict[int, Any] = {}
        self._contexts: list[RankContext] = []
        self._places: list[Place] = []
        self._names: list[str] = []
        self._holder = object()
        self._foreign: set[Any] = set()
        """The placement groups of ranks that another driver has started."""
        self._has_entry: Collection[tuple[str | None, str]] = ()
        self._session = ""
        self._connection: object | None = None
        self._entries: dict[int, dict[tuple[str | None, str, Reply], Entry]] = {}
        """By rank, those that calls have used: Ray makes one anew whenever an actor is asked for it."""
        self._sequencer: CallSequencer | None = None
        """Of asynchronous actors only: others start calls in the order in which they were sent."""
        self._sending = threading.Lock()

    # -- the ranks' life ----------------------------------------------------------------------------------------------

    def start(self, spec: GroupSpec) -> dict[int, RayTicket]:
        _check_worker_env(spec)
        self._connect(spec.pool.world_size)
        bin_pack = bool(spec.options.get("bin_pack", True))
        reservations.hold(
            self._holder, spec.name, spec.pool, detached=spec.detached, bin_pack=bin_pack, within_s=spec.start_limit_s
        )
        order = reservations.order_of(spec.pool)
        seats = reservations.seats(spec.pool, order)
        self._make_actors(spec, order, seats)
        is_one_node = len({seat.spot.node_id for seat in seats}) == 1
        address = spec.master_addr or (LOOPBACK if is_one_node else seats[0].spot.address)
        located = [actor.podium_locate.remote() for actor in self._actors.values()]
        hosted = self._actors[0].podium_host_store.remote(address, spec.master_port_range)
        *self._places, port = self._await([*located, hosted], spec)
        self._contexts = [
            replace(context, master_addr=address, master_port=port) for context in _contexts(spec, order, self._places)
        ]
        self._set_up_nodes(spec)
        message = CallMessage.packing(spec.args, spec.kwargs).to_positional()
        return {
            rank: RayTicket(CONSTRUCTOR, actor.podium_start.remote(self._contexts[rank], *message))
            for rank, actor in self._actors.items()
        }

    def attach(
        self,
        worker_class: type,
        name_prefix: str | None,
        worker_names: Sequence[str] | None,
        handles: Sequence[Any] | None,
        timeout_s: float,
    ) -> GroupSpec:
        self._connect(1)
        given = list(handles or map(named_actor, worker_names or ()))
        found = given or list(map(named_actor, names_with(name_prefix, worker_class)))
        ranks = in_rank_order(rank_addresses(found, timeout_s))
        if not given:
            check_all_found(ranks)
        return replace(self._take_over(worker_class, ranks), name_prefix=name_prefix)

    def address(self) -> list[RankAddress]:
        names = self._names or [""] * len(self._contexts)
        ranks = zip(self._contexts, self._places, names, strict=True)
        return [RankAddress(*rank, handle=self._actors[number]) for number, rank in enumerate(ranks)]

    def reach(self, worker_class: type, address: list[RankAddress]) -> GroupSpec:
        self._connect(1)
        return self._take_over(worker_class, address)

    def _take_over(self, worker_class: type, ranks: Sequence[RankAddress]) -> GroupSpec:
        """Call these ranks, numbered as they come."""
        self._contexts = [rank.context for rank in ranks]
        self._places = [rank.place for rank in ranks]
        self._actors = {number: rank.handle for number, rank in enumerate(ranks)}
        self._foreign = {rank.placement_group for rank in ranks if rank.placement_group is not None}
        self._names = [rank.name for rank in ranks if rank.name]
        entries = self._has_entry = entries_of(worker_class)
        self._sequencer = CallSequencer(secrets.token_hex(8)) if is_asynchronous(worker_class, entries) else None
        name = "+".join(dict.fromkeys(context.group for context in self._contexts))
        on_nodes = Counter(place.node_id for place in self._places)
        return GroupSpec(name, worker_class, (), {}, ResourcePool(list(on_nodes.values())), detached=True)

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            with self._sending:
                actor = self._actors.pop(rank, None)
                self._entries.pop(rank, None)
            if actor is not None and self._is_connected:
                with suppress(ActorHandleNotFoundError):  # of a session that was shut down, and the actor with it
                    ray.kill(actor, no_restart=True)

    def close(self) -> None:
        # The cluster stays for the next group: starting one takes seconds. Ray's own atexit hook ends what `connect` began.
        self.kill(list(self._actors))
        reservations.release(self._holder)
        if self._foreign and self._is_connected:
            reservations.remove_if_unused(self._foreign)
        self._foreign = set()

    def workers(self, keeper: object = None) -> Sequence[Any]:
        actors = [self._actors[rank] for rank in sorted(self._actors)]
        return actors if keeper is None else [_kept(actor, keeper) for actor in actors]

    def worker_names(self) -> list[str]:
        return list(self._names)

    # -- calls --------------------------------------------------------------------------------------------------------

    def submit(self, calls: Sequence[RankCall], reply: Reply, quiet: Collection[int] = ()) -> dict[int, RayTicket]:
        if not self._is_connected:
            raise GroupClosedError(SHUT_DOWN)
        messages = [CallMessage.of(call) for call in calls]  # first of all: what cannot be sent to one rank is sent to none
        tickets = dict[int, RayTicket]()
        with self._sending:  # the driver and its deferred calls: what is counted first is sent first
            for call, message in zip(calls, messages, strict=True):
                for rank in call.ranks:
                    tickets[rank] = self._send(rank, call, message, Reply.NOTHING if rank in quiet else reply)
        return tickets

    def _send(self, rank: int, call: RankCall, message: CallMessage, reply: Reply) -> RayTicket:
        entry = self._entries.get(rank, {}).get((call.role, call.method, reply)) or self._new_entry(rank, call, reply)
        number = self._sequencer.number(rank, counts=not message.values) if self._sequencer else None
        found = entry(*message.to_positional(number))
        ref, block = found if reply is Reply.REFERENCE else (found, None)
        return RayTicket(called_as(call.role, call.method), ref, reply, call.is_joined, block)

    def _new_entry(self, rank: int, call: RankCall, reply: Reply) -> Entry:
        actor = self._actors.get(rank)
        if actor is None:
            raise GroupClosedError(f"rank {rank} cannot run {called_as(call.role, call.method)!r}: it was ended")
        if (call.role, call.method) in self._has_entry:
            entry: Entry = getattr(actor, entry_name(call.role, call.method, reply)).remote
        else:
            any_method = getattr(actor, ANY_METHOD).options(num_returns=num_returns(reply))
            entry = partial(any_method.remote, call.role, call.method, reply)
        return self._entries.setdefault(rank, {}).setdefault((call.role, call.method, reply), entry)

    def wait(self, tickets: Mapping[int, RayTicket], timeout_s: float) -> dict[int, Outcome]:
        if not self._is_connected:  # to ask Ray for a reference now would start, or join, whatever cluster it finds
            return {rank: self._lost(rank, ticket, SHUT_DOWN) for rank, ticket in tickets.items()}
        refs = [ticket.ref for ticket in tickets.values()]
        try:  # one round trip when all is well; ray.get also comes back at the first failure
            values = ray.get(refs, timeout=timeout_s)
        except RayError:
            ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
            found = {rank: self._outcome(rank, ticket) for rank, ticket in tickets.items() if ticket.ref in ready}
        else:
            found = {rank: self._answer(rank, tickets[rank], value) for rank, value in zip(tickets, values, strict=True)}
        if self._sequencer:
            self._sequencer.answered([rank for rank in found if tickets[rank].method != CONSTRUCTOR])
        return found

    def reference(self, ticket: RayTicket) -> Any:
        return ticket.ref

    def diagnostics(self, ranks: Iterable[int], *, stacks: bool = False) -> dict[int, Diagnostics]:
        by_node: dict[str, list[int]] = {}
        for rank in ranks if self._is_connected else ():
            if rank < len(self._places):
                by_node.setdefault(self._places[rank].node_id, []).append(rank)
        places = {node_id: [self._places[rank] for rank in group] for node_id, group in by_node.items()}
        found = diagnostics_by_node(places, stacks)
        return {rank: one for node_id, group in by_node.items() for rank, one in zip(group, found[node_id], strict=True)}

    # -- inside -------------------------------------------------------------------------------------------------------

    def _make_actors(self, spec: GroupSpec, order: RankOrder, seats: Sequence[reservations.Seat]) -> None:
        with signatures_kept(spec.worker_class):
            self._make_each(spec, order, seats)

    def _make_each(self, spec: GroupSpec, order: RankOrder, seats: Sequence[reservations.Seat]) -> None:
        made = actor_class(spec.worker_class)
        is_async = issubclass(made, AsyncRankActor)
        self._sequencer = CallSequencer(OWNER) if is_async else None
        self._has_entry = entries_of(spec.worker_class)
        remote: Any = ray.remote(made)
        self._names = _actor_names(spec, order)
        runtime_env = _runtime_env(spec, hides_gpus=reservations.must_hide_gpus(seats))
        for rank, seat in enumerate(seats):
            options: dict[str, Any] = {
                "num_cpus": seat.num_cpus,
                "num_gpus": seat.num_gpus,
                "scheduling_strategy": seat.strategy,
                **({"name": self._names[rank]} if self._names else {}),
                **({"lifetime": "detached"} if spec.detached else {}),
                **({"max_concurrency": ASYNC_CALLS} if is_async else {}),
                **{name: value for name, value in spec.options.items() if name not in ("bin_pack", "runtime_env")},
            }
            if runtime_env:
                options["runtime_env"] = runtime_env
            try:
                self._actors[rank] = remote.options(**options).remote()
            except ActorAlreadyExistsError as error:
                raise ResourceError(
                    f"rank {rank} of group {spec.name!r} cannot be named {self._names[rank]!r}, as another actor is: give "
                    f"another name_prefix than {spec.name_prefix!r}, or end the other group"
                ) from error
            except ValueError as error:  # it asks for what its bundle does not have
                raise ResourceError(f"rank {rank} of group {spec.name!r} fits into no place of its pool: {error}") from error

    def _await(self, refs: list[Any], spec: GroupSpec) -> list[Any]:
        try:
            return ray.get(refs, timeout=spec.start_limit_s)
        except GetTimeoutError:
            raise reservations.no_room(spec.pool, spec.name, spec.start_limit_s) from None
        except RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, ResourceError):
                raise cause from None
            raise ResourceError(f"the ranks of group {spec.name!r} could not start: {cause or error}") from error

    def _set_up_nodes(self, spec: GroupSpec) -> None:
        """Run `spec.node_setup` on the first rank of each node; ResourceError names all nodes that are not ready."""
        if spec.node_setup is None:
            return
        first = [rank for rank, context in enumerate(self._contexts) if context.local_rank == 0]
        refs = {rank: self._actors[rank].podium_set_up_node.remote(spec.node_setup) for rank in first}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=spec.call_timeout_s)
        reasons = {rank: reason for rank, ref in refs.items() if (reason := _setup_failure(ref)) is not None}
        if reasons:
            names = {rank: f"{self._places[rank].node} ({self._places[rank].address})" for rank in reasons}
            raise nodes_not_ready(spec.name, {names[rank]: reason for rank, reason in reasons.items()}, len(first))

    def _connect(self, world_size: int) -> None:
        cluster.connect(world_size)
        self._session, self._connection = cluster.session(), cluster.connection()

    @property
    def _is_connected(self) -> bool:
        """Whether Ray is still in the session that the ranks live in."""
        return self._connection is not None and cluster.connection() == self._connection

    def _lost(self, rank: int, ticket: RayTicket, message: str, trace: str = "") -> WorkerLostError:
        origin = self._origin(rank, ticket)
        return WorkerLostError(origin, cause_type="ProcessDied", cause_message=message, remote_traceback=trace)

    def _answer(self, rank: int, ticket: RayTicket, value: Any) -> Outcome:
        try:
            found = decode_reply(value, ticket.reply, is_joined=ticket.is_joined)
            if not isinstance(found, Header):
                return Answer(found)
            return Answer(RemoteRows.of(found, block_of(found, ticket.block, self._places[rank].node_id, self._session)))
        except Exception as error:  # whatever a foreign class does when it is unpickled
            message = f"the rank's result could not be read here: {type(error).__name__}: {error}"
            return WorkerError(self._origin(rank, ticket), cause_type="DataError", cause_message=message, remote_traceback="")

    def _origin(self, rank: int, ticket: RayTicket) -> Origin:
        return Origin(self._contexts[rank].group, ticket.method, rank, self._places[rank].node, self._places[rank].probe.pid)

    def _outcome(self, rank: int, ticket: RayTicket) -> Outcome:
        try:
            return self._answer(rank, ticket, ray.get(ticket.ref))
        except RayError as error:
            if ticket.block is not None:  # it holds the same failure, which Ray prints unless it was fetched
                with suppress(RayError):
                    ray.get(ticket.block, timeout=0)
            return self._failure(rank, ticket, error)

    def _failure(self, rank: int, ticket: RayTicket, error: RayError) -> WorkerError:
        place, origin = self._places[rank], self._origin(rank, ticket)
        if isinstance(error, RayTaskError):  # what the worker raised, another actor's death included, or what Ray met packing it
            return report_of(origin, error.cause, str(error))
        if isinstance(error, RayActorError):
            known = process_probe.memory_kills(place.probe) if place.node_id == cluster.here() else ""
            message = "; ".join(filter(None, ["the rank's process died; Ray does not report the exit code", known]))
            return self._lost(rank, ticket, message, str(error))
        return WorkerError(origin, cause_type=type(error).__name__, cause_message=str(error), remote_traceback="")


def _kept(actor: Any, keeper: object) -> Any:
    """Another handle of the actor, which has the keeper. It stays behind where Ray sends the handle to another process."""
    handle = copy.copy(actor)
    handle._podium_keeper = keeper
    return handle


def _contexts(spec: GroupSpec, order: RankOrder, places: Sequence[Place]) -> list[RankContext]:
    """As declared, but counted on the nodes that the ranks came to be on, and with threads by the cores there."""
    locals_ = zip(order.local_rank_list(), order.local_world_size_list(), places, strict=True)
    return [
        replace(context, local_rank=local_rank, local_world_size=size, threads=spec.threads_on(place.cores, size))
        for context, (local_rank, size, place) in zip(spec.contexts("ray"), locals_, strict=True)
    ]


def _setup_failure(ref: Any) -> str | None:
    try:
        found: str | None = ray.get(ref, timeout=0)
    except GetTimeoutError:
        return "its setup did not end in time: give call_timeout_s more seconds"
    except RayError as error:
        return f"its setup ended without an answer: {error}"
    return found


def _actor_names(spec: GroupSpec, order: RankOrder) -> list[str]:
    if spec.name_prefix is None and not spec.detached:
        return []
    prefix = spec.name_prefix or secrets.token_hex(3)
    return [
        f"{prefix}{spec.worker_class.__name__}_{node}:{local_rank}"
        for node, count in enumerate(order.process_on_nodes)
        for local_rank in range(count)
    ]


def _runtime_env(spec: GroupSpec, *, hides_gpus: bool) -> dict[str, Any]:
    # User code may ask torch for GPUs as it is imported, so they are hidden from the process's start. A process with variables of
    # its own takes Ray longer to start. So GPUs are hidden only on nodes that have any, and the driver's variables are forwarded
    # only where another process started Ray: the ranks of this driver's own cluster have them already.
    given = dict(spec.options.get("runtime_env", {}))
    of_driver = {} if cluster.is_own() else forwarded(os.environ)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if hides_gpus else {}
    env_vars = {**hidden, **of_driver, **given.get("env_vars", {}), **spec.worker_env}
    return {**given, "env_vars": env_vars} if env_vars else given


def _check_worker_env(spec: GroupSpec) -> None:
    ours = sorted(set(spec.worker_env) & set(rank_environment(RankContext())))
    if ours:
        raise ConfigError(f"worker_env sets {', '.join(ours)}, which the runtime sets itself for every rank: leave them out")
    wrong = {name: value for name, value in spec.worker_env.items() if not _is_variable(name, value)}
    if wrong:
        raise ConfigError(f"an environment variable has a name without '=' and a text as its value, got {wrong}")


def _is_variable(name: object, value: object) -> bool:
    is_text = isinstance(name, str) and isinstance(value, str) and "\0" not in name + value
    return is_text and bool(name) and "=" not in str(name)

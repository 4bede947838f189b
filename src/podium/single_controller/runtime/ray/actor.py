"""What runs in a rank's process on Ray: the base of the actor class that `actor_class` makes of the user's class.

A rank's constructor and sync methods run on one thread in call order: the actor's own, or, where a method is a coroutine
function, a thread beside the loop that all coroutines share. Ray's construction of the actor does nothing. The worker is built
by a call, after the ranks know where to meet, so that the constructor's failure is reported like any other.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import CoroutineType
from typing import Any, NoReturn, cast

import psutil  # Ray brings it along, and `import ray` makes it importable
import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group

from podium.cores import num_cores
from podium.process_probe import ProcessProbe, install_probe
from podium.single_controller.placement.plan import GPU
from podium.single_controller.rank.context import RankContext, become
from podium.single_controller.rank.devices import device_index
from podium.single_controller.rank.failures import setup_failure, with_report
from podium.single_controller.rank.rendezvous import host_store, set_environment
from podium.single_controller.rank.user_code import (
    call_method,
    called_as,
    method_of,
    run_on_loop,
    run_to_end,
    use_torch_threads,
)
from podium.single_controller.runtime.base import CONSTRUCTOR, Reply
from podium.single_controller.runtime.copies import detached, detached_copy
from podium.single_controller.runtime.ray.call_message import EMPTY, CallMessage, is_reference
from podium.single_controller.runtime.ray.store import fetch_argument, read_beside_loop
from podium.single_controller.runtime.replies import encode_reply
from podium.single_controller.runtime.sequencing import SequenceGate


@dataclass(frozen=True)
class Place:
    """Where a rank's process is."""

    node_id: str
    node: str
    address: str
    cores: int
    """That this process may use."""
    probe: ProcessProbe


@dataclass(frozen=True)
class RankAddress:
    """What a process that did not start a rank must know of it."""

    context: RankContext
    place: Place
    name: str
    """Its name in the cluster, "" for a rank without a name."""
    placement_group: PlacementGroup | None = None
    handle: Any = None
    """Its actor."""


class RankActor:
    """What the runtime adds in front of the user's class."""

    _rank_context: RankContext  # the very attribute of `Worker`, which was made before its rank was known

    def __init__(self) -> None:
        pass

    def podium_locate(self) -> Place:
        """Where this process is; from here on it can be probed from outside."""
        node_id = ray.get_runtime_context().get_node_id()
        return Place(node_id, socket.gethostname(), _address(), num_cores(), install_probe())

    def podium_rank_address(self) -> RankAddress:
        """For a driver that did not start this rank."""
        name = ray.get_runtime_context().get_actor_name() or ""
        return RankAddress(self._rank_context, RankActor.podium_locate(self), name, get_current_placement_group())

    def podium_host_store(self, address: str, port_range: tuple[int, int] | None) -> int:
        """Open the rendezvous of the group in this process; returns its port."""
        self._podium_store, port = host_store(address, port_range)
        return port

    def podium_set_up_node(self, setup: Callable[[], object]) -> str | None:
        """Why this node is not ready, None where it is."""
        return setup_failure(setup)

    def podium_start(self, context: RankContext, *message: Any) -> None:
        """Construct the user's worker as this rank, with the arguments of the message."""
        context = self._rank_context = _with_device(context)
        set_environment(context, _address(), _addresses_by_interface())
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
            raise with_report(self._rank_context, called_as(role, name), error) from None

    def _podium_reply(self, result: Any, reply: Reply) -> Any:
        return encode_reply(result, reply, is_reference, self._podium_plain)

    def _podium_plain(self, value: Any) -> Any:
        """What Ray is to write down itself."""
        return detached(value)

    def _podium_arguments(self, role: str | None, name: str, message: CallMessage) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if message is EMPTY:
            return (), {}
        args, kwargs = message.arguments()
        if not message.blocks:
            return args, kwargs
        try:
            rows = partial(fetch_argument, refs=message.blocks)
            return tuple(map(rows, args)), {key: rows(value) for key, value in kwargs.items()}
        except Exception as error:  # the call's failure
            raise with_report(self._rank_context, called_as(role, name), error) from None

    def _podium_run(self, role: str | None, name: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            return self._podium_finish(function(*args, **kwargs))
        except SystemExit as error:
            self._podium_leave(error)
        except BaseException as error:  # whatever it is, it is the call's failure and not the actor's
            raise with_report(self._rank_context, called_as(role, name), error) from None

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
        # Raised on a loop or in its thread, it would end only that, and leave a process that answers no call.
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
            if message.blocks:  # to read them waits, and the loop shall not
                args, kwargs = await asyncio.to_thread(self._podium_arguments, role, name, message)
        finally:
            await self._podium_gate.wait_turn(message.number)  # also where nothing could be read: those behind wait for this one
        if not message.blocks:
            args, kwargs = self._podium_arguments(role, name, message)
        try:
            return self._podium_reply(await method_of(self, role, name)(*args, **kwargs), reply)
        except SystemExit as error:
            self._podium_leave(error)
        except BaseException as error:
            raise with_report(self._rank_context, called_as(role, name), error) from None


def _address() -> str:
    """Ray's address of this node."""
    return str(cast(Any, ray.util).get_node_ip_address())


def _with_device(context: RankContext) -> RankContext:
    """The context with what Ray reserved for this process."""
    reserved = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids()[GPU]]
    index = device_index(reserved, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return replace(context, device_type="cuda" if reserved else "cpu", device_index=index)


def _addresses_by_interface() -> dict[str, list[str]]:
    return {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}

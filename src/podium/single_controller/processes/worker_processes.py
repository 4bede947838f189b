"""`WorkerProcesses`: the processes behind a group, or behind several groups of roles. They start, break and close together."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, Self

from podium.errors import ConfigError, UnsupportedByRuntime, check_kind
from podium.runtimes import capabilities_of, require
from podium.single_controller.processes.deferred import DeferredCall, DeferredCalls
from podium.single_controller.processes.in_flight import InFlightCalls, Unread
from podium.single_controller.processes.lifecycle import Lifecycle, State
from podium.single_controller.processes.pending_call import PendingCall
from podium.single_controller.processes.status import CallStatus, GroupStatus
from podium.single_controller.processes.stragglers import SLOW_AFTER_S
from podium.single_controller.routing.mesh import Mesh
from podium.single_controller.runtime.base import (
    CONSTRUCTOR,
    START_TIMEOUT_S,
    GroupSpec,
    RankCall,
    Reply,
    Runtime,
    build_runtime,
    checked_start_timeout,
)

DEFAULT_CALL_TIMEOUT_S = 3600.0
"""Every wait has a limit. An hour is longer than any step, so it ends hangs and nothing else."""


class Keeper:
    """Ranks are ended once neither the group nor a handle that it gave out refers to this object."""


class Address(NamedTuple):
    """What a process needs to call ranks that another process started."""

    runtime: str
    worker_class: type
    ranks: Any
    """For the runtime alone."""
    options: dict[str, Any]
    """Those of the group's constructor."""


class WorkerProcesses:
    """Starts, calls, restarts and ends the ranks that one `GroupSpec` describes."""

    _handles: list[Any] | None
    """The handles that `workers` returned."""

    def __init__(
        self,
        spec: GroupSpec,
        runtime: str,
        *,
        call_timeout_s: float | None = None,
        slow_after_s: float = SLOW_AFTER_S,
        auto_padding: bool = False,
    ) -> None:
        self.name = spec.name
        self.world_size = spec.pool.world_size
        self.runtime_name = runtime
        self.auto_padding = auto_padding
        self.meshes: dict[tuple[str | None, str | None], Mesh] = {}
        """By role and name, as the workers reported them; cleared by a restart."""
        self._call_timeout_s = DEFAULT_CALL_TIMEOUT_S if call_timeout_s is None else self._checked(call_timeout_s)
        self.spec = replace(spec, call_timeout_s=self._call_timeout_s)
        if not slow_after_s > 0:
            raise ConfigError(f"slow_after_s must be more than 0 seconds, got {slow_after_s:g}")
        check_kind("auto_padding", auto_padding, bool, "True or False")
        self._slow_after_s = slow_after_s
        self._took_s: dict[str, float] = {}
        """By method, how long its last call took, in seconds."""
        self._is_owner = True
        self._begin()

    @classmethod
    def attached(
        cls,
        worker_class: type,
        runtime: str,
        name_prefix: str | None,
        worker_names: Sequence[str] | None,
        worker_handles: Sequence[Any] | None,
        options: Mapping[str, Any],
    ) -> Self:
        """Those that another driver started as detached ones. `options` are the constructor's, and start_timeout_s."""
        require(runtime, "detached", "groups that outlive their driver")
        reached = build_runtime(runtime)
        ours = {"start_timeout_s": START_TIMEOUT_S, **options}
        timeout_s = checked_start_timeout(ours.pop("start_timeout_s"))
        spec = reached.attach(worker_class, name_prefix, worker_names, worker_handles, timeout_s)
        return cls._on(reached, spec, runtime, ours)

    def lent(self) -> Self:
        """The same ranks for a receiver in this process that does not own them: its `close()` does not end them."""
        processes = copy.copy(self)  # shares the keeper
        processes._is_owner, processes._when_dropped = False, None
        processes.lifecycle, processes._in_flight, processes._deferred = Lifecycle(), InFlightCalls(), DeferredCalls()
        if self.lifecycle.state in (State.BROKEN, State.CLOSED):
            processes.lifecycle.state, processes.lifecycle.reason = self.lifecycle.state, self.lifecycle.reason
        return processes

    def address(self) -> Address:
        """The argument of `reached` in another process. UnsupportedByRuntime if other processes cannot reach the ranks."""
        self.lifecycle.check_open(f"pass group {self.name!r} on")
        require(self.runtime_name, "own_processes", f"calls from another process (to group {self.name!r})")
        options = {"slow_after_s": self._slow_after_s, "auto_padding": self.auto_padding, "call_timeout_s": self._call_timeout_s}
        return Address(self.runtime_name, self.spec.worker_class, self.runtime.address(), options)

    @classmethod
    def reached(cls, address: Address) -> Self:
        """Those that another process owns and has passed on."""
        runtime = build_runtime(address.runtime)
        return cls._on(runtime, runtime.reach(address.worker_class, address.ranks), address.runtime, address.options)

    @classmethod
    def _on(cls, reached: Runtime, spec: GroupSpec, runtime: str, options: Mapping[str, Any]) -> Self:
        processes = cls(spec, runtime, **options)
        processes.runtime = reached
        processes._is_owner = False
        return processes

    def workers(self) -> list[Any]:
        """The ranks' handles, by rank. Each handle keeps all ranks alive, unless they are detached."""
        if self._keeper is None:
            return list(self.runtime.workers())
        if self._handles is None:
            self._handles = list(self.runtime.workers(self._keeper))
        return list(self._handles)

    @cached_property
    def flat_mesh(self) -> Mesh:
        """The mesh in which every rank has a shard of its own."""
        return Mesh.flat(self.world_size)

    # -- calls --------------------------------------------------------------------------------------------------------

    def admit(self, method: str) -> None:
        """Check before a call: GroupClosedError unless the group is ready.

        Raises a failed call that the driver has not read, but never in the thread that sends deferred calls.
        """
        self.lifecycle.check_ready(self.name, method)
        if self._in_flight.has_unread and not self._deferred.is_sender:
            failed = self._in_flight.unread_failure()
            if failed is not None:
                failed.get()

    def submit(
        self,
        method: str,
        calls: Sequence[RankCall],
        reply: Reply,
        quiet: Collection[int] = (),
        timeout_s: float | None = None,
    ) -> PendingCall:
        """Send one call to each rank; `timeout_s` None is the group's own limit. GroupClosedError unless it is ready."""
        limit_s = self._call_timeout_s if timeout_s is None else self._checked(timeout_s)
        self.lifecycle.check_ready(self.name, method)
        tickets = self.runtime.submit(calls, reply, quiet)
        return self._pending(method, tickets if len(calls) == 1 else dict(sorted(tickets.items())), limit_s)

    def later(self, method: str, resolve: Callable[[], None], send: Callable[[], PendingCall]) -> DeferredCall:
        """Defer a call: in its turn, another thread waits in `resolve` for its arguments, then sends it."""
        return self._deferred.post(DeferredCall(method, resolve, send))

    @property
    def has_deferred(self) -> bool:
        """Whether deferred calls wait, and this thread is not the one that sends them."""
        return self._deferred.is_busy

    def wait_for_deferred(self) -> None:
        """Wait until the deferred calls are sent: calls run in the order in which they were made."""
        self._deferred.drain()

    def expect_reader(self, future: Unread) -> None:
        """Track the future of a call that does not block, so that its failure is not lost."""
        self._in_flight.expect_reader(future)

    def status(self, *, stacks: bool = False) -> GroupStatus:
        """The calls that are not over, and the state of every rank; `stacks` also samples the stacks of all ranks."""
        calls = tuple(CallStatus(call.method, call.age_s, call.silent_ranks) for call in self._in_flight.unanswered())
        ranks = {} if self.lifecycle.state is State.CLOSED else self.runtime.diagnostics(range(self.world_size), stacks=stacks)
        return GroupStatus(self.name, self.lifecycle.state, self.lifecycle.reason, calls, self._deferred.methods, ranks)

    # -- lifecycle --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Build every rank's worker; returns when all are built, raises what a constructor raised (WorkerError)."""
        try:
            self._build()
        except BaseException:
            self.lifecycle.close()
            raise

    def restart(self) -> None:
        """End every rank and build it anew, with the arguments of the first time.

        Calls in flight end with GroupClosedError. When a rank cannot be built, all are ended: the group is
        broken, and may be restarted again.
        """
        require(self.runtime_name, "restart", "a restart of ranks")
        self.lifecycle.check_open(f"restart group {self.name!r}")
        if not self._is_owner:
            raise UnsupportedByRuntime(
                f"group {self.name!r} was started by another driver, which has the arguments of its workers: restart it there"
            )
        self._end("restarted")
        self.meshes.clear()
        self._begin()
        try:
            self._build()
        except BaseException as error:
            self.lifecycle.break_down(f"its restart failed: {error}".partition("\n")[0])
            raise

    def close(self) -> None:
        """End the ranks, if this group owns them; harmless when repeated. Then raise a failure that the driver has not read."""
        try:  # first: once the ranks are ended, the failure can no longer be read
            failed = self._in_flight.unread_failure(look_at_all=True) if self._is_sound else None
            if failed is not None:
                failed.get()
        finally:
            self.close_quietly()

    def close_quietly(self) -> None:
        """`close`, without raising failures."""
        self._end("closed")

    def end(self) -> None:
        """`close`, and end the ranks even if this group does not own them."""
        self._is_owner = True
        self.close()

    @property
    def _is_sound(self) -> bool:
        """False for a broken group: its reason was raised, and failures that were not read follow from it."""
        return self.lifecycle.state in (State.READY, State.DRAINING)

    def _begin(self) -> None:
        """Start a new lifecycle; late events from the old ranks go to the old one."""
        self.lifecycle = Lifecycle()
        self.runtime: Runtime = build_runtime(self.runtime_name)
        self._in_flight: InFlightCalls[PendingCall] = InFlightCalls()
        self._deferred = DeferredCalls()
        self._handles = None
        self._keeper: Keeper | None = None
        self._when_dropped: weakref.finalize[..., Any] | None = None
        if capabilities_of(self.runtime_name).own_processes and not self.spec.detached:
            self._keeper = Keeper()  # the runtime must not refer to it, or it would never be collected
            self._when_dropped = weakref.finalize(self._keeper, _close_behind, self.runtime)
            self._when_dropped.atexit = False  # a runtime ends by itself with its driver

    def _build(self) -> None:
        try:
            self._pending(CONSTRUCTOR, self.runtime.start(self.spec), self._call_timeout_s).finish()
        except BaseException:  # Ctrl-C included: ranks must not outlive a failed start
            self.runtime.close()
            raise

    def _end(self, reason: str) -> None:
        self.lifecycle.close(reason)
        self._deferred.drop_all(self.lifecycle.reason)
        self._in_flight.clear()
        self._handles = None
        if self._when_dropped is not None:
            self._when_dropped.detach()
        if self._is_owner:
            self.runtime.close()

    def _pending(self, method: str, tickets: Mapping[int, Any], timeout_s: float) -> PendingCall:
        return PendingCall(
            self.runtime,
            self.name,
            method,
            tickets,
            timeout_s,
            self.lifecycle,
            self._slow_after_s,
            self._in_flight,
            self._took_s,
        )

    def _checked(self, timeout_s: float) -> float:
        check_kind("a time limit", timeout_s, (int, float), "a number of seconds or None")
        if not timeout_s > 0:
            raise ConfigError(f"a time limit must be more than 0 seconds, got {timeout_s:g}")
        require(self.runtime_name, "timeouts", f"a time limit for calls (asked for: {timeout_s:g} s)")
        return timeout_s


def _close_behind(runtime: Runtime) -> None:
    """End the ranks of a group that was dropped without `close`, once its handles are dropped too."""
    # In another thread: the garbage collector may run where this thread holds a lock that closing needs.
    threading.Thread(target=runtime.close, name="podium-close", daemon=True).start()

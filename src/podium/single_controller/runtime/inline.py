"""The inline runtime: every rank in the driver's own process, one after another, so that breakpoints just work.

Arguments are cloned in and results cloned out, as if they had crossed a process. What needs ranks to run at the same time
(collectives) or to be ended from outside (timeouts) is not here.
"""

from __future__ import annotations

import platform
from asyncio import CancelledError
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from podium.errors import DispatchError, GroupClosedError, UnsupportedByRuntime, WorkerError
from podium.protocol.blocks import LocalBlock
from podium.protocol.remote_rows import RemoteRows
from podium.protocol.rows import split_result
from podium.runtimes import require
from podium.single_controller.rank.context import RankContext
from podium.single_controller.rank.failures import setup_failure, worker_error
from podium.single_controller.rank.user_code import call_method, called_as, run_as_rank
from podium.single_controller.runtime.base import (
    CONSTRUCTOR,
    Answer,
    GroupSpec,
    Outcome,
    RankCall,
    Reply,
    Runtime,
    by_rank,
    nodes_not_ready,
)
from podium.single_controller.runtime.copies import detached_copy
from podium.single_controller.runtime.diagnostics import Diagnostics


class InlineRuntime(Runtime):
    """A ticket is the outcome itself: a call is over when `submit` returns. Every rank runs, also after one has raised."""

    def __init__(self) -> None:
        self._contexts: list[RankContext] = []
        self._workers: dict[int, Any] = {}

    def start(self, spec: GroupSpec) -> dict[int, Outcome]:
        _refuse_what_needs_processes(spec)
        self._contexts = spec.contexts("inline")
        if spec.node_setup is not None and (reason := setup_failure(spec.node_setup)) is not None:
            raise nodes_not_ready(spec.name, {platform.node(): reason}, 1)
        return {context.rank: self._construct(context, spec) for context in self._contexts}

    def submit(self, calls: Sequence[RankCall], reply: Reply, quiet: Collection[int] = ()) -> dict[int, Outcome]:
        copies = {rank: _copied(rank, call) for rank, call in by_rank(calls).items()}  # all before the first one runs
        return {rank: self._call(rank, call, Reply.NOTHING if rank in quiet else reply) for rank, call in copies.items()}

    def wait(self, tickets: Mapping[int, Outcome], timeout_s: float) -> dict[int, Outcome]:
        return dict(tickets)

    def reference(self, ticket: Outcome) -> InlineReference:
        return InlineReference(ticket)

    def diagnostics(self, ranks: Iterable[int], *, stacks: bool = False) -> dict[int, Diagnostics]:
        return {}  # whatever a rank does, the driver does it: there is nothing to be seen from outside

    def workers(self, keeper: object = None) -> Sequence[Any]:
        return [self._workers[rank] for rank in sorted(self._workers)]

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._workers.pop(rank, None)

    def close(self) -> None:
        self._workers.clear()

    def _call(self, rank: int, call: RankCall, reply: Reply) -> Outcome:
        name = called_as(call.role, call.method)
        if rank not in self._workers:  # closed by the owner of the ranks, which the caller is not
            raise GroupClosedError(f"rank {rank} cannot run {name!r}: it was ended")
        method = partial(call_method, self._workers[rank], call.role, call.method)
        return self._run(self._contexts[rank], name, method, call, reply)

    def _construct(self, context: RankContext, spec: GroupSpec) -> Outcome:
        def build(*args: Any, **kwargs: Any) -> None:
            self._workers[context.rank] = spec.worker_class(*args, **kwargs)

        made = _copied(context.rank, RankCall([context.rank], None, CONSTRUCTOR, spec.args, spec.kwargs))
        return self._run(context, CONSTRUCTOR, build, made, Reply.NOTHING)

    def _run(
        self,
        context: RankContext,
        method: str,
        function: Callable[..., Any],
        call: RankCall,
        reply: Reply,
    ) -> Outcome:
        try:
            result = run_as_rank(context, function, call.args, call.kwargs)
            return Answer(_answer(result, reply))
        except UnsupportedByRuntime:
            raise  # a limit of this runtime, not a failure of the rank
        except (Exception, CancelledError) as error:  # a coroutine's: the driver's own loop would take it for its own
            failure = worker_error(context, method, error)
            failure.__cause__ = error  # `raise ... from`: a debugger finds the frame that failed
            return failure


def _answer(result: Any, reply: Reply) -> Any:
    if reply is Reply.NOTHING:
        return None
    found = split_result(detached_copy(result)) if reply is Reply.REFERENCE else None
    if found is None:
        return detached_copy(result)
    header, block = found
    return RemoteRows.of(header, LocalBlock(block, is_of_rank=True))


class InlineReference:
    """What one rank of a non-blocking call returned, or raised."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def get(self) -> Any:
        """The result; raises the rank's WorkerError."""
        if isinstance(self._outcome, WorkerError):
            raise self._outcome
        return self._outcome.value


def _copied(rank: int, call: RankCall) -> RankCall:
    """The call with arguments of its own. DispatchError for what cannot be copied, and so could not be sent either."""
    if not call.args and not call.kwargs:
        return call
    try:  # one deepcopy, so that two arguments which share a tensor still do
        args, kwargs = detached_copy((call.args, call.kwargs))
        args = tuple(map(_read, args))
        kwargs = {key: _read(value) for key, value in kwargs.items()}
    except Exception as error:  # whatever a foreign class does when it is copied
        name = called_as(call.role, call.method)
        raise DispatchError(f"the arguments of {name!r} cannot be copied for rank {rank}: {error}") from error
    return call._replace(args=args, kwargs=kwargs)


def _read(argument: Any) -> Any:
    return argument.get() if isinstance(argument, RemoteRows) else argument


def _refuse_what_needs_processes(spec: GroupSpec) -> None:
    if spec.worker_env:
        require("inline", "worker_env", f"environment variables of the workers ({', '.join(spec.worker_env)})")
    if spec.detached:
        require("inline", "detached", "groups that outlive their driver")

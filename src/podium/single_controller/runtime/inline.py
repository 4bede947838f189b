"""The inline runtime: every rank in the driver's own process, one after another, so that breakpoints just work.

Arguments are cloned in and results cloned out, as if they had crossed a process. What needs ranks to run at the same
time (collectives) or to be ended from outside (timeouts) is not here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from podium.errors import UnsupportedByRuntime
from podium.single_controller.context import RankContext
from podium.single_controller.runtime.base import CONSTRUCTOR, Answer, GroupSpec, Outcome, RankCall, Runtime
from podium.single_controller.runtime.rank import run_as_rank, worker_error
from podium.single_controller.worker import Worker


class InlineRuntime(Runtime):
    """A ticket is the outcome itself: a call is over when `submit` returns. Every rank runs, also after one has raised."""

    def __init__(self) -> None:
        self._contexts: list[RankContext] = []
        self._workers: dict[int, Worker] = {}

    def start(self, spec: GroupSpec) -> dict[int, Outcome]:
        self._contexts = spec.contexts("inline")
        return {context.rank: self._construct(context, spec) for context in self._contexts}

    def submit(self, rank: int, call: RankCall) -> Outcome:
        method = getattr(self._workers[rank], call.method)
        return self._run(self._contexts[rank], call.method, method, call.args, call.kwargs, answers=call.answers)

    def wait(self, tickets: Mapping[int, Outcome], timeout_s: float) -> dict[int, Outcome]:
        return dict(tickets)

    def kill(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._workers.pop(rank, None)

    def close(self) -> None:
        self._workers.clear()

    def _construct(self, context: RankContext, spec: GroupSpec) -> Outcome:
        def build(*args: Any, **kwargs: Any) -> None:
            self._workers[context.rank] = spec.worker_class(*args, **kwargs)

        return self._run(context, CONSTRUCTOR, build, spec.args, spec.kwargs, answers=False)

    def _run(
        self,
        context: RankContext,
        method: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        answers: bool,
    ) -> Outcome:
        if args or kwargs:  # one deepcopy, so that two arguments which share a tensor still do
            args, kwargs = copy.deepcopy((args, kwargs))
        try:
            result = run_as_rank(context, function, args, kwargs)
            return Answer(copy.deepcopy(result) if answers else None)
        except UnsupportedByRuntime:
            raise  # a limit of this runtime, not a failure of the rank
        except Exception as error:
            failure = worker_error(context, method, error)
            failure.__cause__ = error  # `raise ... from`: a debugger finds the frame that failed
            return failure

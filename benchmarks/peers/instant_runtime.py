"""A transport that answers at once, so that what a call costs the driver can be measured without a thousand processes.

Only the transport is faked: dispatch, supervision, deadlines, futures and collect are Podium's own. The one part of the
controller's benchmark that looks inside Podium: it implements the `Runtime` seam, of which users see nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from podium.single_controller import CAPABILITIES
from podium.single_controller.runtime.base import (
    Answer,
    GroupSpec,
    Outcome,
    RankCall,
    Reply,
    Runtime,
    by_rank,
)
from podium.single_controller.runtime.diagnostics import Diagnostics


class InstantRuntime(Runtime):
    """Every rank answers with its first argument, or None. A ticket is the answer."""

    def start(self, spec: GroupSpec) -> dict[int, Outcome]:
        return {rank: Answer(None) for rank in range(spec.pool.world_size)}

    def submit(self, calls: Sequence[RankCall], reply: Reply, quiet: Collection[int] = ()) -> dict[int, Outcome]:
        return {rank: Answer(call.args[0] if call.args and rank not in quiet else None) for rank, call in by_rank(calls).items()}

    def wait(self, tickets: Mapping[int, Outcome], timeout_s: float) -> dict[int, Outcome]:
        return dict(tickets)

    def reference(self, ticket: Outcome) -> Outcome:
        return ticket

    def diagnostics(self, ranks: Iterable[int], *, stacks: bool = False) -> dict[int, Diagnostics]:
        return {}

    def kill(self, ranks: Iterable[int]) -> None:
        pass

    def close(self) -> None:
        pass


def offer_instant_runtime() -> str:
    """Make it known to groups; returns the name to ask for."""
    implementation = f"{__name__}:{InstantRuntime.__name__}"
    CAPABILITIES["instant"] = replace(CAPABILITIES["inline"], implementation=implementation, timeouts=True)
    return "instant"

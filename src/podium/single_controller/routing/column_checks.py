"""Whether the rows of a call have the columns that its method declares: `reads` before anything is sent, `writes` in the answers.

Names only: what kind of column a name stands for is the business of those who make and read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from podium.errors import DispatchError, nearest
from podium.protocol.rows import column_names, is_rows
from podium.single_controller.routing.dispatch import Copy, Ranks, Route, SentArguments, Shards
from podium.single_controller.routing.modes import BatchMode


def check_reads(group: Ranks, reads: Sequence[str], sent: SentArguments) -> None:
    """DispatchError where the batches that a rank is about to be sent lack, together, a column that the method reads.

    A rank that is sent no rows at all, as a user's mode may have it, is not looked at.
    """
    args, kwargs = sent
    every = (*args, *kwargs.values())
    # where batches were cut and copied, and nothing else, all ranks are sent the same columns
    for rank in range(1 if all(isinstance(value, Copy | Shards) for value in every) else group.world_size):
        values = [value.for_rank(rank) for value in every]
        names = [column_names(value) for value in values if is_rows(value)]
        if names:
            _check(reads, set().union(*names), "the method reads the column", "which no batch of the call has")


def check_writes(group: Ranks, route: Route, writes: Sequence[str], answers: Mapping[int, Any]) -> None:
    """DispatchError where the rows that a collecting rank returned lack a column that the method declares to write.

    In a batch mode None lacks them all. Answers of any other kind are left to the mode.
    """
    for rank in group.mesh(route.mesh_name).collecting_ranks:
        answer = answers.get(rank)
        if is_rows(answer):
            what = f"rank {rank} returned rows without the column"
            _check(writes, column_names(answer), what, "which the method declares to write")
        elif answer is None and isinstance(route.mode, BatchMode):
            names = ", ".join(writes)
            raise DispatchError(
                f"rank {rank} returned None, but the method declares to write {names}: return rows that have them"
            )


def _check(declared: Iterable[str], there: set[str], what: str, why: str) -> None:
    for name in declared:
        if name not in there:
            names = sorted(there)
            raise DispatchError(f"{what} {name!r}, {why}{nearest(name, names)}; there are: {', '.join(names) or 'none'}")

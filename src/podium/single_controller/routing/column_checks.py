"""Whether the rows of a call have the columns that its method declares: `reads` before anything is sent, `writes` in the answers.

Only names are checked, not types.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from podium.errors import DispatchError, nearest
from podium.protocol.rows import column_names, is_rows
from podium.single_controller.routing.dispatch import Copy, Ranks, Route, SentArguments, Shards
from podium.single_controller.routing.modes import BatchMode


def check_reads(group: Ranks, reads: Sequence[str], sent: SentArguments) -> None:
    """DispatchError if the batches for a rank do not have, together, each column that the method reads.

    A rank that a user's mode sends no rows is not checked.
    """
    args, kwargs = sent
    every = (*args, *kwargs.values())
    # if batches were only cut or copied, all ranks are sent the same columns
    for rank in range(1 if all(isinstance(value, Copy | Shards) for value in every) else group.world_size):
        values = [value.for_rank(rank) for value in every]
        names = [column_names(value) for value in values if is_rows(value)]
        if names:
            _check(reads, set().union(*names), "the method reads the column", "which no batch of the call has")


def check_writes(group: Ranks, route: Route, writes: Sequence[str], answers: Mapping[int, Any]) -> None:
    """DispatchError if a collecting rank returned rows without a column that the method declares to write.

    In a batch mode that includes None. The mode checks answers of any other type.
    """
    for rank in group.mesh(route.mesh_name).collecting_ranks:
        answer = answers.get(rank)
        if is_rows(answer):
            what = f"rank {rank} returned rows without the column"
            _check(writes, column_names(answer), what, "which the method declares to write")
        elif answer is None and isinstance(route.mode, BatchMode):
            names = ", ".join(writes)
            raise DispatchError(f"rank {rank} must return rows with {names}, which the method declares to write, got None")


def _check(declared: Iterable[str], there: set[str], what: str, why: str) -> None:
    for name in declared:
        if name not in there:
            names = sorted(there)
            raise DispatchError(f"{what} {name!r}, {why}{nearest(name, names)}; there are: {', '.join(names) or 'none'}")

"""A mesh as the controller sees it: for each rank, which shard it works on and whether its result counts.

The controller knows nothing else of a worker's parallelism. Tensor, pipeline and context parallel peers are ranks with the same
dp_rank, one of which collects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from podium.errors import DispatchError


@dataclass(frozen=True)
class Mesh:
    """A checked routing table, indexed by rank. DispatchError, with the table, unless one rank collects each dp_rank."""

    name: str
    dp_ranks: tuple[int, ...]
    """The shard that each rank receives."""
    collects: tuple[bool, ...]
    """Whether each rank's result is sent back."""

    @classmethod
    def flat(cls, world_size: int) -> Self:
        """Every rank has a shard of its own and collects."""
        return cls("every rank", tuple(range(world_size)), (True,) * world_size)

    @classmethod
    def from_rows(cls, name: str, rows: Sequence[tuple[int, bool]]) -> Self:
        """The table from each rank's (dp_rank, collects). DispatchError for a rank that reported something else."""
        for rank, row in enumerate(rows):
            if not _is_row(row):
                raise DispatchError(
                    f"rank {rank} must report (dp_rank, collects) for mesh {name!r}, the number of its shard and True or False, "
                    f"got {row!r}"
                )
        return cls(name, tuple(dp_rank for dp_rank, _ in rows), tuple(collects for _, collects in rows))

    def __post_init__(self) -> None:
        collectors = Counter(dp_rank for dp_rank, collects in zip(self.dp_ranks, self.collects, strict=True) if collects)
        expected = range(
            min(max(self.dp_ranks, default=0) + 1, len(self.dp_ranks))
        )  # a dp_rank above the number of ranks is a fault already
        faults = [] if self.dp_ranks else ["it has no ranks"]
        faults += [f"dp_rank {dp_rank} is missing" for dp_rank in expected if dp_rank not in self.dp_ranks]
        faults += [f"dp_rank {dp_rank} is negative" for dp_rank in sorted(set(self.dp_ranks)) if dp_rank < 0]
        faults += [f"no rank collects dp_rank {dp_rank}" for dp_rank in sorted(set(self.dp_ranks)) if not collectors[dp_rank]]
        faults += [f"{count} ranks collect dp_rank {dp_rank}" for dp_rank, count in sorted(collectors.items()) if count > 1]
        if faults:
            raise DispatchError(
                f"mesh {self.name!r} is invalid: {'; '.join(faults)}. "
                f"Exactly one rank must collect each dp_rank from 0 up.\n{self}"
            )

    @cached_property
    def dp_size(self) -> int:
        """The number of shards."""
        return max(self.dp_ranks) + 1

    @cached_property
    def collecting_ranks(self) -> tuple[int, ...]:
        """The ranks whose results count, in the order of their shards."""
        ranks = [rank for rank, collects in enumerate(self.collects) if collects]
        return tuple(sorted(ranks, key=self.dp_ranks.__getitem__))

    @cached_property
    def quiet_ranks(self) -> tuple[int, ...]:
        """The ranks whose results do not count."""
        return tuple([rank for rank, collects in enumerate(self.collects) if not collects])

    def __str__(self) -> str:
        rows = zip(self.dp_ranks, self.collects, strict=True)
        lines = [f"{rank:>4}  {dp_rank:>7}  {'yes' if collects else 'no'}" for rank, (dp_rank, collects) in enumerate(rows)]
        return "\n".join(["rank  dp_rank  collects", *lines])


def _is_row(row: object) -> bool:
    return (
        isinstance(row, tuple | list)
        and len(row) == 2
        and isinstance(row[0], int)
        and not isinstance(row[0], bool)
        and isinstance(row[1], bool)
    )

"""Tensor columns that nobody has looked at yet: cut out of a batch, or arrived from another process.

Between a driver and its ranks most batches are cut, sent, received and joined without being read on the way, and tensors made
for that cost a tiny batch as much as all the rest. So a `DataProto` makes its columns when somebody asks for them. Until then
it has one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from numpy.typing import NDArray
from torch import Tensor

from podium.protocol import wire
from podium.protocol.columns import is_even


class Whole:
    """Dense columns [B, ...] of one row count, of which parts are cut."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    @cached_property
    def arrays(self) -> dict[str, tuple[str, NDArray]]:  # type: ignore[type-arg]  # of whatever numpy has
        """Each column as `wire.array_of` gives it: to cut these and to pack the pieces takes no operation of torch."""
        return {key: wire.array_of(column) for key, column in self.columns.items()}


@dataclass(frozen=True)
class Cut:
    """Rows [start, stop) of a whole, as views."""

    whole: Whole
    start: int
    stop: int

    def columns(self) -> dict[str, Tensor]:
        return {key: column[self.start : self.stop] for key, column in self.whole.columns.items()}

    def packed(self, *, buffers: bool) -> wire.Packed:
        """`wire.pack` of the columns."""
        arrays = self.whole.arrays.items()
        return wire.pack_arrays({key: (name, array[self.start : self.stop]) for key, (name, array) in arrays}, buffers=buffers)

    def in_band(self) -> wire.Packed | None:
        """The same without buffers; None where a column has too many bytes for that."""
        rows = self.stop - self.start
        is_small = all(array[:1].nbytes * rows <= wire.IN_BAND_BYTES for _, array in self.whole.arrays.values())
        return self.packed(buffers=False) if is_small else None


@dataclass(frozen=True)
class Arrived:
    """What came over the wire: private dense columns of one row count."""

    records: wire.Packed

    def columns(self) -> dict[str, Tensor]:
        return wire.unpack(self.records)

    def packed(self, *, buffers: bool) -> wire.Packed | None:
        """What came, to go on as it is; None where it came beside the message, and tensors have to be made of it first."""
        return self.records if wire.is_in_band(self.records) else None

    def in_band(self) -> wire.Packed | None:
        """The same."""
        return self.packed(buffers=False)


Unseen: TypeAlias = Cut | Arrived


def parts(columns: Mapping[str, Tensor], bounds: Sequence[tuple[int, int]]) -> list[Cut] | None:
    """Rows [start, stop) for each pair of bounds; None for columns of which torch itself has to make the views."""
    if not is_even(columns) or not all(map(_shares_with_numpy, columns.values())):
        return None
    whole = Whole(columns)
    return [Cut(whole, start, stop) for start, stop in bounds]


def _shares_with_numpy(column: Tensor) -> bool:
    return column.is_cpu and not (column.requires_grad or column.is_conj() or column.is_neg())


def joined(batches: Sequence[Unseen | None]) -> dict[str, Tensor] | None:
    """The columns of all batches, in order; None unless all have arrived and fit together as they are."""
    if not all(type(batch) is Arrived for batch in batches):
        return None
    records = wire.joined([batch.records for batch in batches])  # type: ignore[union-attr]
    return None if records is None else wire.unpack(records)

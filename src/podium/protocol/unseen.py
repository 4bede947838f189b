"""Tensor columns that nobody has looked at yet: cut out of a batch for a call, or arrived from another process.

Between a driver and its ranks most batches are cut, sent, received and joined without being read on the way, and tensors made
for that cost a tiny batch as much as all the rest. So a `DataProto` makes its columns when somebody asks for them. Until then
it has one of these. What a user cuts is cut at once: their parts live as long as they like, and the source may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from podium.protocol import row_moves as moves
from podium.protocol import wire
from podium.protocol.arrays import Arrays, arrays_of, plain_arrays, shares_memory


class Whole:
    """Columns of which parts are cut; they agree on the row count and share equal offsets."""

    def __init__(self, columns: Mapping[str, Tensor], arrays: Arrays | None = None) -> None:
        self.columns = dict(columns)
        self._arrays = arrays

    @property
    def arrays(self) -> Arrays:
        """The columns as numpy sees them, found out once: to cut these and to pack the pieces takes no operation of torch."""
        if self._arrays is None:
            self._arrays = arrays_of(self.columns)
        return self._arrays


@dataclass(frozen=True)
class Cut:
    """Rows [start, stop) of a whole, as views."""

    whole: Whole
    start: int
    stop: int

    def columns(self) -> dict[str, Tensor]:
        return moves.slice_tensors(self.whole.columns, self.start, self.stop)

    def packed(self, *, buffers: bool) -> wire.Packed:
        """`wire.pack` of the columns."""
        return wire.pack(self.whole.arrays.cut(self.start, self.stop), buffers=buffers)

    def packed_if_small(self) -> wire.Packed | None:
        """`wire.packed_if_small` of the columns."""
        return wire.packed_if_small(self.whole.arrays.cut(self.start, self.stop))


@dataclass(frozen=True)
class Arrived:
    """What came over the wire: columns that were checked where they were packed."""

    records: wire.Packed
    is_shared: bool
    """Whether they become guarded views of what came, and not private ones."""

    def columns(self) -> dict[str, Tensor]:
        return wire.unpack(self.records, is_shared=self.is_shared)

    def packed(self, *, buffers: bool) -> wire.Packed:
        """What came, to travel on."""
        return wire.repacked(self.records, buffers=buffers)

    def packed_if_small(self) -> wire.Packed | None:
        """What came, if it is small."""
        return self.records if wire.is_small(self.records) else None


Unseen: TypeAlias = Cut | Arrived


def made(unseen: Unseen) -> dict[str, Tensor]:
    """The columns, the same whichever mode torch is in when somebody looks: inference, a functional transform, fake tensors."""
    if not torch.is_inference_mode_enabled() and peek_interpreter_stack() is None and not torch._C._len_torch_dispatch_stack():
        return unseen.columns()
    with torch.inference_mode(False), torch._C._DisableFuncTorch(), _disable_current_modes():
        return unseen.columns()


def plain_whole(columns: Mapping[str, Tensor]) -> Whole | None:
    """The columns as a whole if they are plain dense ones of one row count, as most are: there is nothing else to check."""
    arrays = plain_arrays(columns)
    return None if arrays is None else Whole(columns, arrays)


def checked_whole(columns: Mapping[str, Tensor]) -> Whole | None:
    """The columns of a checked batch as a whole; None for those of which torch itself has to make the views."""
    return Whole(columns) if columns and all(map(shares_memory, columns.values())) else None


def joined(batches: Sequence[Unseen | None]) -> Arrived | None:
    """The rows of all batches, in order; None unless all have arrived and fit together as they are."""
    parts = [batch.records for batch in batches if isinstance(batch, Arrived)]
    records = wire.joined(parts) if len(parts) == len(batches) else None
    return None if records is None else Arrived(records, is_shared=False)

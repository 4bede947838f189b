"""Blocks: the columns of a rank's result that stay where they were made.

A result is split into a header, which is sent to the caller, and a block, which stays. The header has the meta, the row count,
the lengths of jagged rows and small columns; the block has the other columns. A runtime implements `Block`; `RemoteRows` are rows
of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol import memory
from podium.protocol.arrays import tensor_bytes
from podium.protocol.column_types import ColumnType, about_bytes
from podium.protocol.data_proto import DataProto
from podium.protocol.row_moves import map_values

IN_HEADER_BYTES = 32 * 1024
"""Dense columns and columns of objects up to this size are sent in the header: numbers and ids of a few thousand rows, but not
texts of as many."""
INTERNAL = ("<numbers ", "<lengths ")
"""Prefixes of the names of columns that `RemoteRows` adds."""


Read: TypeAlias = Callable[[], DataProto]


class Block(Protocol):
    """Columns of rows, in this process or elsewhere."""

    def begin(self, keys: Sequence[str], rows: Tensor) -> Read:
        """Begin to read those rows [B] of those columns; what it returns waits for them.

        Of rows that follow one another, tensors may share memory with where they lie: whoever hands them on copies them. Of
        any others they are the reader's own, as objects always are.
        """
        ...


@dataclass(frozen=True)
class LocalBlock:
    """A block in this process."""

    rows: DataProto
    is_of_rank: bool = False
    """Whether a rank made it. Such a block counts as remote, as on every runtime; any other is the driver's own."""

    def begin(self, keys: Sequence[str], rows: Tensor) -> Read:
        return lambda: selected(self.rows, keys, rows, deepcopy=True)


def selected(data: DataProto, keys: Sequence[str], rows: Tensor, *, deepcopy: bool = False) -> DataProto:
    """Those rows of those columns: views if the rows follow one another, else copies."""
    tensors, objects = [key for key in keys if key in data.batch], [key for key in keys if key in data.non_tensor_batch]
    picked = data.select(tensors, objects, [], deepcopy=deepcopy)
    return picked[int(rows[0]) : int(rows[0]) + len(rows)] if is_run(rows) else picked.select_idxs(rows)


def is_run(rows: Tensor) -> bool:
    """Whether row numbers [B] follow one another, at least one."""
    return len(rows) > 0 and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((rows.diff() == 1).all())


@dataclass(frozen=True)
class Source:
    """The rows of several blocks, end to end."""

    blocks: tuple[Block, ...]
    sizes: tuple[int, ...]
    """Rows of each block."""

    @cached_property
    def starts(self) -> Tensor:
        """[blocks + 1] int64: the number of each block's first row, and of the row after the last."""
        return torch.tensor([0, *accumulate(self.sizes)])

    @property
    def num_rows(self) -> int:
        return sum(self.sizes)

    def read(self, keys: Sequence[str], numbers: Tensor) -> DataProto:
        """Private copies of those rows, in that order; at least one. Only blocks that have some of them are asked."""
        owners = self.owners(numbers)
        order = None if bool((owners.diff() >= 0).all()) else owners.argsort(stable=True)
        if order is not None:
            numbers, owners = numbers[order], owners[order]
        within = numbers - self.starts[owners]
        blocks, counts = owners.unique_consecutive(return_counts=True)
        runs = within.split(counts.tolist())
        reads = [self.blocks[block].begin(keys, run) for block, run in zip(blocks.tolist(), runs, strict=True)]
        found = [read() for read in reads]
        if len(found) > 1:
            joined = DataProto.concat(found)
            return joined if order is None else joined.select_idxs(order.argsort())
        return private_copy(found[0]) if is_run(within) else found[0]

    def owners(self, numbers: Tensor) -> Tensor:
        """[B] which block each row is of."""
        return torch.bucketize(numbers, self.starts[1:], right=True)

    @cached_property
    def of_driver(self) -> Tensor:
        """[n] int64: which of the blocks are the driver's own. All shards of a call share it, so it is found once."""
        own = [n for n, block in enumerate(self.blocks) if isinstance(block, LocalBlock) and not block.is_of_rank]
        return torch.tensor(own, dtype=torch.int64)

    def narrowed(self, numbers: Tensor, keys: Sequence[str]) -> tuple[Source, Tensor]:
        """The source with only the blocks that have some of these rows; of a `LocalBlock`, only those rows and columns.

        And the numbers that the rows have in it.
        """
        if is_run(numbers):
            first, last = self.owners(numbers[[0, -1]]).tolist()
            run = Source(self.blocks[first : last + 1], self.sizes[first : last + 1])
            if not any(isinstance(block, LocalBlock) for block in run.blocks):
                return run, numbers - self.starts[first]
        blocks, owners = self.owners(numbers).unique(return_inverse=True)
        within = numbers - self.starts[blocks[owners]]
        kept, sizes = [self.blocks[block] for block in blocks.tolist()], [self.sizes[block] for block in blocks.tolist()]
        for place, block in enumerate(kept):
            if isinstance(block, LocalBlock):
                mine = owners == place
                rows, within[mine] = within[mine].unique(return_inverse=True)
                kept[place], sizes[place] = replace(block, rows=selected(block.rows, keys, rows)), len(rows)
        source = Source(tuple(kept), tuple(sizes))
        return source, within + source.starts[owners]


def private_copy(rows: DataProto) -> DataProto:
    """The same columns, tensors copied."""
    return DataProto(map_values(rows.batch, lambda values: memory.cat([values])), rows.non_tensor_batch)


@dataclass(frozen=True)
class Header:
    """The part of a result that is sent to the caller."""

    local: DataProto
    """The columns that are sent, and the meta."""
    num_rows: int
    column_types: dict[str, ColumnType] = field(default_factory=dict)
    """Of the columns in the block."""
    lengths: dict[str, Tensor] = field(default_factory=dict)
    """[B] int64: of the rows of jagged columns in the block; columns of equal lengths share the tensor."""
    is_tensordict: bool = False
    """Whether the result was a TensorDict."""

    @property
    def block_bytes(self) -> int:
        """The size of the block in bytes; of objects, an estimate."""
        values = {key: int(self.lengths[key].sum()) if key in self.lengths else self.num_rows for key in self.column_types}
        return sum(values[key] * column_type.value_bytes for key, column_type in self.column_types.items())


def to_header_and_block(rows: DataProto, *, is_tensordict: bool = False) -> tuple[Header, DataProto]:
    """A result as a header and the columns of its block, which may be none. Jagged columns always stay, whatever their size."""
    rows.check_consistency()
    check_names(rows)
    rows = rows.select()  # lists that were assigned become arrays
    tensors = {key: column for key, column in rows.batch.items() if _stays(column)}
    objects = {key: column for key, column in rows.non_tensor_batch.items() if about_bytes(column) > IN_HEADER_BYTES}
    local = rows.select(
        [key for key in rows.batch if key not in tensors], [key for key in rows.non_tensor_batch if key not in objects]
    )
    column_types = {key: ColumnType.of(column) for key, column in (tensors | objects).items()}
    block = DataProto(tensors, objects)  # the constructor makes the offsets of assigned columns int64, and shared
    offsets = {key: jg.parts(column)[1] for key, column in block.batch.items() if jg.is_jagged(column)}
    distinct = {id(one): one.diff() for one in offsets.values()}
    lengths = {key: distinct[id(one)] for key, one in offsets.items()}
    return Header(local, len(rows), column_types, lengths, is_tensordict), block


def check_names(rows: DataProto) -> None:
    """DataError for a column name that remote rows cannot have."""
    for key in (*rows.batch, *rows.non_tensor_batch):
        check_name(key)


def check_name(name: object) -> None:
    """DataError for a name that is not text, or begins with one of `INTERNAL`."""
    if not isinstance(name, str):
        raise DataError(
            f"column name {name!r} must be a str, since the rows stay where they were made, got {type(name).__name__}"
        )
    if name.startswith(INTERNAL):
        raise DataError(
            f"column name {name!r} must not begin with one of {INTERNAL}, which remote rows use themselves: rename the column"
        )


def _stays(column: Tensor) -> bool:
    return jg.is_jagged(column) or tensor_bytes(column) > IN_HEADER_BYTES

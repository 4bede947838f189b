"""`RowOperations`: operations that choose rows by their numbers, for every class of rows, wherever its columns are.

How rows of given numbers are taken is the class's own: `DataProto` takes them at once, `RemoteRows` only note the numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import ChunkError, DataError
from podium.protocol import indexing
from podium.protocol.columns import whole_number
from podium.protocol.indexing import LastBatch, RowIndex


class RowOperations(ABC):
    """Rows that can be repeated, cut into parts and iterated in mini-batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def select_idxs(self, idxs: RowIndex) -> Self:
        """The rows that a boolean mask [B] marks, or the rows of the given numbers [B'], in that order."""

    @abstractmethod
    def filled(self, rows: Tensor, size: int) -> Self:
        """The rows of these numbers and then, up to `size`, copies of the last row of all, which the meta marks as padding."""

    @abstractmethod
    def _cut(self, bounds: Sequence[int]) -> list[Self]:
        """Rows [bounds[i], bounds[i + 1]) for each i. The bounds run from 0 to the number of rows."""

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Each row k times in a row (a a b b), or the whole batch k times (a b a b) without `interleave`."""
        repeat_times = whole_number("repeat_times", repeat_times)
        if repeat_times < 0:
            raise DataError(f"rows cannot be repeated {repeat_times} times")
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))

    def sample_level_repeat(self, repeat_times: Sequence[int] | Tensor | NDArray[Any]) -> Self:
        """Row b `repeat_times[b]` times in a row; 0 leaves it out."""
        return self.select_idxs(indexing.repeated(repeat_times, len(self)))

    def partition(self, num_parts: int) -> list[Self]:
        """Exactly `num_parts` consecutive parts whose sizes differ by at most one; empty parts keep their columns."""
        num_parts = whole_number("num_parts", num_parts)
        if num_parts < 1:
            raise DataError(f"partition needs at least one part, got {num_parts}")
        size, extra = divmod(len(self), num_parts)
        return self._cut([part * size + min(part, extra) for part in range(num_parts + 1)])

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` parts of equal size. ChunkError when the rows do not divide; `partition` takes any number."""
        chunks = whole_number("chunks", chunks)
        if chunks < 1 or len(self) % chunks:
            raise ChunkError(f"{len(self)} rows cannot be cut into {chunks} equal parts; partition({chunks}) allows uneven ones")
        return self.partition(chunks)

    def split(self, split_size: int) -> list[Self]:
        """Consecutive parts of `split_size` rows; the last one may be short. A batch of no rows has no parts."""
        split_size = whole_number("split_size", split_size)
        if split_size < 1:
            raise DataError(f"split needs parts of at least one row, got split_size={split_size}")
        return self._cut([*range(0, len(self), split_size), len(self)])

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        *,
        last: LastBatch = "error",
    ) -> Iterator[Self]:
        """Mini-batches of all rows, epoch after epoch. With a seed each epoch has another order, which depends on the seed alone.

        `dataloader_kwargs={"shuffle": False}` keeps the order whatever the seed; `"drop_last": True` in it is `last="drop"`.
        `last` says what is done with rows that do not fill a mini-batch: "error" before the first one, "short", "drop", or "pad"
        with copies that `padding_mask` marks.
        """
        seed, last = indexing.of_dataloader(seed, last, dict(dataloader_kwargs or {}))
        mini_batch_size = whole_number("mini_batch_size", mini_batch_size)
        epochs = whole_number("epochs", epochs)
        indexing.check_mini_batches(len(self), mini_batch_size, epochs, last)
        orders = indexing.mini_batches(len(self), mini_batch_size, epochs=epochs, seed=seed, last=last)
        width = mini_batch_size if last == "pad" else 0
        return (self.filled(rows, max(width, len(rows))) for rows in orders)

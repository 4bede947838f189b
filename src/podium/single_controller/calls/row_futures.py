"""`DataProtoFuture`: the rows of a call, which may still run. They stay where they were made.

It offers the operations of `podium.protocol.remote_rows` on the driver, waits for the call, and records traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto
from podium.protocol.indexing import RowIndex
from podium.protocol.remote_concat import concat_remote_rows
from podium.protocol.remote_rows import RemoteRows
from podium.protocol.row_operations import RowOperations
from podium.protocol.rows import as_proto, is_rows
from podium.single_controller.calls.futures import GroupFuture
from podium.single_controller.calls.traffic import DRIVER, recording


class DataProtoFuture(GroupFuture[Any], RowOperations):
    """A reference to the rows of a call in a batch mode. The rows stay where they were made.

    It never changes. Row operations wait for the call and move no bytes: they return futures of other rows. Passed to another
    call, every rank reads the rows of its own shard. `get` reads rows into the driver. Rows live as long as a future refers to
    them, also after the ranks that made them have ended.
    """

    @classmethod
    def of(cls, result: Any) -> Self:
        """The future of a result that is known: rows of this process, which are copied, `RemoteRows`, or another value."""
        return cls.owning(result.clone() if isinstance(result, DataProto) else result)

    @classmethod
    def owning(cls, result: Any) -> Self:
        """`of` without the copy, for rows of this process that the caller gives away."""
        return cls.settled(RemoteRows.of_local(result) if isinstance(result, DataProto) else result)

    def get(self, timeout: float | None = None, *, keys: Iterable[str] | None = None) -> Any:
        """The rows as a DataProto or TensorDict, whichever the workers returned. Every call reads a new private copy.

        `keys` reads those columns only, tensors or objects. `timeout` is as in `GroupFuture.get`. If the ranks returned None,
        so does this.
        """
        value = self.value(timeout) if keys is None else self._rows(timeout).pick(keys)
        if not isinstance(value, RemoteRows):
            return value
        found = value.get()
        if (traffic := recording()) is not None:
            traffic.add(DRIVER, "fetched", value.column_bytes())
        return found

    def value(self, timeout: float | None = None) -> Any:
        """The result as an argument of another call: `RemoteRows`, or None."""
        return self._settle(timeout)

    def _rows(self, timeout: float | None = None) -> RemoteRows:
        value = self.value(timeout)
        if not isinstance(value, RemoteRows):
            raise DataError(
                f"the call returned {type(value).__name__}, not rows: register a method that returns rows, or use get()"
            )
        return value

    def __len__(self) -> int:
        return len(self._rows())

    def __bool__(self) -> bool:
        return True  # without waiting for the number of rows

    @property
    def meta_info(self) -> dict[str, Any]:
        """A copy of the meta."""
        return self._rows().meta_info

    def column_names(self) -> set[str]:
        """The names of all columns."""
        return self._rows().column_names()

    def lengths(self, key: str) -> Tensor:
        """[B] int64: how long each row of a jagged column is. DataError for a column that is not jagged."""
        return self._rows().lengths(key)

    def is_here(self, key: str) -> bool:
        """Whether all rows of the column are in this process, so that `get` fetches nothing of it."""
        return self._rows().is_here(key)

    @property
    def padding_mask(self) -> Tensor:
        """[B] bool: which rows are padding; see `DataProto.padding_mask`."""
        return self._rows().padding_mask

    def __getitem__(self, index: slice | RowIndex) -> Self:
        """Rows by a slice, a mask or numbers."""
        return self.of(self._rows()[index])

    def __iter__(self) -> Iterator[Any]:
        raise DataError("rows that lie elsewhere cannot be iterated one by one; call .get() to read them first")

    def select_idxs(self, idxs: RowIndex) -> Self:
        return self.of(self._rows().select_idxs(idxs))

    def filled(self, rows: Tensor, size: int) -> Self:
        return self.of(self._rows().filled(rows, size))

    def _cut(self, bounds: Sequence[int]) -> list[Self]:
        return list(map(self.of, self._rows()._cut(bounds)))

    @classmethod
    def concat(cls, data: Sequence[Self | DataProto]) -> Self:
        """The rows of all parts in order; those of this process are copied."""
        if not data:
            raise DataError("concat needs at least one batch")
        return cls.of(concat_remote_rows(list(map(_rows_of, data))))

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> Self:
        """Only the named columns; None keeps all of that kind."""
        return self.of(self._rows().select(batch_keys, non_tensor_batch_keys, meta_info_keys))

    def drop(self, keys: Iterable[str]) -> Self:
        """Without the named columns, tensors or objects."""
        return self.of(self._rows().drop(keys))

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """The same rows, some tensor columns under other names."""
        return self.of(self._rows().rename(old_keys, new_keys))

    def union(self, other: DataProto | DataProtoFuture, *, on: str | None = None) -> Self:
        """These columns and the other's, values of this process or of another call's result; see `RemoteRows.union`."""
        mine, theirs = self._rows(), _rows_of(other)
        joined = mine.union(theirs, on=on)
        if on is not None and (traffic := recording()) is not None:  # the union compares this column in the driver
            for rows in (mine, theirs):
                traffic.add(DRIVER, "fetched", {key: size for key, size in rows.column_bytes().items() if key == on})
        return self.of(joined)

    def __copy__(self) -> Self:
        return self  # it never changes

    def __repr__(self) -> str:
        shown = repr(self.value()) if self.done() else "running"
        return f"<{type(self).__name__} {shown}>"


def _rows_of(value: object) -> RemoteRows:
    """The rows of a future, or a copy of rows of this process: a future never changes."""
    if isinstance(value, DataProtoFuture):
        return value._rows()
    if not is_rows(value):
        raise DataError(f"the rows to join must be a DataProtoFuture, a DataProto or a TensorDict, got {type(value).__name__}")
    return value if isinstance(value, RemoteRows) else RemoteRows.of_local(as_proto(value).clone())

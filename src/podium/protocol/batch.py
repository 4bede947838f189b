"""`Batch`: the tensor columns of a `DataProto`, a dict that answers what users of a TensorDict ask.

Rows move by the arithmetic of `row_moves`, which `DataProto` uses too: columns of equal lengths share their offsets after every
operation. What only a TensorDict can do, `to_tensordict()` gives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, overload

import numpy as np
import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import columns as col
from podium.protocol import formatting, indexing
from podium.protocol import jagged as jg
from podium.protocol import row_moves as moves
from podium.protocol.indexing import RowIndex

if TYPE_CHECKING:
    from tensordict import TensorDict

Columns: TypeAlias = "Mapping[str, Tensor] | TensorDict"


class Batch(dict[str, Tensor]):
    """Tensor columns by name: dense [B, ...] or jagged [B, *, ...]. `len()` counts rows; iteration gives the names.

    It is true where it has a column, even one of no rows. `batch["x"] = t` is checked when rows are next looked at.

    >>> batch = Batch(x=torch.arange(3), y=torch.ones(3, 2))
    >>> len(batch), batch.batch_size[0], list(batch), batch[batch["x"] > 0]["x"].tolist(), batch[0]["x"].item()
    (3, 3, ['x', 'y'], [1, 2], 0)
    """

    # -- rows ---------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        for column in self.values():
            return jg.num_rows(column)
        return 0

    def __bool__(self) -> bool:
        return not self.is_empty()

    @overload
    def __getitem__(self, index: str) -> Tensor: ...
    @overload
    def __getitem__(self, index: int | np.integer[Any]) -> dict[str, Tensor]: ...
    @overload
    def __getitem__(self, index: slice | RowIndex) -> Self: ...
    def __getitem__(self, index: str | int | np.integer[Any] | slice | RowIndex) -> Tensor | dict[str, Tensor] | Self:
        """A column by its name; rows by a slice (views where its step is 1), a mask or numbers; by one number a dict of views."""
        if isinstance(index, str):
            return super().__getitem__(index)
        columns = self.checked()
        if isinstance(index, slice):
            rows = range(len(columns))[index]
            if rows.step == 1:
                return type(self)(moves.slice_tensors(columns, rows.start, max(rows.start, rows.stop)))
            return type(self)(moves.select_tensors(columns, torch.tensor(rows, dtype=torch.int64)))
        if isinstance(index, int | np.integer):
            row = int(indexing.row_numbers([int(index)], len(columns)))
            return {key: jg.row_of(column, row) for key, column in columns.items()}
        return type(self)(moves.select_tensors(columns, indexing.row_numbers(index, len(columns))))

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> list[Self]:
        """Consecutive parts, as views: of so many rows, the last one maybe fewer, or of the given numbers of rows each."""
        _check_dim("split", dim)
        columns = self.checked()
        if isinstance(split_size, Sequence):
            sizes = [col.whole_number("a size", size) for size in split_size]
            if min(sizes, default=0) < 0 or sum(sizes) != len(columns):
                raise DataError(f"the sizes of the parts must add up to the {len(columns)} rows, got {sizes}")
            bounds = [0, *accumulate(sizes)]
        else:
            size = col.whole_number("split_size", split_size)
            if size < 1:
                raise DataError(f"split needs parts of at least one row, got split_size={size}")
            bounds = [*range(0, len(columns), size), len(columns)]
        return list(map(type(self), moves.cut_tensors(columns, bounds)))

    def chunk(self, chunks: int, dim: int = 0) -> list[Self]:
        """At most `chunks` parts of ceil(B / chunks) rows, the last one maybe fewer, as `torch.chunk`; views."""
        chunks = col.whole_number("chunks", chunks)
        if chunks < 1:
            raise DataError(f"chunk needs at least one part, got {chunks}")
        return self.split(max(1, -(-len(self) // chunks)), dim)

    def unbind(self, dim: int = 0) -> list[dict[str, Tensor]]:
        """The rows, each a dict of views."""
        _check_dim("unbind", dim)
        return [self[row] for row in range(len(self))]

    @property
    def batch_size(self) -> torch.Size:
        """(B,), as a TensorDict has it."""
        return torch.Size([len(self)])

    @property
    def shape(self) -> torch.Size:
        """(B,)."""
        return self.batch_size

    @property
    def batch_dims(self) -> int:
        """1: a batch has rows, and what is behind them belongs to the columns."""
        return 1

    ndim = batch_dims

    def dim(self) -> int:
        """1, as `batch_dims`."""
        return 1

    def size(self, dim: int = 0) -> int:
        """B."""
        _check_dim("size", dim)
        return len(self)

    def numel(self) -> int:
        """B."""
        return len(self)

    def checked(self) -> Self:
        """The same columns, those of equal lengths sharing offsets. DataError where they are not columns of one row count."""
        if not self or col.is_even(self):
            return self
        columns = type(self)(col.intern_offsets(self))
        col.check_row_counts(columns, {})
        return columns

    # -- columns ------------------------------------------------------------------------------------------------------

    def is_empty(self) -> bool:
        """Whether there is not a single column."""
        return not self.keys()

    def select(self, *keys: str, inplace: bool = False, strict: bool = True) -> Self:
        """The named columns, storage shared. An unknown name is a DataError, or left out if not `strict`."""
        wanted = keys if strict else [key for key in keys if key in self]
        return self._replaced(col.pick("tensor column", self, wanted), inplace)

    def exclude(self, *keys: str, inplace: bool = False) -> Self:
        """All columns but the named ones, storage shared."""
        return self._replaced({key: column for key, column in self.items() if key not in keys}, inplace)

    def rename_key_(self, old_key: str | Sequence[str], new_key: str | Sequence[str]) -> Self:
        """Rename columns in place, one or several at once; returns self."""
        return self._replaced(col.renamed(self, (), old_key, new_key), inplace=True)

    def set(self, key: str, item: Tensor) -> Self:
        """`batch[key] = item`; returns self."""
        self[key] = item
        return self

    def update(self, *others: Any, **columns: Tensor) -> Self:  # type: ignore[override]  # as a TensorDict's, it returns self
        """As a dict's; returns self."""
        super().update(*others, **columns)
        return self

    def copy(self) -> Self:
        """A batch of the same tensors."""
        return type(self)(self)

    def to_dict(self) -> dict[str, Tensor]:
        """A plain dict of the same tensors."""
        return dict(self)

    def to_tensordict(self) -> TensorDict:
        """A TensorDict of batch size [B]; storage is shared."""
        from podium.protocol import tensordicts

        return tensordicts.put_together(len(self), self.checked(), {}, {})

    # -- storage ------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device | None:
        """The one device of all columns; None where they are on several, or there is not a single column."""
        devices = {column.device for column in self.values()}
        return devices.pop() if len(devices) == 1 else None

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> Self:
        """The columns on that device; shares what is there already."""
        if not isinstance(device, torch.device | str | int):
            raise DataError(
                f"a batch moves to a device, got {device!r}: columns have dtypes of their own, convert them one by one"
            )
        return self._map(lambda values: values.to(device, non_blocking=non_blocking))

    def cpu(self) -> Self:
        """`to("cpu")`."""
        return self.to("cpu")

    def cuda(self, device: torch.device | str | int = "cuda") -> Self:
        """`to("cuda")`."""
        return self.to(device)

    def pin_memory(self) -> Self:
        """The columns in page-locked memory, from which copies to a GPU need not wait."""
        return self._map(Tensor.pin_memory)

    def contiguous(self) -> Self:
        """The columns, each in one piece of memory; shares those that are."""
        return self._map(Tensor.contiguous)

    def consolidate(self) -> Self:
        """`contiguous()`: on its way to another process a batch needs no memory of its own."""
        return self.contiguous()

    def detach(self) -> Self:
        """The columns without a graph; storage is shared."""
        return self._map(Tensor.detach)

    def clone(self, recurse: bool = True) -> Self:
        """A batch of copied tensors; without `recurse`, of the same tensors."""
        return self._map(Tensor.clone) if recurse else self.copy()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)(moves.map_values(self, change))

    def _replaced(self, columns: dict[str, Tensor], inplace: bool) -> Self:
        if not inplace:
            return type(self)(columns)
        self.clear()
        return self.update(columns)

    def __repr__(self) -> str:
        columns = [f"{key}: {formatting.describe(column)}" for key, column in self.items()]
        return f"{type(self).__name__}({len(self)} rows; {', '.join(columns) or 'no columns'})"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a batch of rows has no {name!r}: it is a dict of tensors with what TensorDicts are mostly asked for; "
            "to_tensordict() gives a TensorDict",
            name=name,
            obj=self,
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`torch.cat` of batches, `torch.split`, `torch.chunk`, `torch.clone` and `torch.unbind` of one."""
        found = _OF_TORCH.get(func)
        if found is None:
            raise DataError(
                f"torch.{getattr(func, '__name__', func)} does not take a batch of rows: give it a column, or to_tensordict()"
            )
        return found(*args, **(kwargs or {}))


def _check_dim(operation: str, dim: int) -> None:
    if dim not in (0, -1):
        raise DataError(f"{operation}: a batch has one dim, its rows, got dim={dim}")


def _cat(tensors: Sequence[Mapping[str, Tensor]], dim: int = 0) -> Batch:
    _check_dim("cat", dim)
    batches = [batch_of(part).checked() for part in tensors]
    moves.same_keys("tensor column", batches)
    return Batch(moves.concat_tensors(batches))


_OF_TORCH: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.cat: _cat,
    torch.concat: _cat,
    torch.concatenate: _cat,
    torch.split: Batch.split,
    torch.chunk: Batch.chunk,
    torch.unbind: Batch.unbind,
    torch.clone: Batch.clone,
}


def batch_of(columns: object) -> Batch:
    """The columns of a dict or a TensorDict as a batch; a batch as it is. DataError for anything else but None."""
    return columns if type(columns) is Batch else Batch(tensors_of(columns)).checked()


def tensors_of(columns: object) -> Mapping[str, Tensor]:
    """The same columns as a mapping of tensors by name. DataError for what is not one, or a TensorDict that holds more."""
    if columns is None:
        return {}
    loaded = None if isinstance(columns, dict) else sys.modules.get("tensordict")
    if loaded is None or not isinstance(columns, loaded.TensorDictBase):
        if not isinstance(columns, Mapping):
            raise DataError(f"tensor columns must be a dict or a TensorDict, got a {type(columns).__name__}")
        return columns
    from podium.protocol import tensordicts

    tensors, objects, meta = tensordicts.take_apart(columns)
    for key in (*objects, *meta):
        raise DataError(f"entry {key!r} of the TensorDict is not a tensor: make the rows of it by DataProto.from_tensordict")
    return tensors

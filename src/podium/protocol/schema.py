"""What is known of a column by its name, and whether a batch's columns are so.

Only the form of a table is here. That of a step of RL is in `podium.workers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from podium.errors import DataError, nearest
from podium.protocol import formatting
from podium.protocol import jagged as jg
from podium.protocol.data_proto import DataProto

RAGGED = "*"
"""In a shape, the dim whose length is another in each row."""


@dataclass(frozen=True)
class Field:
    """A column of a step, by its name. One without dtypes is of objects, whose shape is ("B",)."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    """Those that it may have: more than one where it follows the model's. Empty for a column of objects."""
    shape: tuple[str, ...]
    """The dims by name, rows first: ("B", "*") is jagged."""
    meaning: str

    @property
    def is_ragged(self) -> bool:
        return RAGGED in self.shape

    @property
    def kind(self) -> str:
        """What a column has to be, in words.

        >>> Field("x", (torch.float32, torch.float64), ("B", "*"), "").kind
        'float32 or float64 [B, *]'
        """
        if not self.dtypes:
            return "objects"
        return f"{' or '.join(str(dtype).removeprefix('torch.') for dtype in self.dtypes)} [{', '.join(self.shape)}]"

    def fits(self, column: Tensor) -> bool:
        """Whether a tensor has one of the dtypes, as many dims, and the ragged one in its place or none at all."""
        ragged_dim = jg.ragged_dim(column) if jg.is_jagged(column) else None
        expected = self.shape.index(RAGGED) if self.is_ragged else None
        return column.dtype in self.dtypes and column.dim() == len(self.shape) and ragged_dim == expected


def check_fields(rows: DataProto, fields: Iterable[Field]) -> None:
    """DataError for the first of the fields that the rows lack, or have as another kind of column. Sizes are not compared."""
    for field in fields:
        found = _found(rows, field.name)
        if found is None:
            raise DataError(_missing(rows, field))
        is_fit = field.fits(found) if isinstance(found, Tensor) else not field.dtypes
        if not is_fit:
            it_is = formatting.describe(found) if isinstance(found, Tensor) else "objects"
            raise DataError(f"column {field.name!r} is {it_is}, it should be {field.kind}")


def _found(rows: DataProto, name: str) -> object | None:
    return rows.batch[name] if name in rows.batch else rows.non_tensor_batch.get(name)


def _missing(rows: DataProto, field: Field) -> str:
    names = [*rows.batch, *rows.non_tensor_batch]
    return (
        f"no column {field.name!r}{nearest(field.name, names)}; it should be {field.kind}; "
        f"there are: {', '.join(names) or 'none'}"
    )

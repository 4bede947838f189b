"""Rows as dicts: one row of a batch (`DataProtoItem`), and columns made of dicts whose keys may differ.

What kind of column a key becomes is decided by its values and never by how long they happen to be: tensors of one dim or more
become jagged even when all are equally long. Two workers' batches, joined with `missing="none"`, give what one worker would have
made of all the rows: ints (int64) and floats (float64) become float64 there, too. `joined_numbers` finds the type, here and in
`concat`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.arrays import written_as
from podium.protocol.columns import ObjectColumn, object_column, pick
from podium.protocol.meta import meta_of_rows

_NUMBERS = (bool, int, float, np.bool_, np.number)
_INT64 = range(-(2**63), 2**63)
_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = frozenset([*_INTS, "bool", "float16", "float32", "float64", "complex64", "complex128"])
"""What numpy and torch both have, by numpy's names."""


class DataProtoItem:
    """One row of a `DataProto`: views of its tensors (a jagged column's row without padding), its objects, a copy of the meta.

    The meta is copied when it is first asked for, since most rows are taken for their columns alone.
    """

    def __init__(
        self,
        batch: dict[str, Tensor] | None = None,
        non_tensor_batch: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.batch = {} if batch is None else batch
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self._batch_meta: tuple[Mapping[str, Any], range, int] = ({}, range(0), 0)
        if meta_info is not None:
            self.meta_info = meta_info

    @cached_property
    def meta_info(self) -> dict[str, Any]:
        """The meta of the batch, its padding marks those of this row."""
        return meta_of_rows(*self._batch_meta)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.batch, self.non_tensor_batch, self.meta_info)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.batch}, {self.non_tensor_batch}, {self.meta_info})"


def item(
    batch: Mapping[str, Tensor], objects: Mapping[str, ObjectColumn], meta: Mapping[str, Any], row: int, num_rows: int
) -> DataProtoItem:
    """The row of that number, of so many."""
    tensors = {key: jg.row_of(column, row) for key, column in batch.items()}
    found = DataProtoItem(tensors, {key: rows[row] for key, rows in objects.items()})
    found._batch_meta = meta, range(row, row + 1), num_rows
    return found


def columns_of(rows: Sequence[Mapping[str, Any]], dense: Iterable[str]) -> tuple[dict[str, Tensor], dict[str, ObjectColumn]]:
    """Tensor and object columns of the rows; their keys are those of any row, in the order in which they first appear."""
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(f"row {number} is a {type(row).__name__}, not a dict: {row!r}")
    if rows and not any(rows):
        raise DataError(
            f"none of the {len(rows)} rows has a key, and columns count the rows: give each a value at least, as an id"
        )
    stacked = dict(pick("column", {key: None for row in rows for key in row}, dense if rows else ()))
    tensors: dict[str, Tensor] = {}
    objects: dict[str, ObjectColumn] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row.get(key) for row in rows]
        column = _column(key, values, key in stacked)
        if isinstance(column, Tensor):
            tensors[key] = column
        else:
            objects[key] = column
    return tensors, objects


def joined_numbers(values: Sequence[Any]) -> NDArray[Any] | None:
    """[B] the numbers as one array; None where they are of no one kind, as bools and ints, or no type of torch holds them all.

    Numbers of one type keep it. Others get the one that numpy finds for them (int16 for int8 and int16, float64 for ints and
    floats); but ints for which numpy finds a float, as uint64 beside int64, get int64. None where that would change a number.
    """
    kinds = set(map(type, values))
    are_bools = {issubclass(kind, bool | np.bool_) for kind in kinds}
    has_ints = any(issubclass(kind, int) for kind in kinds)
    if len(are_bools) > 1 or (has_ints and any(isinstance(value, int) and value not in _INT64 for value in values)):
        return None
    array = np.asarray(values)
    if array.dtype.name not in _DTYPES:
        return None
    if array.dtype.kind not in "fc" or not (has_ints or any(issubclass(kind, np.integer) for kind in kinds)):
        return array
    ints = [(row, int(value)) for row, value in enumerate(values) if isinstance(value, int | np.integer)]
    if len(ints) == len(values) > 0:  # uint64 beside others
        return np.array([value for _, value in ints]) if all(value in _INT64 for _, value in ints) else None
    return array if all(array[row].item() == value for row, value in ints) else None  # numpy would compare rounded values


def _column(key: str, values: Sequence[Any], stack: bool) -> Tensor | ObjectColumn:
    if all(isinstance(value, Tensor) for value in values) and (stack or not _are_numbers_of_several_types(values)):
        return _of_tensors(key, values, stack)
    plain = [numbers_of(value) if _is_number(value) else value for value in values]
    numbers = joined_numbers(plain) if all(isinstance(value, _NUMBERS) for value in plain) else None
    if numbers is not None:
        return torch.from_numpy(numbers)
    if stack:
        row = next((number for number, value in enumerate(values) if not isinstance(value, Tensor)), 0)
        raise DataError(f"column {key!r} is to be stacked, but is {values[row]!r} in row {row}")
    return object_column([value.item() if _is_number(value) else value for value in values])


def _is_number(value: Any) -> bool:
    """Whether it is a tensor that holds one number, which in rows is as good as the number itself."""
    return isinstance(value, Tensor) and not jg.is_jagged(value) and value.layout is torch.strided and not value.dim()


def _are_numbers_of_several_types(values: Sequence[Tensor]) -> bool:
    return len({value.dtype for value in values}) > 1 and all(map(_is_number, values))


def numbers_of(value: Tensor) -> Any:
    """A 0-d tensor's number, any other's numbers, as numpy has them: float32 for dtypes that numpy lacks (bfloat16)."""
    value = value.detach().cpu()
    return (value if written_as(value.dtype)[1] is value.dtype else value.float()).numpy()[()]


def _of_tensors(key: str, values: Sequence[Tensor], stack: bool) -> Tensor:
    for number, value in enumerate(values):
        _check_plain(key, number, value, values[0])
    if not stack and values[0].dim():
        try:
            return jg.jagged_from_rows(values)
        except DataError as exc:
            raise DataError(f"column {key!r}: {exc}; make it objects, or one shape") from exc
    for number, value in enumerate(values):
        if value.dtype != values[0].dtype or value.shape != values[0].shape:
            raise DataError(
                f"column {key!r}: row {number} is {value.dtype}{list(value.shape)}, but row 0 is "
                f"{values[0].dtype}{list(values[0].shape)}"
            )
    return torch.stack(list(values))


def _check_plain(key: str, number: int, value: Tensor, first: Tensor) -> None:
    """DataError for a tensor that cannot be joined with those of other rows."""
    if jg.is_jagged(value):
        raise DataError(
            f"column {key!r}: row {number} is a nested tensor, but a row has a dense one: give its values and its lengths as "
            "two keys, or list(value.unbind()), which stays an object"
        )
    if value.layout is not torch.strided:
        raise DataError(
            f"column {key!r}: row {number} has layout {value.layout}, and cannot be joined with others: use .to_dense()"
        )
    if value.device != first.device:
        raise DataError(
            f"column {key!r}: row {number} is on {value.device}, but row 0 is on {first.device}: move them to one device"
        )

"""Joining two batches side by side (`DataProto.union`): which rows belong together, and what to say where they disagree."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol import equality, formatting
from podium.protocol import jagged as jg
from podium.protocol.columns import ObjectColumn, as_objects, pick
from podium.protocol.meta import copy_meta

Tables: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, ObjectColumn], Mapping[str, Any]]


def join_tables(mine: Tables, theirs: Tables) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The entries of both; DataError names one that both have with different values, its row and both values."""
    for key in (mine[0].keys() & theirs[1].keys()) | (mine[1].keys() & theirs[0].keys()):
        raise DataError(
            f"union: column {key!r} is of tensors in one batch and of objects in the other; each name is one column: rename the "
            "tensor column, or leave one of them out by select()"
        )
    for kind, table, added in zip(("tensor column", "object column", "meta key"), mine, theirs, strict=True):
        for key in table.keys() & added.keys():
            pair = table[key], added[key]
            if kind == "object column" and pair[0].dtype != pair[1].dtype:
                pair = as_objects(pair[0]), as_objects(pair[1])  # as where the numbers of one of them were given in a list
            _check_equal(f"union: {kind} {key!r}", *pair)
    return {**mine[0], **theirs[0]}, {**mine[1], **theirs[1]}, {**mine[2], **copy_meta(theirs[2])}


def _check_equal(what: str, mine: Any, theirs: Any) -> None:
    try:
        if equality.equal(mine, theirs):
            return
    except DataError as exc:
        raise DataError(
            f"{what} is in both batches: {_incomparable_row(mine, theirs)}{exc}; leave it out of one of them by select()"
        ) from exc
    raise DataError(f"{what} is in both batches with different values: {difference(mine, theirs)}")


def _incomparable_row(mine: Any, theirs: Any) -> str:
    """Which row of two object columns it is that `equality.equal` does not compare, for its error."""
    for row, pair in enumerate(zip(mine, theirs, strict=True)) if isinstance(mine, np.ndarray) and mine.ndim else ():
        try:
            equality.equal(*pair)
        except DataError:
            return f"row {row}: "
    return ""


def check_same_rows(mine: int, theirs: int) -> None:
    """DataError when two batches that are joined side by side differ in rows, with the remedy where one is repeated."""
    if mine == theirs:
        return
    few, many = sorted((mine, theirs))
    times = f" = {few} x {many // few}: repeat({many // few}) the smaller one first" if few and many % few == 0 else ""
    raise DataError(f"union needs equal row counts, got {mine} and {theirs}{f' ({many}{times})' if times else ''}")


def rows_by(key: str, mine: Tables, theirs: Tables) -> Tensor:
    """[B] row numbers of the second batch in the order of the first, matched by the column `key`, whose values are distinct."""
    wanted, there = (as_objects(pick("column", {**side[0], **side[1]}, [key])[key]).tolist() for side in (mine, theirs))
    check_same_rows(len(wanted), len(there))
    for ids in (wanted, there):
        _check_distinct(key, ids)
    place = {value: row for row, value in enumerate(there)}
    for row, value in enumerate(wanted):
        if value not in place:
            raise DataError(f"union: row {row} has {key} {value!r}, which no row of the other batch has")
    return torch.tensor([place[value] for value in wanted], dtype=torch.int64)


def _check_distinct(key: str, ids: Sequence[Any]) -> None:
    first: dict[Any, int] = {}
    for row, value in enumerate(ids):
        if not isinstance(value, Hashable):
            raise DataError(f"union: row {row} has {key} {value!r}, a {type(value).__name__}; join on strings or numbers")
        if value in first:
            raise DataError(f"union: rows {first[value]} and {row} both have {key} {value!r}; join on values that are distinct")
        first[value] = row


def difference(mine: Any, theirs: Any) -> str:
    """Where two columns or meta values that are not equal differ first, and both values there, for an error."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        if mine.dim() == 0 or _row_kind(mine) != _row_kind(theirs):
            return f"{formatting.short(mine)} and {formatting.short(theirs)}"
        mine, theirs = ([jg.row_of(column, row) for row in range(jg.num_rows(column))] for column in (mine, theirs))
    elif not (isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) and mine.shape == theirs.shape and mine.ndim):
        return f"{formatting.short(mine)} and {formatting.short(theirs)}"
    for row, pair in enumerate(zip(mine, theirs, strict=True)):
        if not equality.equal(*pair):
            return f"row {row}{_within(*pair)}"
    return f"{formatting.short(mine)} and {formatting.short(theirs)}"


def _within(mine: Any, theirs: Any) -> str:
    """Two rows that differ; of long tensors the first element that does."""
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and mine.shape == theirs.shape and mine.numel() > formatting.FEW:
        same = (mine == theirs) | ((mine != mine) & (theirs != theirs))
        place = tuple((~same).nonzero()[0].tolist())
        return f", element {list(place)}: {mine[place].item()} and {theirs[place].item()}"
    return f": {formatting.short(mine)} and {formatting.short(theirs)}"


def _row_kind(column: Tensor) -> tuple[Any, ...]:
    values = jg.parts(column)[0] if jg.is_jagged(column) else column
    return jg.is_jagged(column), jg.ragged_dim(column), column.dtype, jg.num_rows(column), values.shape[1:]

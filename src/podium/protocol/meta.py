"""What is true of a whole batch: how meta values are copied and carried along with rows.

Three keys are Podium's own. `AUTO_PADDING_KEY` marks a batch that may be padded when it does not divide among ranks.
`PADDING_ROWS_KEY` is set on a shard that was padded: the numbers of its rows that are copies, and `PADDING_OF_KEY` of how many
rows, since a worker may hand the meta on to rows that it does not speak of. They stay with the rows through every operation,
whichever meta keys it names; row operations keep the numbers right. Merging is in `merging.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from podium.errors import DataError

AUTO_PADDING_KEY = "_podium_auto_padding"
"""True on a batch whose dispatch may copy its last row until all ranks get as many."""
PADDING_ROWS_KEY = "_podium_padding_rows"
"""A tuple of the rows that are such copies; absent where there are none."""
PADDING_OF_KEY = "_podium_padding_of"
"""The number of rows of the batch whose rows these are. On a batch of another number the marks are stale."""
STALE = -1
"""In its place: the marks were stale before rows were taken."""

PRIVATE_KEYS = (AUTO_PADDING_KEY, PADDING_ROWS_KEY, PADDING_OF_KEY)

IMMUTABLE = frozenset({bool, bytes, complex, float, int, str, type(None)})


def copy_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing that can be changed."""
    memo: dict[int, Any] = {}  # what two keys share, their copies share
    return {key: value if type(value) in IMMUTABLE else _copied(value, memo) for key, value in meta.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) is list and id(value) not in memo and IMMUTABLE.issuperset(map(type, value)):
        memo[id(value)] = value.copy()  # what `deepcopy` would do item by item, ten times slower
    return copy.deepcopy(value, memo)


def meta_of_rows(meta: Mapping[str, Any], rows: range | Tensor, num_rows: int) -> dict[str, Any]:
    """A copy of the meta for a batch that holds these rows, by number, of the one of `num_rows` that it comes from."""
    if not meta:
        return {}
    copied = copy_meta(meta)
    padding = copied.get(PADDING_ROWS_KEY, ())
    if padding and not is_marked(meta, num_rows):
        copied[PADDING_OF_KEY] = STALE
    elif padding:
        numbers = rows if isinstance(rows, range) else rows.tolist()
        mark_padding(copied, [new for new, old in enumerate(numbers) if old in padding], len(numbers))
    return copied


def mark_padding(meta: dict[str, Any], rows: Sequence[int], num_rows: int) -> None:
    """Say which of so many rows are padding, in place."""
    unmark(meta)
    if rows:
        meta |= {PADDING_ROWS_KEY: tuple(rows), PADDING_OF_KEY: num_rows}


def padding_mask(meta: Mapping[str, Any], num_rows: int) -> Tensor:
    """[B] bool: True for rows that are marked as padding. DataError for the marks of a batch of another length."""
    if PADDING_ROWS_KEY in meta and not is_marked(meta, num_rows):
        raise DataError(
            f"which of these {num_rows} rows are padding is not known: their meta came from a batch of another length. Make "
            "them with the padded batch's own methods (select_idxs, repeat, ...), or without its meta"
        )
    mask = torch.zeros(num_rows, dtype=torch.bool)
    mask[[row for row in meta.get(PADDING_ROWS_KEY, ()) if row < num_rows]] = True
    return mask


def unmark(meta: dict[str, Any]) -> None:
    """Say that no row is padding, in place."""
    for key in (PADDING_ROWS_KEY, PADDING_OF_KEY):
        meta.pop(key, None)


def is_marked(meta: Mapping[str, Any], num_rows: int) -> bool:
    """Whether the meta says which of the rows of a batch are padding; marks of another number of rows say nothing of it."""
    return PADDING_ROWS_KEY in meta and meta.get(PADDING_OF_KEY, num_rows) == num_rows


def private_meta(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the meta that stays with the rows whatever keys are chosen."""
    return {key: meta[key] for key in PRIVATE_KEYS if key in meta}

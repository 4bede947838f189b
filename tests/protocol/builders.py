"""Batches with every kind of column, and the plain Python rows that they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from podium.protocol import DataProto
from podium.protocol.jagged import jagged, offsets_of, parts

META = {"step": 7, "notes": {"seen": [1]}}


class Row(NamedTuple):
    """One row: a number, a text, tokens, and pairs with a length of their own. Of the tokens there are four ragged columns:
    `tokens`, `gains`, and with the ragged dim last, [2, number of tokens], `places` and `marks`.
    """

    number: int
    text: str | None
    tokens: tuple[int, ...]
    pairs: tuple[tuple[float, float], ...]

    @property
    def gains(self) -> tuple[float, ...]:
        return tuple(token / 4 for token in self.tokens)

    @property
    def places(self) -> list[list[int]]:
        return [list(self.tokens), [-token for token in self.tokens]]


def ragged(rows: Sequence[Sequence[Any]], dtype: torch.dtype = torch.int64, *trailing: int) -> Tensor:
    """A jagged column, of no rows too."""
    values = torch.tensor([item for row in rows for item in row], dtype=dtype).reshape(-1, *trailing)
    return jagged(values, offsets_of(torch.tensor([len(row) for row in rows], dtype=torch.int64)))


def ragged_last(rows: Sequence[list[list[int]]], dtype: torch.dtype = torch.int64) -> Tensor:
    """A column [B, 2, *]."""
    values = torch.tensor([pair for row in rows for pair in zip(*row, strict=True)], dtype=dtype).reshape(-1, 2)
    return jagged(values, offsets_of(torch.tensor([len(row[0]) for row in rows], dtype=torch.int64)), 2)


def batch_of(rows: Sequence[Row]) -> DataProto:
    """The rows as columns; `tokens` and `gains` come with offsets of their own, which are equal."""
    return DataProto(
        {
            "number": torch.tensor([row.number for row in rows], dtype=torch.int64),
            "square": torch.tensor([[row.number**2, 1.0] for row in rows], dtype=torch.bfloat16).reshape(-1, 2),
            "tokens": ragged([row.tokens for row in rows]),
            "gains": ragged([row.gains for row in rows], torch.float32),
            "pairs": ragged([row.pairs for row in rows], torch.float64, 2),
            "places": ragged_last([row.places for row in rows]),
            "marks": ragged_last([row.places for row in rows], torch.float32),
        },
        {"text": [row.text for row in rows]},
        META,
    )


def rows_of(data: DataProto) -> list[Row]:
    """What a batch made by `batch_of` holds, read without any operation of DataProto's own."""
    return [
        Row(number, text, tuple(tokens), tuple(map(tuple, pairs)))
        for number, text, tokens, pairs in zip(
            data.batch["number"].tolist(),
            data.non_tensor_batch["text"],
            lists_of(data.batch["tokens"]),
            lists_of(data.batch["pairs"]),
            strict=True,
        )
    ]


def lists_of(column: Tensor) -> list[list[Any]]:
    values, offsets = parts(column)
    ends = offsets.tolist()
    return [values[start:end].tolist() for start, end in pairwise(ends)]


def pieces_of(column: Tensor) -> list[list[Any]]:
    """The rows of a column [B, 2, *], read by torch's own `unbind`, which knows where the ragged dim is."""
    return [row.tolist() for row in column.unbind()] if len(parts(column)[1]) > 1 else []


def check(data: DataProto, expected: Sequence[Row]) -> None:
    """The batch is these rows, in every column; and ragged columns of equal lengths share one offsets object."""
    assert rows_of(data) == list(expected)
    assert type(len(data)) is int
    assert len(data) == len(expected)
    assert data.batch["square"].tolist() == [[float(torch.tensor(row.number**2).bfloat16()), 1.0] for row in expected]
    assert lists_of(data.batch["gains"]) == [list(row.gains) for row in expected]
    assert parts(data.batch["tokens"])[1] is parts(data.batch["gains"])[1]
    product = data.batch["tokens"] * data.batch["gains"]
    assert lists_of(product) == [[token * gain for token, gain in zip(row.tokens, row.gains, strict=True)] for row in expected]
    assert pieces_of(data.batch["places"]) == [row.places for row in expected]
    assert pieces_of(data.batch["places"] * data.batch["marks"]) == [
        [[place**2 for place in places] for places in row.places] for row in expected
    ]
    assert data.meta_info == META
    dtypes = {key: column.dtype for key, column in data.batch.items()}
    assert dtypes == {
        "number": torch.int64,
        "square": torch.bfloat16,
        "tokens": torch.int64,
        "gains": torch.float32,
        "pairs": torch.float64,
        "places": torch.int64,
        "marks": torch.float32,
    }


FOUR = (
    Row(0, "a", (1, 2, 3), ((0.5, 1.5),)),
    Row(1, None, (), ((2.0, 3.0), (4.0, 5.0))),
    Row(2, "c", (4,), ()),
    Row(3, "d", (5, 6), ((6.0, 7.0),)),
)

_numbers = st.integers(0, 9)
ROWS = st.lists(
    st.builds(
        Row,
        number=_numbers,
        text=st.one_of(st.none(), st.sampled_from(["", "x"])),
        tokens=st.lists(_numbers, max_size=3).map(tuple),
        pairs=st.lists(st.tuples(st.just(0.5), _numbers.map(float)), max_size=2).map(tuple),
    ),
    max_size=5,
)
"""Any few rows, of which some have no tokens."""

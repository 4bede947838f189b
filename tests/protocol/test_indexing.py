"""Mini-batches, repeats by row, rows cut into pieces, and padding to a divisor, against plain Python."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import DataError
from podium.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from tests.protocol.builders import FOUR, META, ROWS, Row, batch_of, check, lists_of, ragged, rows_of

# -- mini-batches -------------------------------------------------------------------------------------------------------


def numbered(count: int) -> DataProto:
    return DataProto({"x": torch.arange(count)})


def orders(data: DataProto, size: int, epochs: int, **settings: Any) -> list[list[int]]:
    return [batch.batch["x"].tolist() for batch in data.make_iterator(size, epochs, **settings)]


@given(ROWS, st.integers(1, 3), st.integers(0, 2))
def test_mini_batches_in_order(rows: list[Row], size: int, epochs: int) -> None:
    found = list(batch_of(rows).make_iterator(size, epochs, last="short"))
    expected = [rows[start : start + size] for _ in range(epochs) for start in range(0, len(rows), size)]
    assert len(found) == len(expected)
    for batch, part in zip(found, expected, strict=True):
        check(batch, part)


@given(ROWS, st.integers(1, 3), st.integers(0, 2**40))
def test_shuffled_mini_batches_hold_every_row_once_an_epoch(rows: list[Row], size: int, seed: int) -> None:
    found = list(batch_of(rows).make_iterator(size, 2, seed=seed, last="short"))
    for epoch in (found[: len(found) // 2], found[len(found) // 2 :]):
        seen = [row for batch in epoch for row in rows_of(batch)]
        assert Counter(seen) == Counter(rows)
    for batch in found:
        check(batch, rows_of(batch))


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), torch.tensor(3)])
def test_a_seed_of_any_integer_type_gives_the_same_order(seed: Any) -> None:
    assert orders(numbered(8), 4, 2, seed=seed) == orders(numbered(8), 4, 2, seed=3)


@pytest.mark.parametrize("seed", [3.0, True, np.float64(3), "3"])
def test_a_seed_that_is_not_an_integer_is_refused(seed: Any) -> None:
    with pytest.raises(DataError, match="seed must be a whole number, got"):
        orders(numbered(8), 4, 2, seed=seed)


def test_the_seed_decides_the_order_and_no_global_generator_is_touched() -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    first = orders(numbered(8), 4, 2, seed=3)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]
    torch.manual_seed(2)
    assert first == orders(numbered(8), 4, 2, seed=3)
    assert first[:2] != first[2:]
    assert first != orders(numbered(8), 4, 2, seed=4)
    assert (
        orders(numbered(4), 2, 1) == orders(numbered(4), 2, 1, seed=3, dataloader_kwargs={"shuffle": False}) == [[0, 1], [2, 3]]
    )


@pytest.mark.parametrize(
    ("last", "expected", "padding"),
    [("short", [[0, 1, 2], [3, 4]], []), ("drop", [[0, 1, 2]], []), ("pad", [[0, 1, 2], [3, 4, 4]], [2])],
)
def test_the_last_rows_of_an_epoch_have_a_declared_fate(last: str, expected: list[list[int]], padding: list[int]) -> None:
    assert orders(numbered(5), 3, 2, last=last) == expected * 2
    *_, final = numbered(5).make_iterator(3, 1, last=last)  # type: ignore[arg-type]
    assert final.padding_mask.nonzero().flatten().tolist() == padding
    assert orders(numbered(0), 3, 2, last=last) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 1), "5 rows make no whole mini-batches of 3; say last='short', 'drop' or 'pad'"),
        ((0, 1), "at least one row and epochs must not be negative, got 0 and 1"),
        ((5, -1), "got 5 and -1"),
        ((5, 1, None, {"shuffle": True}), "never by the global generator; give seed="),
        ((5, 1, 1, {"num_workers": 2, "drop_last": True}), r"'shuffle' and 'drop_last' of .*take \['num_workers'\] out"),
    ],
)
def test_what_cannot_be_iterated_is_said_before_the_first_mini_batch(arguments: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        numbered(5).make_iterator(*arguments)
    with pytest.raises(DataError, match="'error', 'short', 'drop' or 'pad', got 'keep'"):
        numbered(5).make_iterator(5, 1, last="keep")  # type: ignore[arg-type]


# -- repeats ------------------------------------------------------------------------------------------------------------


@given(ROWS, st.data())
def test_each_row_has_a_repeat_count_of_its_own(rows: list[Row], draw: st.DataObject) -> None:
    times = draw.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    expected = [row for row, count in zip(rows, times, strict=True) for _ in range(count)]
    for counts in (times, tuple(times), torch.tensor(times, dtype=torch.int32), np.array(times, dtype=np.int64)):
        check(batch_of(rows).sample_level_repeat(counts), expected)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([1, 2], r"4 rows need as many repeat counts, got shape \(2,\)"),
        ([[1], [1], [1], [1]], r"got shape \(4, 1\)"),
        ([1, 1, -2, 1], "row 2 cannot be repeated -2 times"),
        ([1.0, 1.0, 1.0, 1.0], "repeat counts must be integers, got torch.float64: 1.0"),
        ([1j, 1, 1, 1], "repeat counts must be integers, got torch.complex128: 1j"),
        ([True, True, True, True], "repeat counts must be integers, got torch.bool: True"),
        (["1", "1", "1", "1"], r"repeat counts are a list of integers, got \['1'"),
        (np.array([1, 1, 1, 2**63], dtype=np.uint64), "repeat counts out of range: 9223372036854775808 is more than any"),
    ],
)
def test_wrong_repeat_counts_say_which(times: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        batch_of(FOUR).sample_level_repeat(times)


# -- row numbers --------------------------------------------------------------------------------------------------------

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", ">i2", ">u8"]


@pytest.mark.parametrize("dtype", INTS)
def test_rows_are_taken_by_ints_of_every_width(dtype: str) -> None:
    data = numbered(4)
    numbers = np.array([2, 1, 2], dtype=dtype)
    assert data.select_idxs(numbers).batch["x"].tolist() == [2, 1, 2]
    assert data.sample_level_repeat(np.array([0, 2, 0, 1], dtype=dtype)).batch["x"].tolist() == [1, 1, 3]
    assert data[numbers[:0]].batch["x"].tolist() == []
    if numbers.dtype.isnative:
        assert data[torch.from_numpy(numbers)].batch["x"].tolist() == [2, 1, 2]
    if numbers.dtype.kind == "i":
        assert data[-numbers].batch["x"].tolist() == [2, 3, 2]
    for wrong in ([0, 4], [0, np.iinfo(dtype).max]):
        with pytest.raises(DataError, match=f"out of range: .*{wrong[1]}"):
            data[np.array(wrong, dtype=dtype)]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (np.array([1j, 2]), "row numbers must be integers, got torch.complex128: 1j"),
        (torch.tensor([0.5, 1.0]), "row numbers must be integers, got torch.float32: 0.5"),
        (np.array([1, 2], dtype="m8[s]"), "a mask or a list of numbers, got array"),
        (np.array([2**63], dtype=np.uint64), "row numbers out of range: 9223372036854775808 is more than any count of rows"),
        ([2**64], r"a list of numbers, got \[18446744073709551616\]"),
    ],
)
def test_values_that_are_not_row_numbers_are_named(index: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        numbered(4).select_idxs(index)


# -- rows cut into pieces -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), max_size=4), st.integers(1, 3))
def test_rows_are_cut_into_pieces_and_other_columns_repeated(lengths: list[int], n: int) -> None:
    """Every row of length n * k becomes n rows of length k, beside copies of what is not cut."""
    rows = [[10 * row + place for place in range(length * n)] for row, length in enumerate(lengths)]
    dense = torch.arange(len(rows) * n * 2 * 3).reshape(len(rows), n * 2, 3)
    data = DataProto({"j": ragged(rows), "d": dense, "one": torch.arange(len(rows))}, {"o": [[row] for row in range(len(rows))]})
    pieces = [row[len(row) // n * k : len(row) // n * (k + 1)] for row in rows for k in range(n)]
    cut = data.unfold_column_chunks(n)
    assert lists_of(cut.batch["j"]) == pieces
    assert cut.batch["d"].tolist() == [piece.tolist() for row in dense for piece in row.split(2)]
    assert cut.batch["one"].tolist() == [row for row in range(len(rows)) for _ in range(n)]
    assert cut.non_tensor_batch["o"].tolist() == [[row] for row in range(len(rows)) for _ in range(n)]
    only_dense = data.unfold_column_chunks(n, split_keys=["d"])
    assert lists_of(only_dense.batch["j"]) == [row for row in rows for _ in range(n)]
    assert list(only_dense.batch) == list(data.batch)


def test_pieces_of_columns_of_equal_lengths_multiply_and_know_their_padding() -> None:
    data = DataProto(
        {"a": ragged([[1, 2], [3, 4, 5, 6]]), "b": ragged([[1, 2], [3, 4, 5, 6]])}, meta_info={"_podium_padding_rows": (1,)}
    )
    cut = data.unfold_column_chunks(2)
    assert lists_of(cut.batch["a"] * cut.batch["b"]) == [[1], [4], [9, 16], [25, 36]]
    assert cut.padding_mask.tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("n", "keys", "message"),
    [
        (0, None, "n_split must be at least 1, got 0"),
        (2, ["tokens"], "jagged column 'tokens': row 0 has length 3, which does not divide by 2"),
        (3, ["square"], r"column 'square' is bfloat16\[4, 2\]: 2 does not divide by 3"),
        (2, ["number"], r"column 'number' is int64\[4\]: its rows have no length to split in 2"),
        (2, ["tokns"], "no tensor column 'tokns'; did you mean 'tokens'"),
    ],
)
def test_rows_that_cannot_be_cut_are_named(n: int, keys: list[str] | None, message: str) -> None:
    data = batch_of(FOUR)
    with pytest.raises(DataError, match=message):
        data.unfold_column_chunks(n, keys)
    check(data, FOUR)


# -- padding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_tensordict", [False, True])
@given(rows=ROWS, divisor=st.integers(1, 7))
def test_padding_to_a_divisor_and_back(as_tensordict: bool, rows: list[Row], divisor: int) -> None:
    """With jagged columns too; the rows given are left alone, and the padding is marked."""
    data = batch_of(rows).to_tensordict() if as_tensordict else batch_of(rows)
    padded, missing = pad_dataproto_to_divisor(data, divisor)
    back = unpad_dataproto(padded, missing)
    assert {type(padded), type(back)} == {type(data)}
    assert missing == -len(rows) % divisor
    first, last, whole = (DataProto.from_tensordict(each) if as_tensordict else each for each in (padded, back, data))
    assert len(first) % divisor == 0
    assert first.padding_mask.tolist() == [False] * len(rows) + [True] * missing
    check(DataProto(first.batch, first.non_tensor_batch, META), [*rows, *rows[-1:] * missing])
    check(last, rows)
    check(whole, rows)


def test_padding_twice_keeps_the_first_marks() -> None:
    once, _ = pad_dataproto_to_divisor(numbered(3), 2)
    twice, missing = pad_dataproto_to_divisor(once, 3)
    assert twice.padding_mask.tolist() == [False] * 3 + [True] * 3
    assert unpad_dataproto(twice, missing).padding_mask.tolist() == [False] * 3 + [True]


def test_impossible_padding_is_refused() -> None:
    with pytest.raises(DataError, match="the divisor must be at least 1, got 0"):
        pad_dataproto_to_divisor(numbered(3), 0)
    for count in (-1, 4):
        with pytest.raises(DataError, match=f"{count} rows of padding cannot be taken off 3 rows"):
            unpad_dataproto(numbered(3), count)

"""Row operations against a plain Python model: a list of rows, of which every operation is one line."""

from __future__ import annotations

import copy
import pickle
import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ChunkError, DataError, PodiumError
from podium.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from podium.protocol.jagged import parts
from tests.protocol.builders import FOUR, META, ROWS, Row, batch_of, check, ragged

BOUND = st.one_of(st.none(), st.integers(-7, 7))


@given(ROWS, BOUND, BOUND, st.one_of(st.none(), st.sampled_from([-3, -2, -1, 1, 2, 3])))
def test_slices_are_those_of_a_list(rows: list[Row], start: int | None, stop: int | None, step: int | None) -> None:
    check(batch_of(rows)[start:stop:step], rows[start:stop:step])
    check(batch_of(rows).slice(start, stop, step), rows[start:stop:step])


@given(ROWS, st.data())
def test_masks_and_row_numbers_choose_rows(rows: list[Row], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    check(batch_of(rows)[torch.tensor(mask, dtype=torch.bool)], [row for row, keep in zip(rows, mask, strict=True) if keep])
    if rows:
        chosen = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=6))
        check(batch_of(rows).select_idxs(chosen), [rows[number] for number in chosen])


@given(ROWS, st.integers(1, 7))
def test_parts_add_up_to_the_whole(rows: list[Row], num_parts: int) -> None:
    """A2: exactly as many parts as asked for, also with fewer rows than parts; sizes differ by at most one."""
    data = batch_of(rows)
    found = data.partition(num_parts)
    sizes = [len(part) for part in found]
    assert (len(sizes), sum(sizes)) == (num_parts, len(rows))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    for start, part in zip(np.cumsum([0, *sizes]), found, strict=False):
        check(part, rows[start : start + len(part)])
    check(DataProto.concat(found), rows)
    if len(rows) % num_parts == 0:
        check(DataProto.concat(data.chunk(num_parts)), rows)
    else:
        with pytest.raises(ChunkError, match=rf"{len(rows)} rows cannot be cut into {num_parts} equal parts"):
            data.chunk(num_parts)
    for start, part in zip(range(0, len(rows), num_parts), data.split(num_parts), strict=True):
        check(part, rows[start : start + num_parts])


@given(ROWS, st.integers(0, 3))
def test_repeat(rows: list[Row], times: int) -> None:
    check(batch_of(rows).repeat(times), [row for row in rows for _ in range(times)])
    check(batch_of(rows).repeat(times, interleave=False), rows * times)


@given(ROWS, st.randoms(use_true_random=False))
def test_reorder_is_in_place(rows: list[Row], rng: random.Random) -> None:
    data, order = batch_of(rows), rng.sample(range(len(rows)), len(rows))
    data.reorder(torch.tensor(order, dtype=torch.int64))
    check(data, [rows[number] for number in order])


@given(st.lists(ROWS, min_size=1, max_size=3))
def test_concat(batches: list[list[Row]]) -> None:
    check(DataProto.concat([batch_of(rows) for rows in batches]), [row for rows in batches for row in rows])


def test_operations_can_follow_one_another_in_any_order() -> None:
    """Random walks: what one operation leaves is what the next one works on, pickling included."""
    rng = random.Random(0)
    for _ in range(60):
        rows = [rng.choice(FOUR) for _ in range(rng.randrange(5))]
        data = batch_of(rows)
        for _ in range(6):
            data, rows = _random_step(rng, data, rows)
            check(data, rows)


def _random_step(rng: random.Random, data: DataProto, rows: Sequence[Row]) -> tuple[DataProto, list[Row]]:
    rows, cut = list(rows), rng.randrange(len(rows) + 1)
    chosen = rng.sample(range(len(rows)), rng.randrange(len(rows) + 1))
    times = [rng.randrange(3) for _ in rows]
    match rng.randrange(12):
        case 0:
            return data[cut:], rows[cut:]
        case 1:
            return data[::-1], rows[::-1]
        case 2:
            return data[chosen], [rows[number] for number in chosen]
        case 3:
            return DataProto.concat([data[cut:], data[:cut]]), rows[cut:] + rows[:cut]
        case 4 if len(rows) < 20:
            return data.repeat(2), [row for row in rows for _ in range(2)]
        case 5:
            return pickle.loads(pickle.dumps(data, protocol=5)), rows
        case 6:
            taken = data.pop(["gains"], ["text"])
            return data.union(taken), rows
        case 7:
            return data.rename("tokens", "t").rename("t", "tokens").to("cpu"), rows
        case 8 if len(rows) < 20:
            return data.sample_level_repeat(times), [row for row, count in zip(rows, times, strict=True) for _ in range(count)]
        case 9:
            return unpad_dataproto(*pad_dataproto_to_divisor(data, 3)), rows
        case 10 if len(rows) < 20:
            return data.unfold_column_chunks(2, []), [row for row in rows for _ in range(2)]
        case _:
            return data.clone(), rows


@pytest.mark.parametrize(
    "index",
    [
        [True, False, False, True],
        np.array([True, False, False, True]),
        torch.tensor([True, False, False, True]),
        [0, 3],
        (0, -1),
        np.array([0, 3]),
        np.array([-4, 3], dtype=np.int32),
        np.array([3, 0])[::-1],
        torch.tensor([0, 3]),
        torch.tensor([0, 3], dtype=torch.uint8),
    ],
)
def test_every_kind_of_index_gives_a_batch_that_works_on(index: Any) -> None:
    """B3: whatever the mask was made of, the length is a plain int and what follows works."""
    chosen, expected = batch_of(FOUR)[index], [FOUR[0], FOUR[3]]
    check(chosen, expected)
    check(chosen.chunk(2)[1], expected[1:])
    check(DataProto.concat([chosen, chosen]), expected * 2)
    check(pickle.loads(pickle.dumps(chosen)), expected)
    check(chosen.repeat(2), [expected[0], expected[0], expected[1], expected[1]])


@pytest.mark.parametrize(
    "index",
    [[], np.array([], dtype=np.int64), torch.tensor([]), [False] * 4, np.zeros(4, dtype=bool), torch.zeros(4, dtype=torch.bool)],
)
def test_an_index_may_choose_nothing(index: Any) -> None:
    """B3: the empty mask."""
    chosen = batch_of(FOUR)[index]
    check(chosen, [])
    check(DataProto.concat([chosen, chosen]), [])
    check(pickle.loads(pickle.dumps(chosen)).repeat(2), [])
    assert [len(part) for part in chosen.chunk(2)] == [0, 0]


def test_a_read_only_index_is_taken_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    order = np.array([2, 1])
    order.flags.writeable = False
    check(batch_of(FOUR)[order], [FOUR[2], FOUR[1]])
    assert not recwarn.list


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 4], r"out of range: 0\.\.4 for 4 rows"),
        ([-5], r"out of range: -5\.\.-5 for 4 rows"),
        ([True, False], "the mask has 2 entries for 4 rows"),
        (np.zeros(0, dtype=bool), "the mask has 0 entries for 4 rows"),
        ([0.0, 1.0], "row numbers must be integers, got torch.float64"),
        (4, r"out of range: 4\.\.4 for 4 rows"),
        (torch.tensor(2), r"got shape \(\)"),
        ("number", "a mask or a list of numbers, got 'number'"),
        ([[0], [1]], r"got shape \(2, 1\)"),
    ],
)
def test_a_wrong_index_says_what_it_was(index: Any, message: str) -> None:
    data = batch_of(FOUR)
    with pytest.raises(DataError, match=message):
        data[index]
    check(data, FOUR)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: data.partition(0), "at least one part, got 0"),
        (lambda data: data.chunk(0), "4 rows cannot be cut into 0 equal parts"),
        (lambda data: data.split(0), "at least one row, got split_size=0"),
        (lambda data: data.split(-2), "at least one row, got split_size=-2"),
        (lambda data: data.repeat(-1), "cannot be repeated -1 times"),
        (lambda data: data.reorder(torch.tensor([0, 4])), r"out of range: 0\.\.4 for 4 rows"),
    ],
)
def test_a_wrong_request_changes_nothing(call: Any, message: str) -> None:
    data = batch_of(FOUR)
    with pytest.raises(DataError, match=message):
        call(data)
    check(data, FOUR)


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (DataProto.repeat, "repeat_times"),
        (DataProto.partition, "num_parts"),
        (DataProto.chunk, "chunks"),
        (DataProto.split, "split_size"),
        (DataProto.unfold_column_chunks, "n_split"),
        (lambda data, value: data.make_iterator(value, 1), "mini_batch_size"),
        (lambda data, value: data.make_iterator(2, value), "epochs"),
        (pad_dataproto_to_divisor, "size_divisor"),
        (unpad_dataproto, "pad_size"),
    ],
)
@pytest.mark.parametrize("value", [2.0, 2.5, True, "2", None, np.bool_(True), torch.tensor(True), torch.tensor(2.0)])
def test_values_that_are_not_whole_numbers_are_an_error(operation: Any, name: str, value: Any) -> None:
    data = batch_of(FOUR)
    with pytest.raises(DataError, match=re.escape(f"{name} must be a whole number, got {value!r}")):
        operation(data, value)
    check(data, FOUR)


@pytest.mark.parametrize("two", [2, np.int32(2), torch.tensor(2)])
def test_whole_numbers_are_those_of_numpy_and_torch_too(two: Any) -> None:
    data = batch_of(FOUR)
    check(data.repeat(two, interleave=False), FOUR * 2)
    for cut in (data.partition, data.chunk, data.split):
        for part, rows in zip(cut(two), (FOUR[:2], FOUR[2:]), strict=True):
            check(part, rows)


def test_chunks_error_is_what_drivers_written_for_verl_catch() -> None:
    with pytest.raises(AssertionError) as caught:
        batch_of(FOUR).chunk(3)
    assert isinstance(caught.value, PodiumError)
    assert "partition(3) allows uneven ones" in str(caught.value)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_fewer_rows_than_workers(num_rows: int) -> None:
    """A2: 1 and 5 rows on 4 workers, object columns alone; zero rows give empty parts that keep their columns."""
    data = DataProto(non_tensor_batch={"uid": [f"u{row}" for row in range(num_rows)]})
    found = data.partition(4)
    assert len(found) == 4
    assert [uid for part in found for uid in part.non_tensor_batch["uid"]] == [f"u{row}" for row in range(num_rows)]
    assert DataProto.concat(found).non_tensor_batch["uid"].shape == (num_rows,)


def test_a_batch_without_columns_has_no_rows() -> None:
    data = DataProto(meta_info={"step": 1})
    assert [len(part) for part in (data, data[:3], data[::-1], data[[]], data.repeat(3), *data.partition(2))] == [0] * 7
    assert DataProto.concat(data.partition(2)).meta_info == {"step": 1}
    with pytest.raises(DataError, match="out of range"):
        data[[0]]


@pytest.mark.parametrize(
    "operation",
    [
        lambda data: data.chunk(2)[0],
        lambda data: data.partition(3)[0],
        lambda data: data.repeat(2),
        lambda data: data.select(),
        lambda data: data[:2],
        lambda data: data[[0]],
        lambda data: data.clone().to("cpu"),
        lambda data: data.clone(),
        lambda data: DataProto.concat([data]),
        lambda data: pickle.loads(pickle.dumps(data)),
        lambda data: DataProto().union(data),
        lambda data: data.select(["number"], [], ["notes"]),
        lambda data: data.sample_level_repeat([1, 0, 2, 1]),
        lambda data: data.unfold_column_chunks(1),
        lambda data: next(data.make_iterator(2, 1)),
        lambda data: next(data.make_iterator(3, 1, seed=0, last="pad")),
        lambda data: pad_dataproto_to_divisor(data, 3)[0],
        lambda data: pad_dataproto_to_divisor(data, 2)[0],
        lambda data: unpad_dataproto(data, 1),
        lambda data: data[0],
    ],
)
def test_no_result_shares_the_meta(operation: Any) -> None:
    """B10: setting a meta value on a result, or changing one in place, shows nowhere else."""
    data = batch_of(FOUR)
    before = copy.deepcopy(data.meta_info)
    result = operation(data)
    result.meta_info["notes"]["seen"].append(2)
    result.meta_info["step"] = 8
    result.meta_info["more"] = True
    assert data.meta_info == before == META


def test_pieces_do_not_share_values_of_the_meta_either() -> None:
    """B10: nor does changing a meta value in place, between the pieces of one batch."""
    data = batch_of(FOUR)
    first, second = data.chunk(2)
    first.meta_info["notes"]["seen"].append(2)
    assert second.meta_info == data.meta_info == {"step": 7, "notes": {"seen": [1]}}


def test_slices_are_views_and_selections_are_copies() -> None:
    data = batch_of(FOUR)
    data[1:3].batch["number"].fill_(9)
    data[2:].batch["tokens"].values().fill_(8)
    assert data.batch["number"].tolist() == [0, 9, 9, 3]
    assert parts(data.batch["tokens"])[0].tolist() == [1, 2, 3, 8, 8, 8]
    data[[0]].batch["number"].fill_(5)
    assert data.batch["number"].tolist() == [0, 9, 9, 3]


ROW_OPERATIONS = [
    lambda data: data[:2],
    lambda data: data[[0, 1]],
    lambda data: data.partition(2)[0],
    lambda data: data.split(2)[0],
    lambda data: pickle.loads(pickle.dumps(data))[:2],
    lambda data: DataProto.concat([data])[:2],
]


@pytest.mark.parametrize("operation", ROW_OPERATIONS)
def test_columns_assigned_to_the_tables_are_taken_as_the_constructor_takes_them(operation: Any) -> None:
    data = batch_of(FOUR)
    data.batch["gains"] = ragged([row.gains for row in FOUR], torch.float32)
    data.non_tensor_batch["text"] = [row.text for row in FOUR]  # type: ignore[assignment]
    check(operation(data), FOUR[:2])
    data.batch["number"] = torch.arange(3)
    with pytest.raises(DataError, match=r"has \d rows, but 'number' has 3"):
        operation(data)


def test_groups_are_joined_by_uid_after_an_interleaved_repeat() -> None:
    """B11: n rows per prompt are neighbours; joining an unrepeated batch says both row counts."""
    prompts = DataProto({"prompts": ragged([[1], [2, 3]])}, {"uid": ["u0", "u1"]})
    rows = prompts.repeat(3)
    assert rows.non_tensor_batch["uid"].tolist() == ["u0", "u0", "u0", "u1", "u1", "u1"]
    with pytest.raises(DataError, match="union needs equal row counts, got 6 and 2"):
        rows.union(prompts)
    assert len(rows) == 6


def test_plain_metrics_become_lists_whatever_is_concatenated_first():
    parts = [DataProto(meta_info={"metrics": {"loss": loss, "seen": rank}}) for rank, loss in enumerate((0.5, 1.5, 0.5))]
    merged = {"loss": [0.5, 1.5, 0.5], "seen": [0, 1, 2]}
    assert DataProto.concat(parts).meta_info["metrics"] == merged
    assert DataProto.concat([DataProto.concat(parts[:2]), parts[2]]).meta_info["metrics"] == merged
    assert DataProto.concat(parts[:1]).meta_info["metrics"] == {"loss": [0.5], "seen": [0]}
    assert parts[0].meta_info["metrics"] == {"loss": 0.5, "seen": 0}

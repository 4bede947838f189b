"""Batches of either kind, for dispatch: cutting, padding, trimming and joining DataProtos and TensorDicts alike."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from podium.errors import DataError
from podium.protocol import (
    AUTO_PADDING_KEY,
    PADDING_ROWS_KEY,
    DataProto,
    column_names,
    concat_rows,
    equality,
    is_rows,
    num_rows,
    object_column,
    partition_rows,
)
from podium.protocol.jagged import jagged
from podium.protocol.rows import drop_last, is_padding_enabled, partition_padded
from tests.protocol.builders import FOUR, META, ROWS, Row, batch_of, check, ragged

KINDS: dict[str, Callable[[DataProto], Any]] = {"DataProto": lambda data: data, "TensorDict": DataProto.to_tensordict}
kinds = pytest.mark.parametrize("kind", list(KINDS))


def proto(rows: Any) -> DataProto:
    return rows if isinstance(rows, DataProto) else DataProto.from_tensordict(rows)


def real(data: DataProto) -> DataProto:
    """The batch without Podium's own marks, which `check` doesn't expect."""
    return DataProto(data.batch, data.non_tensor_batch, {key: data.meta_info[key] for key in META})


# -- cutting and joining ------------------------------------------------------------------------------------------------


@kinds
@given(rows=ROWS, parts=st.integers(1, 7))
def test_partition_and_concat_are_inverse(kind: str, rows: list[Row], parts: int) -> None:
    batch = KINDS[kind](batch_of(rows))
    shards = partition_rows(batch, parts)
    assert [type(shard) for shard in shards] == [type(batch)] * parts
    assert [num_rows(shard) for shard in shards] == [len(part) for part in batch_of(rows).partition(parts)]
    check(proto(concat_rows(shards)), rows)


@kinds
@given(rows=ROWS, parts=st.integers(1, 7))
def test_padded_shards_are_equal_and_trimming_them_gives_the_rows_back(kind: str, rows: list[Row], parts: int) -> None:
    batch = KINDS[kind](batch_of(rows))
    shards, padding = partition_padded(batch, parts)
    size = -(-len(rows) // parts)
    assert [type(shard) for shard in shards] == [type(batch)] * parts
    assert [num_rows(shard) for shard in shards] == [size] * parts
    assert sum(padding) == size * parts - len(rows)
    repeated = [*rows, *rows[-1:] * sum(padding)]
    for number, (shard, missing) in enumerate(zip(shards, padding, strict=True)):
        check(real(proto(shard)), repeated[number * size : (number + 1) * size])
        assert proto(shard).padding_mask.tolist() == [False] * (size - missing) + [True] * missing
    check(proto(concat_rows([drop_last(*pair) for pair in zip(shards, padding, strict=True)])), rows)
    check(proto(batch), rows)


def test_five_rows_on_four_ranks() -> None:
    shards, padding = partition_padded(DataProto({"x": torch.arange(5)}), 4)
    assert [shard.batch["x"].tolist() for shard in shards] == [[0, 1], [2, 3], [4, 4], [4, 4]]
    assert padding == (0, 0, 1, 2)


def test_only_padded_shards_hold_copies() -> None:
    data = DataProto({"x": torch.arange(5), "j": ragged([[row] for row in range(5)])})
    shards, _ = partition_padded(data, 3)
    for shard in shards:
        shard.batch["x"].fill_(9)
        shard.batch["j"].values().fill_(9)
    assert data.batch["x"].tolist() == [9, 9, 9, 9, 4]
    assert data.batch["j"].values().tolist() == [9, 9, 9, 9, 4]


@kinds
def test_trimming_takes_the_mark_of_padding_away(kind: str) -> None:
    (_, last), (_, missing) = partition_padded(KINDS[kind](batch_of(FOUR[:3])), 2)
    made_by_a_worker = concat_rows([last, last])
    assert proto(last).meta_info[PADDING_ROWS_KEY] == (1,)
    assert proto(made_by_a_worker).meta_info[PADDING_ROWS_KEY] == (1, 3)
    check(proto(drop_last(last, missing)), FOUR[2:3])
    assert PADDING_ROWS_KEY not in proto(drop_last(made_by_a_worker, missing)).meta_info


@kinds
def test_rows_that_are_not_there_cannot_be_dropped(kind: str) -> None:
    for count in (-1, 5):
        with pytest.raises(DataError, match=f"{count} rows cannot be dropped from 4"):
            drop_last(KINDS[kind](batch_of(FOUR)), count)


@kinds
def test_no_parts_are_refused(kind: str) -> None:
    for cut in (partition_rows, partition_padded):
        with pytest.raises(DataError, match="at least one part, got 0"):
            cut(KINDS[kind](batch_of(FOUR)), 0)
    with pytest.raises(DataError, match="at least one batch"):
        concat_rows([])


def test_parts_of_two_kinds_are_named() -> None:
    parts = [batch_of(FOUR), batch_of(FOUR).to_tensordict()]
    with pytest.raises(
        DataError, match=r"two kinds \(part 0: DataProto, part 1: TensorDict\); let every rank return the same kind"
    ):
        concat_rows(parts)


def test_values_that_are_rows() -> None:
    assert all(is_rows(rows) for rows in (DataProto(), TensorDict({}, [])))
    assert not any(is_rows(value) for value in ({"a": torch.ones(2)}, [1], torch.ones(2), None, "rows", NonTensorStack("a")))


def test_neither_the_protocol_nor_rows_import_tensordict() -> None:
    script = (
        "import sys, podium.protocol as p\n"
        "shards = p.partition_rows(p.DataProto(meta_info={'m': 1}), 2)\n"
        "assert p.concat_rows(shards).meta_info == {'m': 1} and not p.is_rows({})\n"
        "assert 'tensordict' not in sys.modules, 'imported'\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


# -- TensorDict ---------------------------------------------------------------------------------------------------------


@given(ROWS)
def test_rows_go_through_tensordict_and_the_wire_and_back(rows: list[Row]) -> None:
    tensordict = batch_of(rows).to_tensordict()
    assert tensordict.batch_size == (len(rows),)
    back = DataProto.from_tensordict(tensordict)
    check(back, rows)
    check(DataProto.from_tensordict(pickle.loads(pickle.dumps(back, protocol=5)).to_tensordict()), rows)


def test_each_kind_of_entry_has_its_place() -> None:
    values, offsets = torch.arange(5), torch.tensor([0, 2, 5])
    objects, meta = [[1, 2], {"a": None}], {"list": [1, 2], "none": None, "tensor": torch.ones(3), "tuple": (1,), "text": "t"}
    source = TensorDict(
        {
            "dense": torch.ones(2, 3, dtype=torch.bfloat16),
            "jagged": jagged(values, offsets),
            "objects": NonTensorStack(*map(NonTensorData, objects)),
            **{key: NonTensorData(value) for key, value in meta.items()},
        },
        batch_size=[2],
    )
    data = DataProto.from_tensordict(source)
    assert (list(data.batch), data.non_tensor_batch["objects"].tolist()) == (["dense", "jagged"], objects)
    assert equality.equal(data.meta_info, meta)
    assert data.batch["dense"] is source["dense"]
    target = data.to_tensordict()
    assert isinstance(target.get("objects"), NonTensorStack)
    assert target.get("objects").tolist() == objects
    assert equality.equal({key: target.get(key).data for key in meta}, meta)
    assert target["jagged"] is source["jagged"]


def test_meta_alone_has_no_batch_dims() -> None:
    data = DataProto(meta_info={"step": 1})
    assert data.to_tensordict().batch_size == ()
    assert num_rows(data.to_tensordict()) == 0
    assert DataProto.from_tensordict(data.to_tensordict()).meta_info == {"step": 1}
    assert [proto(shard).meta_info for shard in partition_rows(data.to_tensordict(), 2)] == [{"step": 1}] * 2


@pytest.mark.parametrize(
    ("tensordict", "message"),
    [
        (TensorDict({"x": torch.ones(2, 3)}, [2, 3]), r"one dim, this TensorDict has \(2, 3\); flatten"),
        (TensorDict({"x": torch.ones(2)}, []), r"entry 'x' has no rows: the batch size is \(\)"),
        (TensorDict({"n": TensorDict({"x": torch.ones(2)}, [2])}, [2]), "entry 'n' of the TensorDict is a TensorDict"),
    ],
)
def test_tensordicts_that_are_not_rows_say_why(tensordict: TensorDict, message: str) -> None:
    for use in (DataProto.from_tensordict, lambda value: partition_rows(value, 2), lambda value: concat_rows([value])):
        with pytest.raises(DataError, match=message):
            use(tensordict)


def test_a_name_used_twice_has_no_place_in_a_tensordict() -> None:
    twice = DataProto({"a": torch.ones(1)})
    twice.non_tensor_batch["a"] = object_column([1])
    with pytest.raises(DataError, match="column 'a' is both a tensor column and an object column"):
        twice.to_tensordict()
    with pytest.raises(DataError, match=r"\['a'\] name two of: tensor column, object column, meta key"):
        DataProto({"a": torch.ones(1)}, {}, {"a": 1}).to_tensordict()


# -- the mark of auto padding -------------------------------------------------------------------------------------------


def test_the_mark_is_not_written_into_the_callers_dict() -> None:
    meta = {"step": 1}
    for data in (
        DataProto.from_dict({"x": torch.ones(3)}, {}, meta, auto_padding=True),
        DataProto({"x": torch.ones(3)}, meta_info=meta, auto_padding=True),
    ):
        assert data.is_padding_enabled()
        assert data.meta_info == {"step": 1, AUTO_PADDING_KEY: True}
    assert meta == {"step": 1}
    assert not DataProto.from_dict({"x": torch.ones(3)}, {}, meta).is_padding_enabled()


OPERATIONS: list[Callable[[DataProto], DataProto]] = [
    lambda data: data[1:],
    lambda data: data[[0, 1, 2, 3]],
    lambda data: data.repeat(2),
    lambda data: data.partition(2)[1],
    lambda data: data.split(3)[0],
    lambda data: data.select(["number"], [], []),
    lambda data: data.pop(["number"]),
    lambda data: data.rename("number", "n"),
    lambda data: data.union(DataProto({"more": torch.ones(len(data))})),
    lambda data: DataProto({"more": torch.ones(len(data))}).union(data),
    lambda data: DataProto.concat([data, batch_of(FOUR)]),
    lambda data: data.to("cpu"),
    lambda data: data.clone(),
    lambda data: pickle.loads(pickle.dumps(data)),
    lambda data: DataProto.from_tensordict(data.to_tensordict()),
    lambda data: partition_padded(data, 3)[0][2],
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_mark_stays_with_the_rows(operation: Callable[[DataProto], DataProto]) -> None:
    marked = DataProto(*batch_of(FOUR)._tables(), auto_padding=True)
    assert operation(marked).is_padding_enabled()
    assert not operation(batch_of(FOUR)).is_padding_enabled()
    marked.pop(["square"], [], ["step"])
    assert marked.is_padding_enabled()


def test_the_mark_is_read_from_either_kind() -> None:
    marked = DataProto({"x": torch.ones(3)}, auto_padding=True)
    assert is_padding_enabled(marked)
    assert is_padding_enabled(marked.to_tensordict())
    assert not is_padding_enabled(batch_of(FOUR).to_tensordict())


def test_the_mark_must_agree_where_parts_say_something() -> None:
    off = DataProto({"x": torch.ones(1)}, meta_info={AUTO_PADDING_KEY: False})
    with pytest.raises(
        DataError, match=f"meta '{AUTO_PADDING_KEY}' must be equal in all parts, got True in part 0 and False in part 1"
    ):
        DataProto.concat([DataProto({"x": torch.ones(1)}, auto_padding=True), off])


# -- which rows are padding ---------------------------------------------------------------------------------------------


def test_no_row_of_an_ordinary_batch_is_padding() -> None:
    mask = batch_of(FOUR).padding_mask
    assert (mask.dtype, mask.tolist()) == (torch.bool, [False] * 4)
    assert DataProto().padding_mask.tolist() == []


@given(st.integers(1, 6), st.integers(1, 4), st.data())
def test_row_operations_know_which_rows_are_padding(size: int, parts: int, draw: st.DataObject) -> None:
    """Each row tells whether it is padding by a column of its own, whatever is done to a padded shard."""
    shards, padding = partition_padded(DataProto({"x": torch.arange(size)}), parts)
    shard, missing = shards[-1], padding[-1]
    expected = torch.arange(len(shard)) >= len(shard) - missing
    shard = shard.union(DataProto({"is_padding": expected}))
    rows = draw.draw(st.lists(st.integers(0, len(shard) - 1), max_size=6))
    cut = draw.draw(st.integers(0, len(shard)))
    changed = [shard[rows], shard[cut:], shard[::-1], shard.repeat(2), shard.repeat(2, interleave=False), *shard.partition(2)]
    changed += [*shard.split(2), DataProto.concat([shard[cut:], shard, shard[rows]]), shard.select(None, None, [])]
    shard.reorder(torch.arange(len(shard)).flip(0))
    for result in (shard, *changed):
        assert result.padding_mask.tolist() == result.batch["is_padding"].tolist()
        assert (PADDING_ROWS_KEY in result.meta_info) == bool(result.batch["is_padding"].any())


def test_marks_of_a_batch_of_another_length_are_not_believed() -> None:
    shard = partition_padded(batch_of(FOUR[:3]), 2)[0][1]
    made_by_hand = DataProto({"x": torch.ones(5)}, meta_info=shard.meta_info)
    for stale in (made_by_hand, made_by_hand[:2], made_by_hand.repeat(2), made_by_hand.select()):
        with pytest.raises(DataError, match=f"which of these {len(stale)} rows are padding is not known: their meta came from"):
            _ = stale.padding_mask
    same_length = DataProto({"x": torch.ones(2)}, meta_info=shard.meta_info)
    assert same_length.padding_mask.tolist() == [False, True]
    assert made_by_hand.unmarked().padding_mask.tolist() == [False] * 5


def test_rows_beyond_the_end_are_not_marked() -> None:
    """A worker may copy a shard's meta onto a result of fewer rows."""
    data = DataProto({"x": torch.ones(2)}, meta_info={PADDING_ROWS_KEY: (1, 5)})
    assert data.padding_mask.tolist() == [False, True]


# -- meta ---------------------------------------------------------------------------------------------------------------


def test_tensors_of_the_whole_batch_are_compared_when_parts_are_joined() -> None:
    """No 'ambiguous truth value'; a difference names the key."""
    nan = float("nan")
    parts = [DataProto({"x": torch.ones(1)}, meta_info={"scale": torch.tensor([1.0, nan])}) for _ in range(2)]
    assert DataProto.concat(parts).meta_info["scale"].tolist()[0] == 1.0
    parts[1].meta_info["scale"] = torch.tensor([2.0, nan])
    with pytest.raises(DataError, match=r"meta 'scale' must be equal in all parts, got .* in part 0 and .* in part 1"):
        DataProto.concat(parts)


@kinds
def test_columns_are_named_and_meta_is_not(kind: str) -> None:
    data = DataProto({"x": torch.zeros(2), "y": ragged([[1], [2, 3]])}, {"uid": ["a", "b"]}, {"step": 1})
    assert column_names(KINDS[kind](data)) == column_names(KINDS[kind](data[:0])) == {"x", "y", "uid"}
    assert column_names(KINDS[kind](DataProto(meta_info={"step": 1}))) == set()

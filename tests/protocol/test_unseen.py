"""Columns that are made when somebody looks at them: nobody can tell, but by what it costs."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest
import torch

from podium.errors import DataError
from podium.protocol import DataProto, wire
from podium.protocol.rows import partition_rows
from podium.protocol.unseen import Arrived, Cut

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.float16, torch.complex64]


def batch_of(dtype: torch.dtype = torch.float32, rows: int = 5, width: int = 3) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.arange(rows * width).view(rows, width).to(dtype), "y": torch.arange(rows)}, meta_info={"step": 3}
    )


def sent(rows: DataProto) -> DataProto:
    """As it comes out of a message."""
    return pickle.loads(pickle.dumps(rows, protocol=5))


def unseen_of(rows: DataProto) -> object:
    return rows._unseen_columns()


def same(left: DataProto, right: DataProto) -> bool:
    return list(left.batch) == list(right.batch) and wire.equal(left.batch, right.batch) and left.meta_info == right.meta_info


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_nobody_looked_at_go_from_a_cut_through_two_messages_to_a_join(dtype: torch.dtype):
    data = batch_of(dtype)
    shards = data.partition(3)
    assert all(isinstance(unseen_of(shard), Cut) for shard in shards)
    arrived = [sent(shard) for shard in shards]
    returned = [sent(rows) for rows in arrived]
    assert all(isinstance(unseen_of(rows), Arrived) for rows in (*arrived, *returned))
    assert same(DataProto.concat(returned), data)
    assert all(isinstance(unseen_of(shard), Cut) for shard in shards), "something made the columns on the way"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_makes_no_difference_who_has_looked(dtype: torch.dtype):
    data = batch_of(dtype)
    for looks in range(8):
        shards = data.partition(3)
        arrived = []
        for number, shard in enumerate(shards):
            if looks & 1:
                assert len(shard) in (1, 2)
            got = sent(shard)
            if looks >> 1 & (number + 1):
                assert len(got) == len(shard)
            arrived.append(got)
        assert same(DataProto.concat(arrived), data)


def test_parts_are_views_whenever_they_are_looked_at():
    data = batch_of()
    first, second = data.partition(2)
    data.batch["x"][0, 0] = 40.0
    assert first.batch["x"][0, 0] == 40.0
    second.batch["x"][-1, -1] = -1.0
    assert data.batch["x"][-1, -1] == -1.0
    assert first.batch["x"].untyped_storage().data_ptr() == data.batch["x"].untyped_storage().data_ptr()


def test_what_is_packed_is_what_the_columns_hold_at_that_moment():
    data = batch_of()
    part = data.partition(2)[0]
    before = sent(part)
    data.batch["x"].zero_()
    assert before.batch["x"].sum() > 0
    assert sent(part).batch["x"].sum() == 0


def test_a_column_that_the_source_gets_later_is_not_in_its_parts():
    data = batch_of()
    part = data.partition(2)[0]
    data.batch["z"] = torch.zeros(5)
    del data.batch["y"]
    assert list(part.batch) == ["x", "y"]


def test_columns_that_are_put_in_their_place_are_those_that_count():
    got = sent(batch_of())
    got.batch = {"other": torch.ones(2)}
    assert len(got) == 2
    assert list(sent(got).batch) == ["other"]
    part = batch_of().partition(2)[0]
    part.batch = {"other": torch.ones(2)}
    assert list(sent(part).batch) == ["other"]
    assert list(DataProto.concat([got, part]).batch) == ["other"]


def test_rows_that_arrived_are_private_and_writable():
    message = pickle.dumps(batch_of(), protocol=5)
    first, second = pickle.loads(message), pickle.loads(message)
    first.batch["x"].zero_()
    assert second.batch["x"].sum() > 0
    assert pickle.loads(message).batch["x"].sum() > 0
    joined = DataProto.concat([pickle.loads(message), second])
    joined.batch["x"].zero_()
    assert second.batch["x"].sum() > 0


def test_once_made_only_the_columns_keep_the_memory_alive():
    rows = sent(batch_of(rows=4096, width=8))
    records = weakref.ref(unseen_of(rows))
    column = rows.batch["x"]
    assert records() is None
    held = weakref.ref(column)
    del rows.batch["x"], column
    gc.collect()
    assert held() is None
    assert list(rows.batch) == ["y"]


def test_threads_that_look_at_the_same_time_see_the_same_columns():
    for _ in range(50):
        rows, barrier, found = sent(batch_of()), threading.Barrier(8), []

        def look(rows: DataProto = rows, barrier: threading.Barrier = barrier, found: list[object] = found) -> None:
            barrier.wait()
            found.append(rows.batch)

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 8
        assert len(set(map(id, found))) == 1


@pytest.mark.parametrize("column", [torch.ones(4, 2, requires_grad=True), torch.ones(4, dtype=torch.complex64).conj()])
def test_columns_that_numpy_does_not_share_are_cut_at_once(column: torch.Tensor):
    parts = DataProto.from_dict({"x": column}).partition(2)
    assert [unseen_of(part) for part in parts] == [None, None]
    assert torch.equal(torch.cat([part.batch["x"] for part in parts]), column)


def test_objects_travel_along():
    data = DataProto.from_dict({"x": torch.arange(4)}, {"name": ["a", "b", "c", "d"]})
    parts = data.partition(2)
    assert [list(part.non_tensor_batch["name"]) for part in parts] == [["a", "b"], ["c", "d"]]
    back = DataProto.concat([sent(part) for part in parts])
    assert back.batch["x"].tolist() == [0, 1, 2, 3]
    assert back.non_tensor_batch["name"].tolist() == ["a", "b", "c", "d"]
    labelled = sent(DataProto.from_dict({"x": torch.arange(2)}))
    labelled.non_tensor_batch["name"] = np.array(["e", "f"], dtype=object)
    joined = DataProto.concat([parts[0], labelled])
    assert joined.non_tensor_batch["name"].tolist() == ["a", "b", "e", "f"]
    assert joined.batch["x"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": torch.zeros(2, 3)}, "part 1 differs from part 0 in its tensor columns: missing \\['y'\\]"),
        ({"x": torch.zeros(2, 4), "y": torch.arange(2)}, "column 'x' have different shapes"),
        ({"x": torch.zeros(2, 3, dtype=torch.float64), "y": torch.arange(2)}, "column 'x' differs between parts"),
        ({"x": torch.zeros(2, 3), "y": torch.arange(2), "z": torch.arange(2)}, "extra \\['z'\\]"),
    ],
)
def test_parts_that_do_not_fit_together_are_told_as_ever(other: dict[str, torch.Tensor], message: str):
    with pytest.raises(DataError, match=message):
        DataProto.concat([sent(batch_of()), sent(DataProto.from_dict(other))])


def test_columns_in_another_order_are_joined_by_name():
    turned = DataProto.from_dict({"y": torch.arange(2), "x": torch.zeros(2, 3)}, meta_info={"step": 3})
    joined = DataProto.concat([sent(batch_of()), sent(turned)])
    assert len(joined) == 7
    assert joined.batch["y"].tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_meta_is_merged_and_empty_parts_count():
    data = DataProto({"x": torch.arange(2)}, meta_info={"seen": [1]}, meta_policies={"seen": "list"})
    parts = [sent(part) for part in data.partition(4)]
    joined = DataProto.concat(parts)
    assert joined.batch["x"].tolist() == [0, 1]
    assert joined.meta_info["seen"] == [1, 1, 1, 1]
    nothing = DataProto.concat(parts[2:])
    assert nothing.batch["x"].shape == (0,)
    assert nothing.batch["x"].dtype == torch.int64


def test_large_columns_travel_beside_the_message_and_are_not_copied_to_be_packed():
    data = batch_of(rows=4096, width=8)
    part = data.partition(2)[1]
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    assert len(message) < 1000
    assert part.packed_if_small() is None
    address = data.batch["x"][2048:].data_ptr()
    assert np.frombuffer(buffers[0], np.float32).__array_interface__["data"][0] == address
    arrived = pickle.loads(message, buffers=[bytearray(buffer) for buffer in buffers])
    assert same(sent(arrived), part)


def test_copies_and_operations_see_the_columns():
    part = batch_of().partition(2)[0]
    assert same(copy.copy(part), part)
    assert same(copy.deepcopy(sent(part)), part)
    assert repr(sent(part)) == repr(part)
    assert sent(part).select(["x"]).batch["x"].tolist() == part.batch["x"].tolist()
    assert partition_rows(sent(part), 2)[1].batch["y"].tolist() == [2]
    with pytest.raises(AttributeError, match="no attribute 'batches'"):
        part.batches  # noqa: B018 - asked for

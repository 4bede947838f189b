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
from torch._subclasses import FakeTensorMode
from torch.nested._internal.nested_tensor import NestedTensor

from podium.errors import DataError
from podium.protocol import DataProto, equality, jagged_from_rows, memory
from podium.protocol.data_proto import cut_for_call, packed_if_small
from podium.protocol.jagged import parts
from podium.protocol.rows import partition_rows
from podium.protocol.unseen import Arrived, Cut

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.float16, torch.complex64]


def batch_of(dtype: torch.dtype = torch.float32, rows: int = 5, width: int = 3, *, jagged: bool = False) -> DataProto:
    columns = {"x": torch.arange(rows * width).view(rows, width).to(dtype), "y": torch.arange(rows)}
    if jagged:  # t and u have equal lengths, v others; w is ragged in its last dim
        columns["t"] = jagged_from_rows([torch.arange(row % 3 + 1).to(dtype) for row in range(rows)])
        columns["u"] = jagged_from_rows([torch.arange(row % 3 + 1) * 2 for row in range(rows)])
        columns["v"] = jagged_from_rows([torch.full((row,), 7) for row in range(rows)])
        columns["w"] = jagged_from_rows([torch.full((4, row), row) for row in range(rows)], ragged_dim=2)
    return DataProto.from_dict(columns, meta_info={"step": 3})


def sent(rows: DataProto) -> DataProto:
    """As it comes out of a message."""
    return pickle.loads(pickle.dumps(rows, protocol=5))


def unseen_of(rows: DataProto) -> object:
    return rows._unseen_columns()


def same(left: DataProto, right: DataProto) -> bool:
    return list(left.batch) == list(right.batch) and equality.equal(left.batch, right.batch) and left.meta_info == right.meta_info


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_nobody_looked_at_go_from_a_cut_through_two_messages_to_a_join(dtype: torch.dtype, jagged: bool):
    data = batch_of(dtype, jagged=jagged)
    shards = cut_for_call(data, 3)
    assert all(isinstance(unseen_of(shard), Cut) for shard in shards)
    arrived = [sent(shard) for shard in shards]
    returned = [sent(rows) for rows in arrived]
    assert all(isinstance(unseen_of(rows), Arrived) for rows in (*arrived, *returned))
    joined = DataProto.concat(returned)
    assert isinstance(unseen_of(joined), Arrived)
    assert same(joined, data)
    assert all(isinstance(unseen_of(shard), Cut) for shard in shards), "something made the columns on the way"


@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_makes_no_difference_who_has_looked(dtype: torch.dtype, jagged: bool):
    data = batch_of(dtype, jagged=jagged)
    for looks in range(8):
        shards = cut_for_call(data, 3)
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
    first, second = cut_for_call(data, 2)
    data.batch["x"][0, 0] = 40.0
    assert first.batch["x"][0, 0] == 40.0
    second.batch["x"][-1, -1] = -1.0
    assert data.batch["x"][-1, -1] == -1.0
    assert first.batch["x"].untyped_storage().data_ptr() == data.batch["x"].untyped_storage().data_ptr()


def test_what_is_packed_is_what_the_columns_hold_at_that_moment():
    data = batch_of()
    part = cut_for_call(data, 2)[0]
    before = sent(part)
    data.batch["x"].zero_()
    assert before.batch["x"].sum() > 0
    assert sent(part).batch["x"].sum() == 0


def test_a_column_that_the_source_gets_later_is_not_in_its_parts():
    data = batch_of()
    part = cut_for_call(data, 2)[0]
    data.batch["z"] = torch.zeros(5)
    del data.batch["y"]
    assert list(part.batch) == ["x", "y"]


def test_columns_that_are_put_in_their_place_are_those_that_count():
    got = sent(batch_of())
    got.batch = {"other": torch.ones(2)}
    assert len(got) == 2
    assert list(sent(got).batch) == ["other"]
    part = cut_for_call(batch_of(), 2)[0]
    part.batch = {"other": torch.ones(2)}
    assert list(sent(part).batch) == ["other"]
    assert list(DataProto.concat([got, part]).batch) == ["other"]


def test_jagged_parts_have_offsets_of_their_own_which_columns_of_equal_lengths_share():
    part = sent(cut_for_call(batch_of(jagged=True), 2)[1])
    assert parts(part.batch["t"])[1].tolist() == [0, 1, 3]
    assert parts(part.batch["v"])[1].tolist() == [0, 3, 7]
    joined = DataProto.concat([part, sent(batch_of(jagged=True))])
    for rows in (part, joined, cut_for_call(batch_of(jagged=True), 3)[0]):
        assert parts(rows.batch["t"])[1] is parts(rows.batch["u"])[1]
        assert (rows.batch["t"] * rows.batch["u"]).shape[0] == len(rows)


def test_rows_that_arrived_are_private_and_writable():
    message = pickle.dumps(batch_of(), protocol=5)
    first, second = pickle.loads(message), pickle.loads(message)
    first.batch["x"].zero_()
    assert second.batch["x"].sum() > 0
    assert pickle.loads(message).batch["x"].sum() > 0


@pytest.mark.parametrize("rows", [5, 4096], ids=["in the message", "beside it"])
def test_what_was_joined_is_private_and_writable(rows: int):
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(batch_of(rows=rows, jagged=True), protocol=5, buffer_callback=buffers.append)
    held = [bytes(buffer) for buffer in buffers]
    arrived = [pickle.loads(message, buffers=held) for _ in range(2)]
    joined = DataProto.concat(arrived)
    assert isinstance(unseen_of(joined), Arrived)
    for column in joined.batch.values():
        (parts(column)[0] if column.is_nested else column).zero_()
    assert same(pickle.loads(message, buffers=held), batch_of(rows=rows, jagged=True))
    assert same(arrived[0], batch_of(rows=rows, jagged=True))


def test_a_first_look_inside_inference_mode_makes_ordinary_tensors():
    weights = torch.ones(3, requires_grad=True)
    arrived, part = sent(batch_of()), cut_for_call(batch_of(), 2)[0]
    joined = DataProto.concat([sent(batch_of()), sent(batch_of())])
    with torch.inference_mode():
        assert [len(rows) for rows in (arrived, part, joined)] == [5, 3, 10]
    for rows in (arrived, part, joined):
        (rows.batch["x"] * weights).sum().backward()
        rows.batch["x"].zero_()


def test_once_made_only_the_columns_keep_the_memory_alive():
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(batch_of(rows=4096, width=8), protocol=5, buffer_callback=buffers.append)
    beside = [np.frombuffer(bytearray(buffer), np.uint8) for buffer in buffers]
    memory = [weakref.ref(array) for array in beside]
    rows = pickle.loads(message, buffers=beside)
    del beside, buffers
    records = weakref.ref(unseen_of(rows))
    assert len(rows.batch["x"]) == 4096
    assert records() is None
    assert all(one() is not None for one in memory)
    del rows.batch["x"]
    gc.collect()
    assert [one() is None for one in memory] == [True, False]


def test_threads_that_look_at_the_same_time_see_the_same_columns():
    rows, found = sent(batch_of()), []
    barrier, made = threading.Barrier(4), unseen_of(rows)

    class Slow:
        def columns(self) -> dict[str, torch.Tensor]:
            barrier.wait()  # all of them have begun to look
            return made.columns()

    rows._unseen = Slow()
    threads = [threading.Thread(target=lambda: found.append(rows.batch)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(map(id, found))) == 1
    assert same(rows, batch_of())


@pytest.mark.parametrize("column", [torch.ones(4, 2, requires_grad=True), torch.ones(4, dtype=torch.complex64).conj()])
def test_columns_that_numpy_does_not_share_are_cut_at_once(column: torch.Tensor):
    parts = cut_for_call(DataProto.from_dict({"x": column}), 2)
    assert [unseen_of(part) for part in parts] == [None, None]
    assert torch.equal(torch.cat([part.batch["x"] for part in parts]), column)


def test_objects_travel_along():
    data = DataProto.from_dict({"x": torch.arange(4)}, {"name": ["a", "b", "c", "d"]})
    parts = cut_for_call(data, 2)
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
    parts = [sent(part) for part in cut_for_call(data, 4)]
    joined = DataProto.concat(parts)
    assert joined.batch["x"].tolist() == [0, 1]
    assert joined.meta_info["seen"] == [1, 1, 1, 1]
    nothing = DataProto.concat(parts[2:])
    assert nothing.batch["x"].shape == (0,)
    assert nothing.batch["x"].dtype == torch.int64


def test_large_columns_travel_beside_the_message_and_are_not_copied_to_be_packed():
    data = batch_of(rows=4096, width=8)
    part = cut_for_call(data, 2)[1]
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(part, protocol=5, buffer_callback=buffers.append)
    assert len(message) < 1000
    assert packed_if_small(part) is None
    address = data.batch["x"][2048:].data_ptr()
    assert np.frombuffer(buffers[0], np.float32).__array_interface__["data"][0] == address
    arrived = pickle.loads(message, buffers=[bytearray(buffer) for buffer in buffers])
    assert packed_if_small(arrived) is None
    assert same(sent(arrived), part)


def test_rows_of_other_counts_are_found_out_when_they_are_sent():
    rows = sent(batch_of())
    rows.non_tensor_batch["name"] = np.array(["a", "b"], dtype=object)
    with pytest.raises(DataError, match="column 'name' has 2 rows, but 'x' has 5"):
        pickle.dumps(rows, protocol=5)
    made = sent(batch_of())
    made.batch["z"] = torch.zeros(4)
    with pytest.raises(DataError, match="column 'z' has 4 rows, but 'x' has 5"):
        pickle.dumps(made, protocol=5)


def test_a_property_that_fails_tells_what_it_failed_of():
    class Mine(DataProto):
        @property
        def first(self) -> object:
            return None.nope  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'nope'"):
        Mine({"x": torch.ones(2)}).first  # noqa: B018 - asked for


def test_copies_and_operations_see_the_columns():
    part = cut_for_call(batch_of(), 2)[0]
    assert same(copy.copy(part), part)
    assert same(copy.deepcopy(sent(part)), part)
    assert repr(sent(part)) == repr(part)
    assert sent(part).select(["x"]).batch["x"].tolist() == part.batch["x"].tolist()
    assert partition_rows(sent(part), 2)[1].batch["y"].tolist() == [2]
    with pytest.raises(AttributeError, match="no attribute 'batches'"):
        part.batches  # noqa: B018 - asked for


def test_what_a_user_cuts_is_cut_at_once_whatever_becomes_of_the_source():
    data = DataProto({"x": torch.arange(16.0).view(4, 4), "y": torch.arange(4.0)})
    first, second = data.partition(2)
    assert unseen_of(first) is unseen_of(second) is None
    data.batch["x"].t_()
    data.batch["y"].data = torch.zeros(4)
    assert second.batch["x"].tolist() == sent(second).batch["x"].tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert second.batch["y"].tolist() == [2.0, 3.0]
    moved = DataProto({"x": torch.arange(8.0)})
    part = moved.partition(2)[0]
    moved.batch["x"].share_memory_()  # puts other memory under the views
    moved.batch["x"][0] = 55
    assert part.batch["x"].tolist() == sent(part).batch["x"].tolist() == [55, 1, 2, 3]


def test_columns_that_come_to_have_equal_lengths_share_their_offsets():
    first = jagged_from_rows([torch.ones(count) for count in (1, 2, 3, 4)])
    second = jagged_from_rows([torch.ones(count) for count in (1, 2, 5, 6)])
    data = DataProto({"a": first, "b": second})
    parts_of_it = [
        data.partition(2)[0],
        data[:2],
        data.select_idxs([0, 1]),
        sent(cut_for_call(data, 2)[0]),
        cut_for_call(data, 2)[0],
    ]
    for rows in [*parts_of_it, DataProto.concat([sent(parts_of_it[0]), sent(parts_of_it[0])])]:
        assert parts(rows.batch["a"])[1] is parts(rows.batch["b"])[1]
        assert (rows.batch["a"] * rows.batch["b"]).shape[0] == len(rows)
    last = sent(cut_for_call(data, 2)[1])
    assert [parts(last.batch[key])[1].tolist() for key in "ab"] == [[0, 3, 7], [0, 5, 11]]


def test_whoever_looks_first_and_in_whichever_mode_sees_ordinary_tensors():
    def look_in_a_transform(rows: DataProto) -> None:
        torch.func.grad(lambda y: (rows.batch["x"] * y).sum())(torch.tensor(2.0))

    def look_with_fake_tensors(rows: DataProto) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert len(rows.batch["x"]) == 5

    def look_on_another_device(rows: DataProto) -> None:
        with torch.device("meta"):
            assert len(rows.batch["x"]) == 5

    for look in (look_in_a_transform, look_with_fake_tensors, look_on_another_device):
        rows = sent(batch_of(jagged=True))
        look(rows)
        assert all(type(column) in (torch.Tensor, NestedTensor) for column in rows.batch.values())
        assert same(rows, batch_of(jagged=True))
        rows.batch["x"].zero_()


def test_read_only_buffers_that_may_change_are_copied_on_arrival():
    data = batch_of(rows=4096)
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    arrived = pickle.loads(message, buffers=[buffer.raw().toreadonly() for buffer in buffers])
    data.batch["x"].zero_()
    assert same(arrived, batch_of(rows=4096))


def test_a_class_of_its_own_is_joined_by_its_constructor():
    class Mine(DataProto):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            self.extra = 5

    assert Mine.concat([sent(batch_of()), sent(batch_of())]).extra == 5


def test_columns_from_a_device_are_not_copied_to_find_out_that_they_are_large(monkeypatch: pytest.MonkeyPatch):
    column = torch.ones(4096, dtype=torch.complex64).conj()  # like one on a device, numpy has to copy it
    data, copies = DataProto({"x": column}), []
    monkeypatch.setattr(torch.Tensor, "numpy", lambda *_, **__: copies.append(1))
    assert packed_if_small(data) is None
    assert not copies


def test_float8_columns_are_compared():
    data = DataProto({"x": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)})
    assert equality.equal(data.batch["x"], sent(data).batch["x"])
    assert not equality.equal(data.batch["x"], torch.zeros(2).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("objects", [None, {"name": ["a"] * 4096}])
def test_a_join_copies_each_large_column_once(objects: dict[str, list[str]] | None, monkeypatch: pytest.MonkeyPatch):
    data = DataProto({"x": torch.zeros(4096, 8), "y": torch.zeros(4096)}, objects)
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    arrived = [pickle.loads(message, buffers=[bytearray(buffer) for buffer in buffers]) for _ in range(2)]
    copied, cat = [], memory.cat
    monkeypatch.setattr(memory, "cat", lambda columns: copied.append(len(columns)) or cat(columns))
    assert len(DataProto.concat(arrived)) == 8192
    assert copied == [2, 2]

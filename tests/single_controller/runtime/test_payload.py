"""What crosses to a rank and back as one thing: small values in bytes, large buffers beside the pickle, nothing shared."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from podium.protocol import DataProto
from podium.single_controller.runtime.payload import Envelope, HoldsReference, pack, unpack, unpack_to_join


class Reference:
    pass


class Rows(DataProto):
    pass


def is_reference(value: object) -> bool:
    return isinstance(value, Reference)


def stored(packed: Envelope) -> Envelope:
    """As Ray's store hands it out: with read-only buffers."""
    pickled, buffers = packed.__reduce__()[1]
    return Envelope(pickled, [memoryview(bytes(buffer)) for buffer in buffers])


def round_trip(value: Any) -> Any:
    packed = pack(value, is_reference)
    return unpack(stored(packed) if isinstance(packed, Envelope) else packed)


def cyclic() -> list[Any]:
    loop: list[Any] = [1]
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    "value",
    [None, True, 5, -1.5, "text", b"bytes", (), [1, (2, {"a": None})], list(range(1000)), {"key": [1.5]}, {1, 2}, 3 + 4j],
)
def test_simple_values_come_back_as_they_were(value: Any):
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)
    assert type(pack(value, is_reference)) is bytes


def test_keys_of_a_dict_travel_by_value_too():
    ((key, value),) = round_trip({(lambda: 7): 1}).items()
    assert (key(), value) == (7, 1)


@pytest.mark.parametrize("rows", [2, 100_000])
def test_tensors_arrays_and_rows_come_back_private_and_writable(rows: int):
    tensor, array = torch.arange(rows), np.arange(rows)
    value = {"tensor": tensor, "array": array, "rows": DataProto({"x": tensor})}
    assert isinstance(pack(value, is_reference), bytes if rows == 2 else Envelope)
    back = round_trip(value)
    for mine, theirs in ((tensor, back["tensor"]), (array, back["array"]), (tensor, back["rows"].batch["x"])):
        assert theirs.tolist() == mine.tolist()
        theirs[0] = 9
    assert tensor[0] == array[0] == 0


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.arange(8)[::2],
        torch.ones(2, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.ones(2, requires_grad=True),
        torch.eye(3).to_sparse(),
    ],
)
def test_tensors_of_any_kind_come_back(tensor: torch.Tensor):
    back = round_trip([tensor, object])[0]
    assert (back.dtype, back.shape, back.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(back.to_dense(), tensor.to_dense())


def test_a_view_travels_without_the_rest_of_its_storage():
    view = torch.zeros(1_000_000)[:10]
    packed = pack([view, object], is_reference)
    assert isinstance(packed, bytes)
    assert len(packed) < 1000


def test_a_tensordict_travels_like_rows_and_a_nested_one_as_it_is():
    flat = TensorDict({"x": torch.arange(50_000)}, [50_000])
    assert isinstance(pack((flat,), is_reference), Envelope)
    assert torch.equal(round_trip((flat,))[0]["x"], flat["x"])
    nested = TensorDict({"inner": TensorDict({"x": torch.arange(4).reshape(2, 2)}, [2, 2])}, [2])
    assert torch.equal(round_trip((nested,))[0]["inner", "x"], nested["inner", "x"])


def test_a_small_tensordict_is_private_where_it_arrives():
    small = TensorDict(
        {"x": torch.arange(3), "y": torch.nested.nested_tensor([torch.ones(n) for n in (1, 2, 0)], layout=torch.jagged)}, [3]
    )
    packed = pack(((small,), {}), is_reference)
    assert isinstance(packed, bytes)
    (found,), _ = unpack(packed)
    assert type(found) is TensorDict
    assert found.batch_size == torch.Size([3])
    assert torch.equal(found["x"], small["x"])
    assert [row.tolist() for row in found["y"].unbind()] == [[1.0], [1.0, 1.0], []]
    found["x"] += 1  # the receiver's own
    assert small["x"].tolist() == [0, 1, 2]


def test_what_only_ray_may_carry_is_found_wherever_it_is():
    for value in (
        Reference(),
        [Reference()],
        {"a": (1, Reference())},
        DataProto({"x": torch.ones(1)}, meta_info={"r": Reference()}),
    ):
        with pytest.raises(HoldsReference):
            pack(value, is_reference)


def test_a_cycle_and_a_subclass_take_the_long_way():
    back = round_trip(cyclic())
    assert back[1] is back
    subclass = type("Local", (DataProto,), {})  # as in a driver's script: it must travel by value
    packed = pack(subclass({"x": torch.ones(2)}), is_reference)
    assert type(unpack(packed)).__name__ == "Local"
    assert type(round_trip(Rows({"x": torch.ones(2)}))) is Rows


def test_one_object_twice_is_one_object_after():
    tensor = torch.zeros(3)
    first, second = round_trip((tensor, tensor))
    first[0] = 1
    assert second[0] == 1


def test_lambdas_travel():
    assert round_trip(lambda x: x + 1)(2) == 3


@pytest.mark.parametrize("rows", [2, 100_000])
def test_arrays_of_any_order_and_no_elements_come_back_private(rows: int):
    value = {
        "turned": np.arange(2.0 * rows).reshape(2, rows).T,
        "empty": np.empty((0, 3)),
        "rows": torch.arange(rows),
        "f": object,
    }
    for back in (round_trip(value), unpack(pack(value, is_reference))):
        assert np.array_equal(back["turned"], value["turned"])
        assert back["empty"].shape == (0, 3)
        back["turned"][:] = -1
        back["rows"].fill_(-1)
    assert value["turned"].min() == value["rows"].min() == 0


@pytest.mark.parametrize("count", [0, 3])
def test_a_small_batch_travels_inside_the_message_with_its_meta(count: int):
    columns = {"x": torch.arange(count), "half": torch.ones(count, 2, dtype=torch.bfloat16)}
    rows = DataProto(columns, meta_info={"step": 3}, auto_padding=True)
    message = pack(((rows,), {}), is_reference)
    assert isinstance(message, bytes)
    (back,), _ = unpack(message)
    assert type(back) is DataProto
    assert back.is_padding_enabled()
    assert back.meta_info["step"] == 3
    for key, column in columns.items():
        assert torch.equal(back.batch[key], column)
        back.batch[key].zero_()
    assert rows.batch["half"].sum() == 2 * count


def test_what_only_looks_like_a_calls_arguments_comes_back():
    (one,), zeros = round_trip(((1,), np.zeros(3)))
    assert one == 1
    assert zeros.tolist() == [0.0, 0.0, 0.0]


def test_large_columns_to_be_joined_are_views_of_the_message_and_all_else_is_private(recwarn: pytest.WarningsRecorder):
    big = torch.arange(100_000)
    rows = DataProto(
        {"x": big}, {"o": [{"t": torch.ones(5000)}] + [0] * 99_999, "n": np.arange(100_000)}, {"m": torch.ones(5000)}
    )
    packed = pack(rows, is_reference)
    assert isinstance(packed, Envelope)
    message = stored(packed)
    part, same = unpack_to_join(message), unpack_to_join(message)
    assert part.batch["x"].data_ptr() == same.batch["x"].data_ptr(), "the column was copied before the join"
    assert not recwarn.list
    joined = DataProto.concat([part, same])
    one = DataProto.concat([same])
    for batch in (joined, one):
        batch.batch["x"].zero_()
        batch.non_tensor_batch["o"][0]["t"].zero_()
        batch.non_tensor_batch["n"][:] = 0
        batch.meta_info["m"].zero_()
    again = unpack_to_join(message)
    assert torch.equal(again.batch["x"], big)
    assert np.array_equal(again.non_tensor_batch["n"], np.arange(100_000))
    assert again.non_tensor_batch["o"][0]["t"].sum() == again.meta_info["m"].sum() == 5000

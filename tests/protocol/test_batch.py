"""`data.batch` answers what users of a TensorDict ask, and row operations keep columns of equal lengths multipliable."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict

from podium.errors import DataError
from podium.protocol import Batch, DataProto, jagged_from_rows
from podium.protocol.jagged import parts


def made(count: int = 5) -> DataProto:
    """Row n is x = n, y = [n, n] and n % 3 + 1 tokens n; the mask has the tokens' lengths."""
    rows = [torch.full((n % 3 + 1,), n) for n in range(count)]
    tokens = jagged_from_rows(rows)
    y = torch.arange(count, dtype=torch.float32)[:, None].expand(-1, 2)
    mask = jagged_from_rows([torch.ones(len(row)) for row in rows])
    return DataProto({"x": torch.arange(count), "y": y, "tokens": tokens, "mask": mask}, {"id": [f"r{n}" for n in range(count)]})


def check_rows(batch: Any, numbers: list[int]) -> None:
    assert type(batch) is Batch
    assert (len(batch), batch["x"].tolist(), batch["y"].tolist()) == (len(numbers), numbers, [[n, n] for n in numbers])
    values, offsets = parts(batch["tokens"] * batch["mask"])  # which asks for one offsets object
    assert values.tolist() == [n for n in numbers for _ in range(n % 3 + 1)]
    assert offsets.diff().tolist() == [n % 3 + 1 for n in numbers]


def test_len_counts_rows_and_truth_says_whether_there_are_columns() -> None:
    batch = made().batch
    assert len(batch) == batch.batch_size[0] == batch.shape[0] == batch.size(0) == batch.numel() == 5
    assert batch.batch_size == torch.Size([5])
    assert batch.ndim == batch.dim() == 1
    assert len(batch.keys()) == len(list(batch)) == 4
    assert made()[:0].batch
    assert len(made()[:0].batch) == 0
    assert not DataProto().batch
    assert DataProto().batch.is_empty()
    assert DataProto(non_tensor_batch={"a": [1]}).batch.batch_size == torch.Size([0])


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        (slice(3, 1), []),
        ([4, 0, 0], [4, 0, 0]),
        (np.array([1, -1]), [1, 4]),
        (torch.tensor([True, False, False, True, False]), [0, 3]),
        (np.array([False, True, False, False, False]), [1]),
    ],
)
def test_rows_are_taken_as_from_a_tensordict(index: Any, numbers: list[int]) -> None:
    check_rows(made().batch[index], numbers)


def test_one_row_is_a_dict_of_views() -> None:
    batch = made().batch
    row = batch[-1]
    assert {key: value.tolist() for key, value in row.items()} == {"x": 4, "y": [4, 4], "tokens": [4, 4], "mask": [1, 1]}
    row["x"].fill_(9)
    assert batch["x"].tolist() == [0, 1, 2, 3, 9]
    assert [int(each["x"]) for each in batch.unbind(0)] == [0, 1, 2, 3, 9]


def test_split_chunk_and_cat() -> None:
    batch = made().batch
    for parted in (batch.split(2), torch.split(batch, 2), batch.chunk(3), torch.chunk(batch, 3, dim=0)):
        assert [part["x"].tolist() for part in parted] == [[0, 1], [2, 3], [4]]
        check_rows(torch.cat([*parted, batch[:1]], dim=0), [0, 1, 2, 3, 4, 0])
    check_rows(batch.split([1, 0, 4])[2], [1, 2, 3, 4])
    assert [len(part) for part in batch.chunk(9)] == [1] * 5
    assert made()[:0].batch.split(2) == []


def test_columns_are_chosen_renamed_and_set_as_in_a_tensordict() -> None:
    batch = made().batch
    assert list(batch.select("y", "x")) == ["y", "x"]
    assert list(batch.exclude("y", "mask")) == ["x", "tokens"]
    assert list(batch.select("x", "nothing", strict=False)) == ["x"]
    assert batch.rename_key_("x", "z") is batch
    assert list(batch.rename_key_(("z", "y"), ("y", "z"))) == ["y", "z", "tokens", "mask"]
    assert batch.set("more", torch.zeros(5)).update({"most": torch.zeros(5)}) is batch
    assert list(batch.select("more", inplace=True)) == list(batch) == ["more"]
    assert batch.get("x") is None
    assert batch.pop("more").tolist() == [0] * 5
    with pytest.raises(KeyError, match=r"^no tensor column 'w'; there are: x, y, tokens, mask$"):
        made().batch.select("w")


def test_storage_is_moved_copied_and_shared_as_in_a_tensordict() -> None:
    batch = made().batch
    assert str(batch.device) == "cpu"
    assert Batch().device is None
    moved = batch.to("meta", non_blocking=True)
    assert {str(column.device) for column in moved.values()} == {"meta"}
    assert Batch(x=torch.ones(1), y=torch.ones(1, device="meta")).device is None
    for same in (
        batch.to("cpu"),
        batch.cpu(),
        batch.detach(),
        batch.contiguous().consolidate(),
        batch.copy(),
        batch.clone(False),
    ):
        check_rows(same, [0, 1, 2, 3, 4])
        assert same is not batch
        assert same["x"].data_ptr() == batch["x"].data_ptr()
    assert not batch["y"].is_contiguous()
    assert batch.contiguous()["y"].is_contiguous()
    for copied in (batch.clone(), torch.clone(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        check_rows(copied, [0, 1, 2, 3, 4])
        assert copied["x"].data_ptr() != batch["x"].data_ptr()
    assert type(batch.to_dict()) is dict
    assert batch.to_tensordict().batch_size == torch.Size([5])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda batch: batch.split(0), "at least one row, got split_size=0"),
        (lambda batch: batch.split([2, 2]), r"add up to the 5 rows, got \[2, 2\]"),
        (lambda batch: batch.chunk(0), "at least one part, got 0"),
        (lambda batch: batch.chunk(2, dim=1), "a batch has one dim, its rows, got dim=1"),
        (lambda batch: batch.to(torch.float16), r"moves to a device, got torch\.float16"),
        (lambda batch: batch.to(torch.zeros(1)), r"moves to a device, got tensor\(\[0\.\]\)"),
        (lambda batch: batch[5], r"out of range: 5\.\.5 for 5 rows"),
        (lambda batch: batch[torch.ones(4, dtype=torch.bool)], "the mask has 4 entries for 5 rows"),
        (lambda batch: torch.cat([batch, batch.select("x")]), "part 1 differs from part 0 in its tensor columns"),
        (lambda batch: torch.stack([batch, batch]), r"torch\.stack does not take a batch of rows.*to_tensordict"),
        (lambda batch: batch.update(x=torch.zeros(4))[:2], "column 'y' has 5 rows, but 'x' has 4"),
    ],
)
def test_what_a_batch_does_not_do_is_a_clear_error(call: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call(made().batch)


def test_a_method_that_only_tensordicts_have_names_the_way_to_one() -> None:
    with pytest.raises(AttributeError, match=r"no 'auto_batch_size_'.*to_tensordict\(\) gives a TensorDict"):
        made().batch.auto_batch_size_()


# -- assigned to a DataProto ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [{"x": torch.arange(3)}, TensorDict({"x": torch.arange(3)}, batch_size=[3])])
def test_columns_assigned_to_an_empty_dataproto_work_in_every_operation(columns: Any) -> None:
    data = DataProto()
    data.batch = columns
    data.batch["y"] = torch.ones(3)
    assert type(data.batch) is Batch
    assert data.union(DataProto({"z": torch.zeros(3)})).batch["z"].tolist() == [0, 0, 0]
    assert data.rename("x", "w").batch["w"].tolist() == [0, 1, 2]
    assert DataProto.concat([data, data[:1]]).batch["w"].tolist() == [0, 1, 2, 0]
    assert pickle.loads(pickle.dumps(data)).batch["w"].tolist() == [0, 1, 2]
    data.batch = data.batch.select("w")[torch.tensor([2, 0])]
    assert data[0].batch["w"].item() == 2
    data.batch = None
    assert len(data) == 0


def test_assigned_jagged_columns_of_equal_lengths_can_be_multiplied() -> None:
    data = DataProto()
    data.batch = {"a": jagged_from_rows([torch.ones(1), torch.ones(2)]), "b": jagged_from_rows([torch.ones(1), torch.ones(2)])}
    assert parts(data.batch["a"] * data.batch["b"])[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([1], "must be a dict or a TensorDict, got a list"),
        (torch.zeros(2), "must be a dict or a TensorDict, got a Tensor"),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, "column 'y' has 3 rows, but 'x' has 2"),
        ({"x": np.zeros(2)}, "tensor column 'x' is of type ndarray: make it a tensor, or put it into non_tensor_batch"),
        ({"x": torch.tensor(1)}, "tensor column 'x' has no row dimension"),
        (
            TensorDict({"x": torch.zeros(2), "n": NonTensorData(3)}, [2]),
            "entry 'n' of the TensorDict is not a tensor.*from_tensordict",
        ),
        (TensorDict({"x": torch.zeros(2, 3)}, [2, 3]), r"a batch size of one dim, this TensorDict has \(2, 3\)"),
        (TensorDict({"x": TensorDict({}, [2])}, [2]), "entry 'x' of the TensorDict is a TensorDict"),
    ],
)
def test_what_cannot_be_tensor_columns_is_refused_when_given(columns: Any, message: str) -> None:
    data = made()
    with pytest.raises(DataError, match=message):
        data.batch = columns
    check_rows(data.batch, [0, 1, 2, 3, 4])
    with pytest.raises(DataError, match=message):
        DataProto(columns)


def test_moving_to_a_device_is_in_place() -> None:
    data = made()
    assert data.to("meta") is data
    assert str(data.batch.device) == "meta"


def test_assigned_values_that_are_not_tensors_are_shown_by_repr() -> None:
    data = made()
    data.batch["z"] = [1]  # type: ignore[assignment]
    for shown in (repr(data), repr(data.batch)):
        assert "z: a list, which is not a tensor" in shown

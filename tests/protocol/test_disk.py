"""Batches as files: what loads equals what was saved, nothing is pickled, and no half-written file is ever seen."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file, save_file

from podium.errors import DataError
from podium.protocol import AUTO_PADDING_KEY, DataProto, disk, equality
from tests.protocol.builders import FOUR, ROWS, Row, batch_of, check, ragged


@given(ROWS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
def test_any_rows_come_back(tmp_path: Path, rows: list[Row]) -> None:
    batch_of(rows).save_to_disk(tmp_path / "batch")
    check(DataProto.load_from_disk(tmp_path / "batch"), rows)


def test_every_kind_of_value_comes_back_equal(tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.int8, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    tensors = {str(dtype): torch.tensor([[0, 1], [1, 0]]).to(dtype) for dtype in dtypes}
    whole = torch.arange(40.0)
    tensors |= {
        "view": whole[4:6],
        "again": whole[4:6],
        "strided": whole[::20],
        "empty": torch.ones(2, 0),
        "nan": torch.tensor([1.0, float("nan")]),
    }
    objects: list[Any] = [
        {"text": "é\n", "list": [1, 2.5, float("inf"), None, True], "tuple": (1, ("a",)), "big": 2**80, "empty": {}},
        [torch.tensor([1, 2]), np.array([[1.5]], dtype=np.float32), torch.tensor(3)],
    ]
    meta = {"step": 7, "scale": torch.tensor(0.5), "nested": {"array": np.arange(3), "t": (torch.ones(1),)}, "nan": float("nan")}
    meta["numpy"] = [np.float32(0.1), np.bool_(True), np.uint64(2**64 - 1)]
    data = DataProto(tensors, {"o": objects}, meta, auto_padding=True)
    data.save_to_disk(str(tmp_path / "made" / "batch"))
    loaded = DataProto.load_from_disk(str(tmp_path / "made" / "batch"))
    for mine, theirs in zip(loaded._tables(), data._tables(), strict=True):
        assert list(mine) == list(theirs)
        assert all(equality.equal(mine[key], theirs[key]) for key in mine)
    assert loaded.meta_info[AUTO_PADDING_KEY] is True
    assert type(loaded.non_tensor_batch["o"][0]["list"][4]) is bool
    assert [type(number) for number in loaded.meta_info["numpy"]] == [np.float32, np.bool_, np.uint64]
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["batch"]


def test_marks_of_padding_and_no_rows_and_meta_alone_come_back(tmp_path: Path) -> None:
    for data in (
        DataProto({"x": torch.ones(2)}, meta_info={"_podium_padding_rows": (1,)}),
        DataProto({"j": ragged([])}, {"o": []}),
        DataProto(meta_info={"m": None}),
        DataProto(),
    ):
        data.save_to_disk(tmp_path / "batch")
        loaded = DataProto.load_from_disk(tmp_path / "batch")
        assert (len(loaded), loaded.meta_info) == (len(data), data.meta_info)
        assert loaded.padding_mask.tolist() == data.padding_mask.tolist()


def test_a_loaded_batch_is_private_and_survives_a_new_file(tmp_path: Path) -> None:
    batch_of(FOUR).save_to_disk(tmp_path / "batch")
    first, second = (DataProto.load_from_disk(tmp_path / "batch") for _ in range(2))
    first.batch["number"].fill_(9)
    DataProto().save_to_disk(tmp_path / "batch")
    check(second, FOUR)


def nested(depth: int) -> list[Any]:
    return [] if depth == 1 else [nested(depth - 1)]


def test_values_come_back_from_a_hundred_lists_deep_and_ints_of_thousands_of_digits(tmp_path: Path) -> None:
    DataProto(meta_info={"deep": nested(99), "big": -(2**9999)}).save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").meta_info == {"deep": nested(99), "big": -(2**9999)}


CYCLIC: list[Any] = [1]
CYCLIC.append({"again": CYCLIC})


class Custom:
    def __repr__(self) -> str:
        return "Custom()"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataProto(non_tensor_batch={"o": ["a", Custom()]}),
            r"object column 'o', row 1 is of type Custom, Custom\(\): a file holds",
        ),
        (DataProto(non_tensor_batch={"o": [{"k": [1, {2}]}]}), r"object column 'o', row 0\['k'\], item 1 is of type set"),
        (DataProto(non_tensor_batch={"o": [{1: 2}]}), r"object column 'o', row 0: key 1 cannot be stored; keys are strings"),
        (DataProto(non_tensor_batch={"o": [{"$tensor": "t0"}]}), r"row 0: key '\$tensor' cannot be stored"),
        (DataProto(meta_info={"m": np.array([object()])}), "meta 'm' is of type ndarray"),
        (DataProto(meta_info={"m": np.datetime64("2026-01-01")}), "meta 'm' is of type datetime64"),
        (DataProto(meta_info={"m": Path("x")}), "meta 'm' is of type PosixPath"),
        (
            DataProto(meta_info={1: "a", "1": "b"}),
            "meta 1 cannot be stored: its name is of type int, and a file has text",
        ),
        (DataProto(meta_info={None: 1}), "meta None cannot be stored"),
        (DataProto(meta_info={True: 1}), "meta True cannot be stored"),
        (DataProto(meta_info={(1, 2): 1}), r"meta \(1, 2\) cannot be stored"),
        (DataProto(non_tensor_batch={1: ["a"]}), "object column 1 cannot be stored"),
        (DataProto({(1, 2): torch.ones(1)}), r"tensor column \(1, 2\) cannot be stored"),
        (DataProto(meta_info={"m": [np.ones(1, dtype=np.longdouble)]}), "meta 'm', item 0 is an array of dtype '<f16'"),
        (DataProto(meta_info={"m": np.ones(1, dtype=">f8")}), "meta 'm' is an array of dtype '>f8', which torch does not have"),
        (DataProto(meta_info={"m": np.longdouble(1)}), "meta 'm' is of type longdouble"),
        (DataProto(meta_info={"m": np.ones(1, dtype=np.complex128)}), "meta 'm' is a tensor of dtype torch.complex128"),
        (DataProto(meta_info={"m": torch.ones(1).to_sparse()}), "meta 'm' is a tensor of .* layout torch.sparse_coo"),
        (DataProto(meta_info={"m": torch.ones(1, device="meta")}), "meta 'm' is a tensor of .* on meta: a file holds dense"),
        (DataProto({"x": torch.ones(1, dtype=torch.complex128)}), "tensor column 'x' is a tensor of dtype torch.complex128"),
        (DataProto({"j": ragged([[1]]).to(torch.complex128)}), "tensor column 'j' is a tensor of dtype torch.complex128"),
        (DataProto({"x": torch.ones(1, device="meta")}), "tensor column 'x' is a tensor of .* on meta"),
        (DataProto(non_tensor_batch={"o": ["a", CYCLIC]}), "object column 'o', row 1 is nested more than 100 deep, or contains"),
        (DataProto(meta_info={"m": nested(100)}), "meta 'm' is nested more than 100 deep"),
        (DataProto(meta_info={"m": {"k": 10**5000}}), r"meta 'm'\['k'\] is an int of 16610 bits, and a file holds up to 10000"),
    ],
)
def test_what_a_file_cannot_hold_is_named_and_nothing_is_written(data: DataProto, message: str, tmp_path: Path) -> None:
    batch_of(FOUR).save_to_disk(tmp_path / "batch")
    with pytest.raises(DataError, match=message):
        data.save_to_disk(tmp_path / "batch")
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]
    check(DataProto.load_from_disk(tmp_path / "batch"), FOUR)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_of(FOUR).save_to_disk(tmp_path / "batch")

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_sync", full)
    with pytest.raises(DataError, match=r"cannot save a batch as .*batch: .*No space left"):
        DataProto().save_to_disk(tmp_path / "batch")
    assert [path.name for path in tmp_path.iterdir()] == ["batch"]
    check(DataProto.load_from_disk(tmp_path / "batch"), FOUR)


def test_files_that_do_not_hold_a_batch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    with pytest.raises(DataError, match="batch is missing"):
        DataProto.load_from_disk(path)
    path.write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(DataError, match="is damaged or cannot be read"):
        DataProto.load_from_disk(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(DataError, match="does not hold a batch that this version can read"):
        DataProto.load_from_disk(path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("t1", torch.tensor([0, 5, 3]), "offsets of jagged column 'j' must be int64"),
        ("t1", torch.tensor([0, 1, 9]), r"jagged column 'j' has 3 values, but its offsets cover 0\.\.9"),
        ("t1", torch.tensor([0.0, 1.0, 3.0]), "offsets of jagged column 'j' must be int64"),
        ("t2", torch.tensor([1]), "does not hold a batch that this version can read"),
        ("podium", torch.frombuffer(bytearray(b'{"version": 9}'), dtype=torch.uint8), "it is of format 9, this version reads 3"),
        ("podium", torch.frombuffer(bytearray(b"[]"), dtype=torch.uint8), "does not hold a batch"),
    ],
)
def test_damaged_contents_are_refused(name: str, tensor: torch.Tensor, message: str, tmp_path: Path) -> None:
    path = tmp_path / "batch"
    DataProto({"j": ragged([[1], [2, 3]])}).save_to_disk(path)
    stored = load_file(path)
    names = {"t1": next(key for key, value in stored.items() if value.tolist() == [0, 1, 3]), "podium": "podium"}
    if name == "t2":
        del stored[names["t1"]]
    else:
        stored[names[name]] = tensor
    save_file(stored, path, metadata={"sha256": disk._digest(stored)})  # as if it had been written so
    with pytest.raises(DataError, match=message):
        DataProto.load_from_disk(path)


def test_no_byte_can_change_unseen(tmp_path: Path) -> None:
    """A flipped bit in names, dtypes, shapes, values, JSON or digest: an error, or at least the very same batch."""
    path = tmp_path / "batch"
    tensors = {"j": ragged([[1], [2, 3]]), "x": torch.tensor([[0.5, 1.0], [2.0, 4.0]])}
    saved = DataProto(tensors, {"o": ["a", {"b": torch.ones(2)}]}, {"step": 7})
    saved.save_to_disk(path)
    whole, refused = path.read_bytes(), 0
    assert all(
        equality.equal(mine, theirs)
        for mine, theirs in zip(DataProto.load_from_disk(path)._tables(), saved._tables(), strict=True)
    )
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            loaded = DataProto.load_from_disk(path)
        except DataError:
            refused += 1
            continue
        assert all(equality.equal(mine, theirs) for mine, theirs in zip(loaded._tables(), saved._tables(), strict=True)), place
    path.write_bytes(whole)
    assert refused >= sum(column.nbytes for column in load_file(path).values())  # each byte of an entry is seen


def test_a_changed_value_is_said_to_be_damage(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    DataProto({"x": torch.tensor([0.5])}).save_to_disk(path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(torch.tensor([0.5]).numpy().tobytes(), torch.tensor([0.25]).numpy().tobytes()))
    with pytest.raises(DataError, match=r"batch is damaged: its contents have the SHA-256 \w{64}, but were written with \w{64}"):
        DataProto.load_from_disk(path)
    save_file(load_file(path), path)
    with pytest.raises(DataError, match="the digest of its contents is missing"):
        DataProto.load_from_disk(path)


def test_lazily_negative_values_come_back(tmp_path: Path) -> None:
    lazy = torch._neg_view(torch.tensor([1.0, 2.0]))
    DataProto({"x": lazy}).save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").batch["x"].tolist() == [-1.0, -2.0]


def test_empty_arrays_of_any_strides_come_back(tmp_path: Path) -> None:
    arrays = [np.zeros((0, 3))[:, ::2], np.zeros((3, 0)).T, np.zeros((4, 6), dtype=np.int16)[::2, 6:]]
    DataProto(meta_info={"arrays": arrays}).save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch")
    assert [(a.shape, a.dtype) for a in loaded.meta_info["arrays"]] == [(a.shape, a.dtype) for a in arrays]
    strided = DataProto({"x": torch.from_numpy(np.zeros((0, 6), dtype=np.float32)[:, ::2])})
    strided.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").batch["x"].shape == (0, 3)

"""Numpy columns keep their dtype and shape on every way, so that they compute as numpy's arrays do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from podium.errors import DataError
from podium.protocol import DataProto, concat_rows, pad_dataproto_to_divisor, partition_rows
from podium.protocol.blocks import LocalBlock, to_header_and_block
from podium.protocol.remote_concat import concat_remote_rows
from podium.protocol.remote_rows import RemoteRows

ARRAYS: dict[str, NDArray[Any]] = {
    "ok": np.array([True, False, True, True]),
    "score": np.array([0.5, np.nan, -1.0, 2.0], dtype=np.float32),
    "count": np.array([3, 1, 2, 2**40]),
    "small": np.array([1, 2, 3, 4], dtype=np.uint8),
    "pair": np.arange(8, dtype=np.int16).reshape(4, 2),
    "cube": np.arange(32.0).reshape(4, 2, 4)[:, :, ::2],
    "when": np.array(["2026-01-01", "2026-01-02", "NaT", "2026-01-04"], dtype="datetime64[s]"),
    "big_endian": np.arange(4, dtype=">i4"),
    "grid": np.array([["a", 1], ["b", None], ["c", [2]], ["d", 3]], dtype=object),
}
WIDE = np.arange(40_000.0).reshape(4, 10_000)


def rows_of(**arrays: NDArray[Any]) -> DataProto:
    arrays = arrays or ARRAYS
    return DataProto({"x": torch.arange(len(next(iter(arrays.values()))))}, arrays)


def by_reference(data: DataProto) -> RemoteRows:
    header, block = to_header_and_block(data)
    return RemoteRows.of(header, LocalBlock(block, is_of_rank=True))


def check(data: DataProto, numbers: list[int], arrays: dict[str, NDArray[Any]] | None = None) -> None:
    for key, array in (arrays or ARRAYS).items():
        found = data.non_tensor_batch[key]
        assert (key, found.dtype, found.shape) == (key, array.dtype.newbyteorder("="), (len(numbers), *array.shape[1:]))
        np.testing.assert_array_equal(found, array[numbers])


@pytest.mark.parametrize(
    ("operation", "numbers"),
    [
        (lambda data: data, [0, 1, 2, 3]),
        (lambda data: data[1:3], [1, 2]),
        (lambda data: data[::-1], [3, 2, 1, 0]),
        (lambda data: data[:0], []),
        (lambda data: data[[3, 0, 0]], [3, 0, 0]),
        (lambda data: data[data.non_tensor_batch["ok"]], [0, 2, 3]),
        (lambda data: data[~data.non_tensor_batch["ok"]], [1]),
        (lambda data: data.partition(3)[0], [0, 1]),
        (lambda data: data.split(3)[1], [3]),
        (lambda data: data.repeat(2), [0, 0, 1, 1, 2, 2, 3, 3]),
        (lambda data: data.sample_level_repeat(np.array([0, 2, 0, 1])), [1, 1, 3]),
        (lambda data: data.unfold_column_chunks(2, []), [0, 0, 1, 1, 2, 2, 3, 3]),
        (lambda data: pad_dataproto_to_divisor(data, 3)[0], [0, 1, 2, 3, 3, 3]),
        (lambda data: next(data.make_iterator(3, 1, last="drop")), [0, 1, 2]),
        (lambda data: DataProto.concat([data[2:], data[:0], data[:1]]), [2, 3, 0]),
        (lambda data: DataProto.concat([data[2:], data[:1]], missing="none"), [2, 3, 0]),
        (lambda data: data.select().union(data.clone()), [0, 1, 2, 3]),
        (lambda data: DataProto.from_tensordict(data.to_tensordict()), [0, 1, 2, 3]),
        (lambda data: DataProto.from_tensordict(data[:0].to_tensordict()), []),
        (lambda data: concat_rows(partition_rows(data.to_tensordict(), 3)), [0, 1, 2, 3]),
        (copy.deepcopy, [0, 1, 2, 3]),
        (lambda data: pickle.loads(pickle.dumps(data)), [0, 1, 2, 3]),
        (lambda data: by_reference(data)[1:].get(), [1, 2, 3]),
        (lambda data: concat_remote_rows([by_reference(data[2:]), by_reference(data[:1])]).get(), [2, 3, 0]),
    ],
)
def test_numpy_columns_keep_dtype_and_shape(operation: Callable[[DataProto], Any], numbers: list[int]) -> None:
    found = operation(rows_of())
    check(found if isinstance(found, DataProto) else DataProto.from_tensordict(found), numbers)


def test_numpy_columns_compute_as_arrays() -> None:
    columns = rows_of().non_tensor_batch
    assert columns["ok"].sum() == 3
    assert columns["pair"].sum(-1).tolist() == [1, 5, 9, 13]
    assert np.isnan(columns["score"]).tolist() == [False, True, False, False]
    assert torch.tensor(columns["count"]).dtype == torch.int64
    assert type(rows_of()[2].non_tensor_batch["score"]) is np.float32
    assert rows_of()[2].non_tensor_batch["pair"].tolist() == [4, 5]


def test_objects_lists_and_text_are_objects_as_before() -> None:
    data = DataProto(
        non_tensor_batch={"list": [1, 2], "lists": [[1], [2]], "text": np.array(["a", "b"]), "o": np.array([1, None])}
    )
    assert {rows.dtype for rows in data.non_tensor_batch.values()} == {np.dtype(object)}
    assert [type(value) for value in data.non_tensor_batch["text"]] == [str, str]
    assert data.non_tensor_batch["lists"].shape == (2,)


def test_a_list_that_is_assigned_is_a_column_of_objects_everywhere() -> None:
    data = DataProto({"x": torch.arange(2)})
    data.non_tensor_batch["n"] = ["a", "b"]  # type: ignore[assignment]
    rows = DataProto.from_tensordict(data.to_tensordict())
    for found in (pickle.loads(pickle.dumps(data)), by_reference(data).get(), rows, pad_dataproto_to_divisor(data, 2)[0]):
        assert found.non_tensor_batch["n"].tolist() == ["a", "b"]
    assert "n: objects" in repr(data)
    assert "n: objects" in data.get_data_info()


def test_large_numpy_columns_are_sent_out_of_band_and_may_stay() -> None:
    data = rows_of(wide=WIDE, ok=ARRAYS["ok"])
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(message) < 2000
    raw = [buffer.raw().toreadonly() for buffer in buffers]
    received = pickle.loads(message, buffers=raw)
    check(received, [0, 1, 2, 3], {"wide": WIDE, "ok": ARRAYS["ok"]})
    received.non_tensor_batch["wide"][:] = 0  # private and writable
    received.non_tensor_batch["ok"][:] = False
    np.testing.assert_array_equal(pickle.loads(message, buffers=raw).non_tensor_batch["wide"], WIDE)
    stays = by_reference(data)
    assert stays.column_bytes() == {"wide": WIDE.nbytes}
    check(stays[[3, 1]].get(), [3, 1], {"wide": WIDE, "ok": ARRAYS["ok"]})
    assert stays[:0].get().non_tensor_batch["wide"].shape == (0, 10_000)


def test_numpy_columns_are_saved_and_loaded(tmp_path: Path) -> None:
    saved = {key: ARRAYS[key] for key in ("ok", "score", "count", "small", "pair", "cube", "big_endian")}
    rows_of(**saved).save_to_disk(tmp_path / "a")
    check(DataProto.load_from_disk(tmp_path / "a"), [0, 1, 2, 3], saved)
    rows_of(**saved)[:0].save_to_disk(tmp_path / "b")
    check(DataProto.load_from_disk(tmp_path / "b"), [], saved)
    for key, message in (("when", "object column 'when'"), ("grid", "object column 'grid', row 0")):
        with pytest.raises(DataError, match=message):
            rows_of(**{key: ARRAYS[key]}).save_to_disk(tmp_path / "c")


@pytest.mark.parametrize(
    ("first", "second", "dtype", "values"),
    [
        (np.array([1, 2]), np.array([0.5]), "float64", [1, 2, 0.5]),
        (np.array([1], dtype=np.int8), np.array([300], dtype=np.int16), "int16", [1, 300]),
        (np.array([True]), np.array([2]), "int64", [1, 2]),
        (np.array([1], dtype=np.float32), np.array([0.1]), "float64", [1, 0.1]),
        (np.array([True]), np.array([]), "bool", [True]),
        (np.array([1.5]), ["a", None], "object", [1.5, "a", None]),
        (np.array([1]), np.array(["2026"], dtype="datetime64[Y]"), "object", [1, np.datetime64("2026")]),
        (np.array([1]), np.array([2], dtype="m8[s]"), "object", [1, np.timedelta64(2, "s")]),
        (np.array([1], dtype="m8[s]"), np.array([2], dtype="M8[s]"), "object", [np.timedelta64(1, "s"), np.datetime64(2, "s")]),
        (np.array(["NaT"], dtype="M8[s]"), np.array([2], dtype="M8[ns]"), "datetime64[ns]", [None, 2]),
        (np.array([[1], [2]]), np.array([[0.5]]), "float64", [[1], [2], [0.5]]),
    ],
)
@pytest.mark.parametrize("join", [DataProto.concat, lambda parts: concat_remote_rows(list(map(by_reference, parts))).get()])
def test_columns_of_several_dtypes_take_numpys_common_one(
    first: Any, second: Any, dtype: str, values: list[Any], join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.protocol.blocks.IN_HEADER_BYTES", -1)
    joined = join([DataProto(non_tensor_batch={"a": first}), DataProto(non_tensor_batch={"a": second})]).non_tensor_batch["a"]
    assert (joined.dtype.name, joined.tolist()) == (dtype, values)


def test_reading_some_rows_of_a_joined_column_gives_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.protocol.blocks.IN_HEADER_BYTES", -1)
    parts = [DataProto(non_tensor_batch={"a": np.array(values)}) for values in ([1, 2], [0.5])]
    joined = concat_remote_rows(list(map(by_reference, parts)))
    assert joined[:1].get().non_tensor_batch["a"].dtype == np.float64
    assert joined[:0].get().non_tensor_batch["a"].dtype == np.float64


def test_numpy_columns_that_cannot_be_joined_are_refused() -> None:
    def join(*arrays: NDArray[Any]) -> DataProto:
        return DataProto.concat([DataProto(non_tensor_batch={"a": array}) for array in arrays])

    with pytest.raises(DataError, match=r"column 'a' is int64 in one part .* 9007199254740993 is not exact as float64"):
        join(np.array([2**53 + 1]), np.array([0.5]))
    with pytest.raises(
        DataError, match=r"column 'a' is datetime64\[s\] in one part .* 3000-01-01T00:00:00 is not exact as datetime64"
    ):
        join(np.array(["3000-01-01"], dtype="M8[s]"), np.array(["2026"], dtype="M8[ns]"))
    with pytest.raises(DataError, match=r"rows of column 'a' have different shapes: \[\(2,\), \(3,\)\]"):
        join(np.zeros((1, 2)), np.zeros((1, 3)))


def test_union_compares_numbers_by_value_and_names_the_row_that_differs() -> None:
    data = rows_of(score=ARRAYS["score"])
    data.union(DataProto(non_tensor_batch={"score": ARRAYS["score"].tolist()}))  # the same numbers as objects
    with pytest.raises(DataError, match=r"object column 'score' .* row 2: .*-1\.0.* and .*9\.0"):
        data.union(rows_of(score=np.array([0.5, np.nan, 9, 2], dtype=np.float32)))
    with pytest.raises(DataError, match=r"object column 'pair'.*row 1"):
        rows_of(pair=ARRAYS["pair"]).union(rows_of(pair=ARRAYS["pair"] * np.array([[1], [2], [1], [1]], dtype=np.int16)))


def test_a_stack_that_a_worker_replaced_is_what_it_put_there() -> None:
    rows = rows_of(ok=ARRAYS["ok"]).to_tensordict()
    rows["ok"] = rows_of(ok=np.array(["a", "b", "c", "d"])).to_tensordict()["ok"]
    assert DataProto.from_tensordict(rows).non_tensor_batch["ok"].tolist() == ["a", "b", "c", "d"]
    assert DataProto.from_tensordict(rows).meta_info == {}

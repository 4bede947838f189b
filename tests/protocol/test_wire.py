"""Pickling: in band, out of band and in a second process; what arrives is equal, private and writable."""

from __future__ import annotations

import copy
import os
import pickle
import pickletools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

from podium.errors import DataError
from podium.protocol import DataProto, equality, memory, wire
from podium.protocol.arrays import tensor_bytes
from podium.protocol.data_proto import rows_of
from podium.protocol.jagged import jagged, parts
from tests.protocol.builders import FOUR, ROWS, Row, batch_of, check, lists_of, ragged

DTYPES = (
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
)


def _every_kind() -> dict[str, DataProto]:
    dense = {str(dtype): torch.tensor([[0, 1], [1, 0]]).to(dtype) for dtype in DTYPES}
    views = {
        "transposed": torch.arange(6).reshape(3, 2).t(),
        "strided": torch.arange(8)[::4],
        "expanded": torch.ones(1).expand(2),
        "needs_grad": torch.ones(2, requires_grad=True),
    }
    sizes = {"no_elements": torch.ones(2, 0, 3), "jagged_empty": ragged([[], []]), "nan": torch.tensor([float("nan"), 1.0])}
    return {
        "tensors": DataProto(dense | views | sizes),
        "objects": DataProto(non_tensor_batch={"o": [[1, 2], [3, 4]], "p": ["a", None]}),
        "nothing": DataProto(),
        "meta": DataProto(meta_info={"t": torch.tensor(3.5), "list": [1, None]}),
        "no_rows": DataProto({"a": torch.ones(0, 3), "j": ragged([])}, {"o": []}),
        "mixed": batch_of(FOUR),
    }


def _in_band(data: DataProto) -> Any:
    return pickle.loads(pickle.dumps(data, protocol=5))


def _out_of_band(data: DataProto, *, read_only: bool) -> Any:
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    copies = [bytes(buffer.raw()) if read_only else bytearray(buffer.raw()) for buffer in buffers]
    return pickle.loads(blob, buffers=copies)


def _assert_equal(received: DataProto, sent: DataProto) -> None:
    assert len(received) == len(sent)
    for mine, theirs in zip(received._tables(), sent._tables(), strict=True):
        assert list(mine) == list(theirs)
        assert all(equality.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("kind", list(_every_kind()))
def test_round_trips_in_and_out_of_band(kind: str) -> None:
    """B4: no tensors, no columns, no rows, every dtype, empty tensors, views that are not contiguous."""
    sent = _every_kind()[kind]
    for protocol in (2, 4, 5):
        _assert_equal(pickle.loads(pickle.dumps(sent, protocol=protocol)), sent)
    for read_only in (True, False):
        _assert_equal(_out_of_band(sent, read_only=read_only), sent)


def test_round_trip_through_a_second_process(tmp_path: Path) -> None:
    """B4: a fresh interpreter reads every kind and sends it back doubled."""
    sent = _every_kind()
    (tmp_path / "in").write_bytes(pickle.dumps(sent, protocol=5))
    script = (
        "import pickle, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "batches = pickle.loads((folder / 'in').read_bytes())\n"
        "(folder / 'out').write_bytes(pickle.dumps({kind: data.repeat(2) for kind, data in batches.items()}, protocol=5))\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=60)
    received = pickle.loads((tmp_path / "out").read_bytes())
    for kind, data in received.items():
        _assert_equal(data, sent[kind].repeat(2))


SETTINGS: list[tuple[str, int, bool]] = [("float32", 2, True), ("float64", 1, False), ("bfloat16", 3, True)]
"""Default dtype, torch threads, whether gradients are recorded."""
OTHER_ENVIRONMENT = {
    "VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy",
    "TENSORDICT_LIST_TO_STACK": "0",
    "LIST_TO_STACK": "0",
    "LAZY_LEGACY_OP": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONOPTIMIZE": "1",
}
READ_UNDER_OTHER_SETTINGS = """
import pickle, pathlib, sys, torch
folder, settings = pathlib.Path(sys.argv[1]), eval(sys.argv[2])
messages, answers = pickle.loads((folder / "in").read_bytes()), []
for dtype, threads, gradients in settings:
    torch.set_default_dtype(getattr(torch, dtype))
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)
    for message in messages:
        batches = pickle.loads(message)
        answers += [pickle.dumps({kind: data.repeat(2) for kind, data in batches.items()}, protocol=p) for p in (4, 5)]
(folder / "out").write_bytes(pickle.dumps(answers))
"""


def _settle(dtype: str, threads: int, gradients: bool) -> None:
    torch.set_default_dtype(getattr(torch, dtype))
    torch.set_num_threads(threads)
    torch.set_grad_enabled(gradients)


def test_settings_of_a_process_do_not_change_received_rows(tmp_path: Path) -> None:
    """B5: written under each of several settings, read by another process under each, and its answers under each again."""
    sent = _every_kind()
    messages = []
    for settings in SETTINGS:
        _settle(*settings)
        messages += [pickle.dumps(sent, protocol=protocol) for protocol in (4, 5)]
    (tmp_path / "in").write_bytes(pickle.dumps(messages))
    command = [sys.executable, "-c", READ_UNDER_OTHER_SETTINGS, str(tmp_path), repr(SETTINGS)]
    subprocess.run(command, check=True, timeout=60, env=os.environ | OTHER_ENVIRONMENT)
    answers = pickle.loads((tmp_path / "out").read_bytes())
    assert len(answers) == 2 * len(SETTINGS) * len(messages)
    for number, answer in enumerate(answers):
        _settle(*SETTINGS[number % len(SETTINGS)])
        received = pickle.loads(answer)
        for kind, data in received.items():
            _assert_equal(data, sent[kind].repeat(2))
            assert not any(column.requires_grad for column in data.batch.values())


def test_large_buffers_travel_out_of_band_and_without_a_copy() -> None:
    data = DataProto({"big": torch.arange(10_000).reshape(2, -1), "j": ragged([range(2_000), range(3_000)])})
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(blob) < 2_000
    addresses = {np.frombuffer(buffer.raw(), dtype=np.uint8).ctypes.data for buffer in buffers}
    assert data.batch["big"].data_ptr() in addresses
    assert parts(data.batch["j"])[0].data_ptr() in addresses


@pytest.mark.parametrize("read_only", [True, False])
def test_received_tensors_are_private_and_writable(read_only: bool, recwarn: pytest.WarningsRecorder) -> None:
    sent = batch_of(FOUR)
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    carried = [bytes(buffer.raw()) if read_only else bytearray(buffer.raw()) for buffer in buffers]
    first, before = pickle.loads(blob, buffers=carried), [bytes(buffer) for buffer in carried]
    for column in first.batch.values():
        (parts(column)[0] if column.is_nested else column).fill_(5)
    check(sent, FOUR)
    if read_only:
        assert [bytes(buffer) for buffer in carried] == before
        check(pickle.loads(blob, buffers=carried), FOUR)
    assert not recwarn.list


def _globals_of(blob: bytes) -> set[str]:
    """Names that a pickle imports: strings pushed just before a STACK_GLOBAL, in protocol 5."""
    found, strings = set(), []
    for opcode, argument, _ in pickletools.genops(blob):
        if isinstance(argument, str):
            strings.append(argument)
        if opcode.name == "STACK_GLOBAL":
            found.add(strings[-1])
    return found


def test_a_tiny_batch_is_one_short_message_of_pythons_own_types() -> None:
    """Its cost on a call is that of a few hundred bytes: no numpy or torch object, no buffer of its own."""
    data = DataProto({"a": torch.arange(4).reshape(2, 2), "j": ragged([[1], [2, 3]])}, {"o": ["x", None]}, {"step": 1})
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert not buffers
    assert len(blob) < 400
    assert _globals_of(blob) == {"rows_of"}
    assert _globals_of(pickle.dumps(data.select(["a"], []), protocol=5)) == {"rows_of"}


def test_columns_that_disagree_are_found_on_arrival() -> None:
    data = DataProto({"a": torch.zeros(2)})
    for wrong in (torch.zeros(3), torch.tensor(0.0), ragged([[1]])):
        data.batch["b"] = wrong
        with pytest.raises(DataError, match="'b'"):
            pickle.loads(pickle.dumps(data, protocol=5))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16])
def test_the_limit_between_bytes_and_buffers(dtype: torch.dtype) -> None:
    count = wire.IN_BAND_BYTES // dtype.itemsize
    for num_rows, num_buffers in ((count, 0), (count + 1, 1)):
        data, buffers = DataProto({"x": torch.ones(num_rows, dtype=dtype)}), list[pickle.PickleBuffer]()
        blob = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
        assert len(buffers) == num_buffers
        _assert_equal(pickle.loads(blob, buffers=buffers), data)


def test_large_tensors_of_any_layout_travel_in_c_order() -> None:
    square = torch.arange(10_000, dtype=torch.int64).reshape(100, 100)
    data = DataProto({"transposed": square.t(), "every_second": square.repeat(2, 1)[::2], "bits": square.bfloat16().t()})
    for received in (_in_band(data), _out_of_band(data, read_only=True), _out_of_band(data, read_only=False)):
        _assert_equal(received, data)
        assert received.batch["transposed"].is_contiguous()


def test_writable_buffers_are_used_as_they_are_and_read_only_ones_are_copied() -> None:
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(DataProto({"x": torch.zeros(5_000)}), protocol=5, buffer_callback=buffers.append)
    carried = bytearray(buffers[0].raw())
    pickle.loads(blob, buffers=[carried]).batch["x"].fill_(1.0)
    assert np.frombuffer(carried, dtype=np.float32).sum() == 5_000
    pickle.loads(blob, buffers=[memoryview(carried).toreadonly()]).batch["x"].fill_(0.0)
    assert np.frombuffer(carried, dtype=np.float32).sum() == 5_000


def test_tensors_in_meta_and_in_object_columns_travel_by_torchs_own_pickling() -> None:
    data = DataProto(
        {"x": torch.ones(2)},
        {"o": [torch.arange(2_000), {"t": torch.tensor(1.5, dtype=torch.bfloat16)}]},
        {"scalar": torch.tensor(3.5), "large": torch.arange(4_000), "array": np.arange(4_000), "jagged": ragged([[1], [2, 3]])},
    )
    for received in (_in_band(data), _out_of_band(data, read_only=True), _out_of_band(data, read_only=False)):
        _assert_equal(received, data)


@given(ROWS)
def test_any_rows_round_trip(rows: list[Row]) -> None:
    data = batch_of(rows)
    for received in (_in_band(data), _out_of_band(data, read_only=True), copy.copy(data)):
        check(received, rows)


def test_a_shallow_copy_shares_storage_and_no_table() -> None:
    data = batch_of(FOUR)
    shallow = copy.copy(data)
    shallow.batch.pop("number")
    shallow.meta_info["step"] = 8
    assert shallow.batch["square"].data_ptr() == data.batch["square"].data_ptr()
    check(data, FOUR)


def test_a_dtype_that_this_torch_does_not_have_is_refused() -> None:
    for name in ("float3", "nn"):
        with pytest.raises(DataError, match=f"dtype '{name}' arrived, which torch"):
            rows_of((wire.WIRE_VERSION, [("x", (name, (1,), b"x"), None, 0)], []), {})


def test_shared_offsets_are_shared_on_arrival_and_sent_once() -> None:
    data = batch_of(FOUR)
    assert len(wire.pack(data.batch, buffers=True)[2]) == 2
    for received in (_in_band(data), _out_of_band(data, read_only=True)):
        check(received, FOUR)
        assert parts(received.batch["tokens"])[1] is parts(received.batch["gains"])[1]


def test_a_slice_sends_its_own_rows_only() -> None:
    data = DataProto({"x": torch.zeros(100_000), "j": ragged([[row] for row in range(100_000)])})
    assert len(pickle.dumps(data[:10], protocol=5)) < 3_000


def test_another_wire_version_is_refused() -> None:
    packed = (wire.WIRE_VERSION + 1, [], [])
    with pytest.raises(DataError, match=f"wire version {wire.WIRE_VERSION + 1} arrived, this process reads {wire.WIRE_VERSION}"):
        rows_of(packed, {})


def test_autograd_graphs_are_not_sent() -> None:
    data = DataProto(
        {"x": torch.ones(2, requires_grad=True) * 2, "j": jagged(torch.ones(3, requires_grad=True), torch.tensor([0, 1, 3]))}
    )
    received = _in_band(data)
    assert not received.batch["x"].requires_grad
    assert lists_of(received.batch["j"]) == [[1.0], [1.0, 1.0]]


def test_rows_are_equal_after_a_cut_two_messages_and_a_join() -> None:
    data = batch_of(FOUR)
    for num_parts in (1, 3, 6):
        _assert_equal(DataProto.concat([_in_band(_in_band(part)) for part in data.partition(num_parts)]), data)


def test_columns_that_have_equal_lengths_after_a_cut_share_offsets_on_arrival() -> None:
    data = DataProto({"a": ragged([[1], [2, 3], [4]]), "b": ragged([[1], [2, 3], [4, 5]])})
    first, last = map(_in_band, data.partition(2))
    assert parts(first.batch["a"])[1] is parts(first.batch["b"])[1]
    assert [parts(last.batch[key])[1].tolist() for key in "ab"] == [[0, 1], [0, 2]]


@pytest.mark.parametrize("objects", [None, {"name": ["a"] * 4096}])
def test_a_join_copies_each_large_column_once(objects: dict[str, list[str]] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataProto({"x": torch.zeros(4096, 8), "y": torch.zeros(4096)}, objects)
    arrived = [_out_of_band(data, read_only=False) for _ in range(2)]
    copied, cat = [], memory.cat
    monkeypatch.setattr(memory, "cat", lambda columns: copied.append(len(columns)) or cat(columns))
    assert len(DataProto.concat(arrived)) == 8192
    assert copied == [2, 2]


def test_the_size_of_a_column_on_a_device_is_found_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    column = torch.ones(4096, dtype=torch.complex64).conj()  # numpy has to copy it, as one on a device
    copies: list[int] = []
    monkeypatch.setattr(torch.Tensor, "numpy", lambda *_, **__: copies.append(1))
    assert tensor_bytes(column) == 4096 * 8
    assert not copies

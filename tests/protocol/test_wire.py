"""Pickling: in band, out of band and in a second process; what arrives is equal, private and writable."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from podium.errors import DataError
from podium.protocol import DataProto, wire
from podium.protocol.jagged import jagged, parts
from tests.protocol.builders import FOUR, batch_of, check, lists_of, ragged

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
        assert all(wire.equal(mine[key], theirs[key]) for key in mine)


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


def test_large_buffers_travel_out_of_band_and_without_a_copy() -> None:
    data = DataProto({"big": torch.arange(10_000).reshape(2, -1), "j": ragged([range(2_000), range(3_000)])})
    buffers: list[pickle.PickleBuffer] = []
    blob = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(blob) < 2_000
    addresses = {np.frombuffer(buffer.raw(), dtype=np.uint8).ctypes.data for buffer in buffers}
    assert data.batch["big"].data_ptr() in addresses
    assert parts(data.batch["j"])[0].data_ptr() in addresses


@pytest.mark.parametrize("read_only", [True, False])
def test_what_arrives_is_private_and_writable(read_only: bool, recwarn: pytest.WarningsRecorder) -> None:
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


def test_shared_offsets_are_shared_on_arrival_and_sent_once() -> None:
    data = batch_of(FOUR)
    assert len(wire.pack(data.batch).offsets) == 2
    for received in (_in_band(data), _out_of_band(data, read_only=True)):
        check(received, FOUR)
        assert parts(received.batch["tokens"])[1] is parts(received.batch["gains"])[1]


def test_a_slice_sends_its_own_rows_only() -> None:
    data = DataProto({"x": torch.zeros(100_000), "j": ragged([[row] for row in range(100_000)])})
    assert len(pickle.dumps(data[:10], protocol=5)) < 3_000


def test_another_wire_version_is_refused() -> None:
    packed = wire.Packed(wire.WIRE_VERSION + 1, {}, [])
    with pytest.raises(DataError, match=f"wire version {wire.WIRE_VERSION + 1} arrived, this process reads {wire.WIRE_VERSION}"):
        wire.unpack(packed)


def test_the_graph_stays_at_home() -> None:
    data = DataProto(
        {"x": torch.ones(2, requires_grad=True) * 2, "j": jagged(torch.ones(3, requires_grad=True), torch.tensor([0, 1, 3]))}
    )
    received = _in_band(data)
    assert not received.batch["x"].requires_grad
    assert lists_of(received.batch["j"]) == [[1.0], [1.0, 1.0]]

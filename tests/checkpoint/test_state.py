"""Tensors and values come back bit for bit, or saving says why they cannot."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from podium.checkpoint import load_state, save_state
from podium.errors import CheckpointError


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(6, 4, generator=generator)
    tensors = {
        "float32": base,
        "odd floats": torch.tensor([math.nan, math.inf, -0.0, 1e-45]),
        "bfloat16": base.to(torch.bfloat16),
        "float64": base.double() / 3,
        "int64": torch.tensor([-(2**63), 2**63 - 1]),
        "uint8": generator.get_state(),
        "bool": base > 0,
        "0-d": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "empty too": torch.empty(0, 3),
        "transposed": base.t(),
        "view": base[1:3],
        "tied": base,
        "parameter": torch.nn.Parameter(base.clone()),
    }
    save_state(tmp_path / "actor" / "rank-0.5", tensors, {})
    loaded, _ = load_state(tmp_path / "actor" / "rank-0.5")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        same = loaded[name]
        assert (same.dtype, same.shape) == (tensor.dtype, tensor.shape), name
        assert same.flatten().view(torch.uint8).equal(tensor.detach().contiguous().flatten().view(torch.uint8)), name


def test_values_come_back_equal(tmp_path: Path) -> None:
    values = {"lr": 0.1 + 0.2, "best": -math.inf, "step": 2**63, "on": True, "none": None, "nested": {"é": [1, 2.0, "x", []]}}
    save_state(tmp_path / "driver", {}, values)
    tensors, loaded = load_state(tmp_path / "driver")
    assert tensors == {}
    assert loaded == values
    assert type(loaded["on"]) is bool
    json.loads((tmp_path / "driver.json").read_text(), parse_constant=pytest.fail)
    save_state(tmp_path / "driver", {}, {"nan": [math.nan]})
    assert math.isnan(load_state(tmp_path / "driver")[1]["nan"][0])  # type: ignore[index, call-overload, arg-type]


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"a": (1, 2)}, r"\['a'\] is tuple"),
        ({"a": [{"b": torch.tensor(1)}]}, r"\['a'\]\[0\]\['b'\] is Tensor"),
        ({"a": {1: 2}}, "key 1"),
        ({"a": {"$float": "nan"}}, "stands for floats that JSON lacks"),
    ],
)
def test_values_that_would_come_back_changed_are_refused(tmp_path: Path, values: dict[str, object], where: str) -> None:
    with pytest.raises(CheckpointError, match=where):
        save_state(tmp_path / "driver", {}, values)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@pytest.mark.parametrize("how", ["missing", "truncated", "garbage", "empty"])
def test_a_bad_file_is_named(tmp_path: Path, suffix: str, how: str) -> None:
    save_state(tmp_path / "rank-0", {"w": torch.ones(100)}, {"step": 1})
    file = tmp_path / f"rank-0.{suffix}"
    content = {"truncated": file.read_bytes()[:-2], "garbage": b"\xff garbage \xff" * 9, "empty": b""}
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(content[how])
    with pytest.raises(CheckpointError, match=rf"rank-0\.{suffix} is {'missing' if how == 'missing' else 'damaged'}"):
        load_state(tmp_path / "rank-0")


def test_values_must_be_an_object(tmp_path: Path) -> None:
    save_state(tmp_path / "rank-0", {}, {})
    (tmp_path / "rank-0.json").write_text(json.dumps([1]))
    with pytest.raises(CheckpointError, match="holds list, not an object"):
        load_state(tmp_path / "rank-0")


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="rank-0"):
        save_state(tmp_path / "file" / "rank-0", {}, {})
    (tmp_path / "rank-1.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="rank-1"):
        save_state(tmp_path / "rank-1", {"w": torch.ones(1)}, {})

"""The state of one owner (a rank, the driver) as two files: tensors as safetensors, plain values as JSON; never pickle.

What loads equals what was saved, bit for bit: dtype and shape of every tensor (0-d and empty ones too), every float of the
values (NaN and infinities included). What could not come back equal is refused when saving.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from podium.errors import CheckpointError

FLOAT_KEY: Final = "$float"
"""JSON has neither NaN nor infinities: such a float is an object of this one key."""


def save_state(path_prefix: Path, tensors: Mapping[str, Tensor], values: Mapping[str, JsonValue]) -> None:
    """Write `<prefix>.safetensors` and `<prefix>.json`, making the folder. Tensors are copied to the CPU first.

    A tensor that shares memory with another is stored on its own, so loading gives two. Raises CheckpointError, naming the
    file, when writing fails or a value is not plain JSON (a tuple, a numpy number, a key that is not a string).
    """
    tensors_path, values_path = _paths(path_prefix)
    _check_plain(dict(values), str(values_path))
    try:
        path_prefix.parent.mkdir(parents=True, exist_ok=True)
        values_path.write_text(json.dumps(_encoded(dict(values)), indent=1, allow_nan=False), encoding="utf-8")
        save_file(_storable(tensors), tensors_path)
    except (OSError, SafetensorError, ValueError) as exc:
        raise CheckpointError(f"cannot write {path_prefix}.*: {exc}") from exc


def load_state(path_prefix: Path) -> tuple[dict[str, Tensor], dict[str, JsonValue]]:
    """Read what `save_state` wrote; tensors on the CPU. CheckpointError names a file that is missing or damaged."""
    tensors_path, values_path = _paths(path_prefix)
    return _load_tensors(tensors_path), _load_values(values_path)


def _paths(prefix: Path) -> tuple[Path, Path]:
    # not with_suffix: a prefix may have a dot of its own
    return prefix.with_name(f"{prefix.name}.safetensors"), prefix.with_name(f"{prefix.name}.json")


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Dense CPU tensors, no two of which share memory: safetensors takes no others."""
    storable: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        address = dense.untyped_storage().data_ptr()
        storable[name] = dense.clone() if address in seen else dense
        seen.add(address)
    return storable


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path} is missing") from exc
    except (OSError, SafetensorError) as exc:
        raise CheckpointError(f"{path} is damaged or cannot be read: {exc}") from exc


def _load_values(path: Path) -> dict[str, JsonValue]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_hook=_decoded)
    except FileNotFoundError as exc:
        raise CheckpointError(f"{path} is missing") from exc
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{path} is damaged or cannot be read: {exc}") from exc
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged: it holds {type(values).__name__}, not an object")
    return values


def _encoded(value: JsonValue) -> JsonValue:
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT_KEY: str(value)}
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    return [_encoded(item) for item in value] if isinstance(value, list) else value


def _decoded(value: dict[str, JsonValue]) -> JsonValue:
    found = value.get(FLOAT_KEY)
    return float(found) if isinstance(found, str) and len(value) == 1 else value


def _check_plain(value: object, where: str) -> None:
    """CheckpointError unless JSON gives back an equal value of the same type."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: key {key!r} is not a string, and would load as one")
            if key == FLOAT_KEY:
                raise CheckpointError(f"{where}: the key {key!r} stands for floats that JSON lacks; use another")
            _check_plain(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif value is not None and type(value) not in (bool, int, float, str):
        raise CheckpointError(f"{where} is {type(value).__name__} {value!r}; only plain JSON values come back equal")

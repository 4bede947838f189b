"""A batch as one file: safetensors, with the columns' names, the objects and the meta as JSON inside; never pickle.

What loads equals what was saved, bit for bit. What JSON cannot hold is refused when saving, by the name of its key and row. The
file appears whole or not at all, and what stood under the name before stays until then.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from podium.errors import DataError
from podium.protocol import jagged as jg
from podium.protocol.columns import ObjectColumn

FORMAT_VERSION = 1
_DESCRIPTION = "podium"
"""The file's entry that holds the JSON as bytes: safetensors' own header is limited in size."""
_TENSOR, _ARRAY, _NUMBER, _TUPLE = "$tensor", "$array", "$number", "$tuple"
_NUMPY_NUMBERS = frozenset(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)

Tables: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, ObjectColumn], Mapping[str, Any]]


def save(path: Path, tables: Tables) -> None:
    """Write the columns and the meta, making the folder. DataError names the value that cannot be stored, or the file."""
    contents = _describe(*tables)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(contents, beside, metadata={"format": "podium.DataProto"})
            _sync(beside)
            beside.replace(path)
            _sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, SafetensorError, ValueError, KeyError) as exc:
        raise DataError(f"cannot save a batch as {path}: {exc}") from exc


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, list[Any]], dict[str, Any]]:
    """What `save` wrote, tensors on the CPU. DataError names a file that is missing, damaged or of another kind."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
    except FileNotFoundError as exc:
        raise DataError(f"{path} is missing") from exc
    except (OSError, SafetensorError) as exc:
        raise DataError(f"{path} is damaged or cannot be read: {exc}") from exc
    try:
        return _restore(stored)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise DataError(f"{path} holds no batch that this version can read: {exc}") from exc


# -- writing ------------------------------------------------------------------------------------------------------------


class _Stored(dict[str, Tensor]):
    """Tensors by number: dense, on the CPU, no two of which share memory, for safetensors takes no others."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def add(self, tensor: Tensor) -> str:
        name = f"t{len(self)}"
        dense = tensor.detach().cpu().resolve_conj().contiguous()
        storage = dense.untyped_storage().data_ptr()
        self[name] = dense.clone() if storage in self._storages else dense
        self._storages.add(storage)
        return name


def _describe(tensors: Mapping[str, Tensor], objects: Mapping[str, ObjectColumn], meta: Mapping[str, Any]) -> dict[str, Tensor]:
    stored, offsets_known = _Stored(), dict[int, str]()
    columns = []
    for key, column in tensors.items():
        if not jg.is_jagged(column):
            columns.append([key, stored.add(column), None, 0])
            continue
        values, offsets = jg.parts(column)
        if id(offsets) not in offsets_known:
            offsets_known[id(offsets)] = stored.add(offsets)
        columns.append([key, stored.add(values), offsets_known[id(offsets)], jg.ragged_dim(column)])
    description = {
        "version": FORMAT_VERSION,
        "columns": columns,
        "objects": {
            key: [_encode(value, stored, f"object column {key!r}, row {row}") for row, value in enumerate(rows)]
            for key, rows in objects.items()
        },
        "meta": {key: _encode(value, stored, f"meta {key!r}") for key, value in meta.items()},
    }
    text = json.dumps(description).encode()
    return {**stored, _DESCRIPTION: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def _encode(value: Any, stored: _Stored, where: str) -> Any:
    """A value as JSON, tensors put aside. DataError unless it comes back equal and of the same type."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and not jg.is_jagged(value):
        return {_TENSOR: stored.add(value)}
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return {_ARRAY: stored.add(torch.from_numpy(value.copy()))}
    if isinstance(value, np.bool_ | np.integer | np.floating) and value.dtype.name in _NUMPY_NUMBERS:
        return {_NUMBER: [value.dtype.name, value.item()]}
    if type(value) in (list, tuple):
        items = [_encode(item, stored, f"{where}, item {number}") for number, item in enumerate(value)]
        return items if type(value) is list else {_TUPLE: items}
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise DataError(f"{where}: key {key!r} cannot be stored; keys are strings that do not begin with '$'")
        return {key: _encode(item, stored, f"{where}[{key!r}]") for key, item in value.items()}
    raise DataError(
        f"{where} is a {type(value).__name__}, {value!r}: a file holds None, bool, int, float, str, lists, tuples, dicts, "
        "tensors, and numpy's arrays and numbers; convert it, or leave it out by select()"
    )


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading ------------------------------------------------------------------------------------------------------------


def _restore(stored: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, list[Any]], dict[str, Any]]:
    description = json.loads(stored[_DESCRIPTION].numpy().tobytes())
    if description["version"] != FORMAT_VERSION:
        raise ValueError(f"it is of format {description['version']}, this version reads {FORMAT_VERSION}")
    tensors = {
        key: stored[name] if offsets is None else jg.jagged(stored[name], _offsets(key, stored[offsets]), ragged_dim)
        for key, name, offsets, ragged_dim in description["columns"]
    }
    objects = {key: [_decode(value, stored) for value in rows] for key, rows in description["objects"].items()}
    return tensors, objects, {key: _decode(value, stored) for key, value in description["meta"].items()}


def _offsets(key: str, offsets: Tensor) -> Tensor:
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not len(offsets) or bool((offsets.diff() < 0).any()):
        raise ValueError(f"the offsets of jagged column {key!r} are none")
    return offsets


def _decode(value: Any, stored: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, stored) for item in value]
    if not isinstance(value, dict):
        return value
    match list(value.items()):
        case [(str(kind), str(name))] if kind == _TENSOR:
            return stored[name]
        case [(str(kind), str(name))] if kind == _ARRAY:
            return stored[name].numpy()
        case [(str(kind), [str(name), number])] if kind == _NUMBER and name in _NUMPY_NUMBERS:
            return np.dtype(name).type(number)
        case [(str(kind), list(items))] if kind == _TUPLE:
            return tuple(_decode(item, stored) for item in items)
    return {key: _decode(item, stored) for key, item in value.items()}

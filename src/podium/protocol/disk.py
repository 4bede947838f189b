"""A batch as one file: safetensors, with the columns' names, the objects and the meta as JSON inside; never pickle.

What loads equals what was saved, bit for bit: a digest of all entries is kept in the file's metadata, and compared. What a file
cannot hold is refused when saving, by the name of its key and row. The file appears whole or not at all, and what stood under the
name before stays until then.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from safetensors.torch import save_file
from torch import Tensor

from podium.errors import DataError
from podium.protocol import formatting
from podium.protocol import jagged as jg
from podium.protocol.columns import ObjectColumn

FORMAT_VERSION = 3
_READ_VERSIONS = (2, FORMAT_VERSION)
"""Version 2 had no arrays as columns."""
_DESCRIPTION = "podium"
"""The file's entry that holds the JSON as bytes: safetensors' own header is limited in size."""
_DIGEST = "sha256"
"""The key of safetensors' metadata that holds the digest of all entries."""
_DEEPEST = 100
"""So many lists, tuples and dicts may lie within one another; more are taken for a value that contains itself."""
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
            save_file(contents, beside, metadata={"format": "podium.DataProto", _DIGEST: _digest(contents)})
            _sync(beside)
            beside.replace(path)
            _sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, SafetensorError, ValueError, KeyError) as exc:
        raise DataError(f"cannot save a batch as {path}: {exc}") from exc


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, list[Any] | ObjectColumn], dict[str, Any]]:
    """What `save` wrote, tensors on the CPU. DataError names a file that is missing, damaged or of another kind."""
    try:
        with safe_open(path, framework="pt") as file:
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
            written = (file.metadata() or {}).get(_DIGEST)
    except FileNotFoundError as exc:
        raise DataError(f"{path} is missing") from exc
    except (OSError, SafetensorError) as exc:
        raise DataError(f"{path} is damaged or cannot be read: {exc}") from exc
    if written is not None and written != (found := _digest(stored)):
        raise DataError(f"{path} is damaged: its contents have the SHA-256 {found}, but were written with {written}; use a copy")
    try:
        description = _description(stored)
        if written is None:
            raise ValueError("the digest of its contents is missing")
        return _restore(description, stored)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        raise DataError(f"{path} does not hold a batch that this version can read: {exc}") from exc


def _digest(contents: Mapping[str, Tensor]) -> str:
    """SHA-256, in hexadecimal, of the tensors' names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(contents):
        tensor = contents[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)  # the tensor's own memory
    return digest.hexdigest()


# -- writing ------------------------------------------------------------------------------------------------------------


class _Stored(dict[str, Tensor]):
    """Tensors by number: dense, on the CPU, no two of which share memory, for safetensors takes no others."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: set[int] = set()

    def add(self, tensor: Tensor, where: str) -> str:
        """Its name. DataError for a tensor that a file cannot hold."""
        if tensor.layout is not torch.strided or tensor.is_meta or not _is_storable(tensor.dtype):
            raise DataError(
                f"{where} is a tensor of dtype {tensor.dtype}, layout {tensor.layout}, on {tensor.device}: a file holds dense "
                "tensors that have values, of the dtypes that safetensors has; convert it, or leave it out by select()"
            )
        name = f"t{len(self)}"
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if not dense.numel():  # whatever its strides were
            dense = torch.empty(dense.shape, dtype=dense.dtype)
        storage = dense.untyped_storage().data_ptr()
        self[name] = dense.clone() if storage in self._storages else dense
        self._storages.add(storage)
        return name


@cache
def _is_storable(dtype: torch.dtype) -> bool:
    """Whether safetensors has the dtype."""
    try:
        safetensors_bytes({"t": torch.empty(0, dtype=dtype)})
    except (KeyError, ValueError, RuntimeError, SafetensorError):
        return False
    return True


def _describe(tensors: Mapping[str, Tensor], objects: Mapping[str, ObjectColumn], meta: Mapping[str, Any]) -> dict[str, Tensor]:
    for kind, names in {"tensor column": tensors, "object column": objects, "meta": meta}.items():
        _check_names(kind, names)
    stored, offsets_known = _Stored(), dict[int, str]()
    columns = []
    for key, column in tensors.items():
        if not jg.is_jagged(column):
            columns.append([key, stored.add(column, f"tensor column {key!r}"), None, 0])
            continue
        values, offsets = jg.parts(column)
        if id(offsets) not in offsets_known:
            offsets_known[id(offsets)] = stored.add(offsets, f"the offsets of tensor column {key!r}")
        columns.append([key, stored.add(values, f"tensor column {key!r}"), offsets_known[id(offsets)], jg.ragged_dim(column)])
    description = {
        "version": FORMAT_VERSION,
        "columns": columns,
        "objects": {key: _column_entry(key, rows, stored) for key, rows in objects.items()},
        "meta": {key: _entry(value, stored, f"meta {key!r}") for key, value in meta.items()},
    }
    text = json.dumps(description).encode()
    return {**stored, _DESCRIPTION: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def _column_entry(key: str, rows: ObjectColumn, stored: _Stored) -> Any:
    """An array of numbers as one value, any other row by row."""
    if rows.dtype != object:
        return _entry(rows, stored, f"object column {key!r}")
    return [_entry(value, stored, f"object column {key!r}, row {row}") for row, value in enumerate(rows)]


def _check_names(kind: str, names: Iterable[object]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise DataError(
                f"{kind} {name!r} cannot be stored: its name is of type {type(name).__name__}, and a file has text for names"
            )


def _entry(value: Any, stored: _Stored, where: str) -> Any:
    try:
        return _encode(value, stored, where, _DEEPEST)
    except RecursionError:
        raise DataError(f"{where} is nested more than {_DEEPEST} deep, or contains itself; a file cannot hold it") from None


def _encode(value: Any, stored: _Stored, where: str, depth: int) -> Any:
    """A value as JSON, tensors put aside. DataError unless it comes back equal and of the same type."""
    if value is None or type(value) in (bool, float, str):
        return value
    if type(value) is int:
        return _checked_int(value, where)
    if isinstance(value, Tensor) and not jg.is_jagged(value):
        return {_TENSOR: stored.add(value, where)}
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return {_ARRAY: stored.add(_tensor_of(value, where), where)}
    if isinstance(value, np.bool_ | np.integer | np.floating) and value.dtype.name in _NUMPY_NUMBERS:
        return {_NUMBER: [value.dtype.name, value.item()]}
    if type(value) in (list, tuple, dict):
        return _encode_items(value, stored, where, depth - 1)
    raise DataError(
        f"{where} is of type {type(value).__name__}, {formatting.short(value)}: a file holds None, bool, int, float, str, lists, "
        "tuples, dicts, dense tensors, and numpy's arrays and numbers; convert it, or leave it out by select()"
    )


def _encode_items(value: Any, stored: _Stored, where: str, depth: int) -> Any:
    if not depth:
        raise RecursionError
    if type(value) is not dict:
        items = [_encode(item, stored, f"{where}, item {number}", depth) for number, item in enumerate(value)]
        return items if type(value) is list else {_TUPLE: items}
    for key in value:
        if not isinstance(key, str) or key.startswith("$"):
            raise DataError(f"{where}: key {key!r} cannot be stored; keys are strings that do not begin with '$'")
    return {key: _encode(item, stored, f"{where}[{key!r}]", depth) for key, item in value.items()}


def _tensor_of(array: NDArray[Any], where: str) -> Tensor:
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError) as exc:  # a width or a byte order that torch does not have
        raise DataError(
            f"{where} is an array of dtype {array.dtype.str!r}, which torch does not have; convert it by astype"
        ) from exc


def _checked_int(value: int, where: str) -> int:
    if value.bit_length() > formatting.MOST_SHOWN_BITS:
        raise DataError(
            f"{where} is an int of {value.bit_length()} bits, and a file holds up to {formatting.MOST_SHOWN_BITS}: store it as "
            "text, by hex()"
        )
    return value


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading ------------------------------------------------------------------------------------------------------------


def _description(stored: Mapping[str, Tensor]) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(stored[_DESCRIPTION].numpy().tobytes())
    if description["version"] not in _READ_VERSIONS:
        raise ValueError(f"it is of format {description['version']}, this version reads {FORMAT_VERSION}; save it anew")
    return description


def _restore(
    description: Mapping[str, Any], stored: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, list[Any] | ObjectColumn], dict[str, Any]]:
    tensors = {
        key: stored[name] if offsets is None else jg.jagged(stored[name], _offsets(key, stored[offsets]), ragged_dim)
        for key, name, offsets, ragged_dim in description["columns"]
    }
    objects = {key: _decode(rows, stored) for key, rows in description["objects"].items()}
    return tensors, objects, {key: _decode(value, stored) for key, value in description["meta"].items()}


def _offsets(key: str, offsets: Tensor) -> Tensor:
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not len(offsets) or bool((offsets.diff() < 0).any()):
        raise ValueError(f"the offsets of jagged column {key!r} must be int64 numbers that never fall")
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

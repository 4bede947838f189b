"""Checks of `model.path` before anything starts; no weights are loaded.

A folder's files of weights are opened as far as their headers. Of a hub id only this is known here: it is in the hub's cache, or
the hub answers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Empty, SimpleQueue

from huggingface_hub import constants, get_session, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from podium.config import ModelConfig
from podium.errors import ConfigError, nearest
from podium.models.hub import INDEX, WEIGHTS, fetch_weights
from podium.models.loading import BUILT_IN, load_model_config, load_tokenizer, quantised

HUB_TIMEOUT_S = 5.0
"""How long the hub has to answer; left to itself, transformers tries six times over half a minute."""
WEIGHT_DTYPES = ("F16", "BF16", "F32", "F64")
"""As safetensors calls them; quantised weights have others (I32 of GPTQ and AWQ, U8 of bitsandbytes, F8_E4M3)."""
LFS_POINTER = b"version https://git-lfs"


def check_model_path(config: ModelConfig) -> None:
    """Check that `path` is a built-in model, a model's folder or a usable hub id; no weights are loaded.

    ConfigError for a folder that does not exist or is not a model, for missing or damaged weights, and for a hub id that is not
    in the cache while the hub cannot be reached.
    """
    if config.path in BUILT_IN:
        return
    folder = Path(config.path).expanduser()
    if (folder / "config.json").is_file():
        _check_weights(folder)
    elif folder.exists():
        raise ConfigError(f"model.path: {config.path} has no config.json; give a folder that save_pretrained wrote")
    elif config.path.startswith(("/", ".", "~")) or config.path.count("/") != 1:
        raise ConfigError(
            f"model.path: no folder {config.path!r}{nearest(config.path, BUILT_IN) or '.'} "
            f"Give a folder, a hub id OWNER/NAME, or one of: {', '.join(BUILT_IN)}"
        )
    else:
        _check_hub(config.path)


def model_folder(config: ModelConfig) -> Path | None:
    """The folder whose files are loaded; None for a built-in model, and for a hub id that is not in the cache."""
    folder = local_folder(config)
    if folder is not None or config.path in BUILT_IN:
        return folder
    cached = try_to_load_from_cache(config.path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def local_folder(config: ModelConfig) -> Path | None:
    """The folder that `path` names; None for a hub id and a built-in architecture."""
    folder = Path(config.path).expanduser()
    return folder if config.path not in BUILT_IN and folder.is_dir() else None


def fetch_model(config: ModelConfig) -> None:
    """Bring a model of the hub into this node's cache, with its tokenizer; nothing to do for a folder or a built-in one.

    ConfigError when the hub does not have it or cannot be reached.
    """
    if config.path in BUILT_IN or local_folder(config) is not None:
        return
    load_model_config(config)
    load_tokenizer(config)
    try:
        fetch_weights(config.path)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"model.path: the weights of {config.path} cannot be fetched from the hub: {exc}") from exc


# -- files of weights -----------------------------------------------------------------------------------------------------


def _check_weights(folder: Path) -> None:
    """Of safetensors, in the order in which transformers looks for them; what else it loads is its own to check."""
    if (folder / WEIGHTS).is_file():
        _tensor_names(folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        _check_shards(folder / INDEX)
    elif not [*folder.glob("pytorch_model*.bin")]:
        found = ", ".join(sorted(path.name for path in folder.iterdir()))
        raise ConfigError(f"model.path: {folder} has no weights: neither {WEIGHTS} nor {INDEX}; there are: {found}")


def _check_shards(index: Path) -> None:
    """Every shard of an index is there, whole, and holds the weights that the index looks for in it."""
    wanted: dict[str, set[str]] = {}
    for name, shard in _weight_map(index).items():
        wanted.setdefault(shard, set()).add(name)
    for shard, names in sorted(wanted.items()):
        if not (index.parent / shard).is_file():
            raise ConfigError(
                f"model.path: {index.parent} lacks {shard}, one of {len(wanted)} files of weights that its {index.name} names: "
                "fetch or copy the model again"
            )
        if missing := sorted(names - _tensor_names(index.parent / shard)):
            raise ConfigError(f"model.path: {index.parent / shard} lacks {len(missing)} weights of the index: {missing[0]}, ...")


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"model.path: {index} is damaged, it has no weight_map: {type(exc).__name__}: {exc}") from exc
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConfigError(f"model.path: {index} is damaged: weight_map must hold a file's name for each weight")
    return weight_map


def _tensor_names(path: Path) -> set[str]:
    """The names in a file's header, which must fit the file's length. ConfigError for weights in a packed or 8-bit dtype."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
        if is_pointer:
            raise ConfigError(f"model.path: {path} is a pointer of Git LFS, not the weights: run git lfs pull in its folder")
        with safe_open(path, framework="pt") as tensors:
            names = set(tensors.keys())
            weights = sorted(name for name in names if name.endswith("weight"))
            kinds = {name: str(tensors.get_slice(name).get_dtype()) for name in weights}
    except (OSError, SafetensorError) as exc:
        raise ConfigError(
            f"model.path: {path}, of {path.stat().st_size} bytes, is not a complete safetensors file ({exc}): "
            "fetch or copy it again"
        ) from exc
    if packed := [f"{name} has dtype {kind}" for name, kind in kinds.items() if kind not in WEIGHT_DTYPES]:
        raise ConfigError(quantised(path, packed[0]))
    return names


# -- the hub ------------------------------------------------------------------------------------------------------------


def _check_hub(hub_id: str) -> None:
    try:
        is_cached = isinstance(try_to_load_from_cache(hub_id, "config.json"), str)
    except HFValidationError as exc:
        raise ConfigError(f"model.path: {hub_id!r} is neither a folder nor a hub id: {exc}") from exc
    if not is_cached and (reason := _unreachable()):
        raise ConfigError(
            f"model.path: no folder {hub_id!r} here. As a hub id, OWNER/NAME, it is not in the cache, and the hub cannot be "
            f"reached: {reason}. Give a folder or one of: {', '.join(BUILT_IN)}; or go online"
        )


def _unreachable() -> str | None:
    """Why the hub does not answer, None when it does. On a thread, since DNS lookups do not have a timeout."""
    outcome: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_ask_hub, args=(outcome,), name="hub", daemon=True).start()
    try:
        return outcome.get(timeout=HUB_TIMEOUT_S)
    except Empty:
        return f"{constants.ENDPOINT} did not answer within {HUB_TIMEOUT_S:g} s"


def _ask_hub(outcome: SimpleQueue[str | None]) -> None:
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception as exc:  # the rim of a network library, whose error types change with its version
        outcome.put(str(exc) or type(exc).__name__)
    else:
        outcome.put(None)

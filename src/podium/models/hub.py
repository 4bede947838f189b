"""Models of the hub: fetched once a node, then read from the node's cache without asking the hub again.

A thousand ranks that start at once would each ask the hub for every file, and it refuses so many.
"""

from __future__ import annotations

import json
from pathlib import Path

from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""One of which a tokenizer has."""


def is_cached(hub_id: str) -> bool:
    """Whether config, tokenizer and weights are all in this node's cache, and what is optional is there or known not to be."""
    if not _has(hub_id, "config.json") or not any(_has(hub_id, name) for name in VOCABULARIES):
        return False
    is_known = try_to_load_from_cache(hub_id, GENERATION) is not None
    return is_known and (_has(hub_id, WEIGHTS) or _has_shards(hub_id))


def fetch_weights(hub_id: str) -> None:
    """Bring what transformers reads beside config and tokenizer into the cache; files of other formats it fetches itself."""
    for name in (GENERATION, WEIGHTS):
        _fetch(hub_id, name)
    if not _has(hub_id, WEIGHTS) and _fetch(hub_id, INDEX):
        for shard in sorted(_shards(hub_id)):
            hf_hub_download(hub_id, shard)


def _fetch(hub_id: str, name: str) -> bool:
    """Whether the hub has the file, which is in the cache then."""
    try:
        hf_hub_download(hub_id, name)
    except EntryNotFoundError:
        return False
    return True


def _has(hub_id: str, name: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(hub_id, name), str)
    except HFValidationError:  # a path that cannot be a hub id
        return False


def _has_shards(hub_id: str) -> bool:
    return _has(hub_id, INDEX) and all(_has(hub_id, shard) for shard in _shards(hub_id))


def _shards(hub_id: str) -> set[str]:
    index = try_to_load_from_cache(hub_id, INDEX)
    return set(json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].values())

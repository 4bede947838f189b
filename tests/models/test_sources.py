"""What is known of a model before anything starts: its files of weights as far as their headers, and whether a hub answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from podium.config import ModelConfig
from podium.errors import ConfigError
from podium.models import check_model_path, load_model, sources


@pytest.fixture
def sharded(tmp_path):
    """A model in several files of weights."""
    load_model(ModelConfig(path="char_llama"), seed=0).save_pretrained(tmp_path, max_shard_size="300KB")
    assert len([*tmp_path.glob("model-*.safetensors")]) > 1
    return tmp_path


@pytest.fixture
def single(tmp_path):
    load_model(ModelConfig(path="char_llama"), seed=0).save_pretrained(tmp_path)
    return tmp_path


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def test_whole_folders_pass(tmp_path):
    model = load_model(ModelConfig(path="char_llama"), seed=0)
    for name, size in (("one", "5GB"), ("many", "300KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        check_model_path(ModelConfig(path=str(tmp_path / name)))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda file: file.unlink(), r"has no weights: neither model\.safetensors nor .*; there are: config\.json"),
        (lambda file: file.write_bytes(b"garbage"), r"model\.safetensors, of 7 bytes, is not a complete safetensors file"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), r"is not a complete safetensors file"),
        (lambda file: file.write_bytes(b""), r"model\.safetensors, of 0 bytes, is not a complete safetensors file"),
        (lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\n"), r"is a pointer of Git LFS"),
    ],
)
def test_missing_and_damaged_weights(single, spoil: Callable[[Path], object], expected):
    spoil(single / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model\.path: .*{expected}"):
        check_model_path(ModelConfig(path=str(single)))


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda folder: first_shard(folder).unlink(), r"lacks model-00001-of-\d+\.safetensors, one of \d files of weights"),
        (
            lambda folder: first_shard(folder).write_bytes(b"x" * 99),
            r"model-00001-of-\d+\.safetensors, of 99 bytes, is not a complete",
        ),
        (lambda folder: (folder / sources.INDEX).write_text("{"), r"index\.json is damaged"),
        (lambda folder: (folder / sources.INDEX).write_text('{"weight_map": {"a": 1}}'), r"must hold a file's name for each"),
        (lambda folder: move_a_weight(folder), r"lacks 1 weights of the index: no\.such\.weight"),
    ],
)
def test_missing_and_damaged_shards(sharded, spoil: Callable[[Path], object], expected):
    spoil(sharded)
    with pytest.raises(ConfigError, match=expected):
        check_model_path(ModelConfig(path=str(sharded)))


def move_a_weight(folder: Path) -> None:
    index = json.loads((folder / sources.INDEX).read_text())
    index["weight_map"]["no.such.weight"] = first_shard(folder).name
    (folder / sources.INDEX).write_text(json.dumps(index))


class Hub:
    """Stands where huggingface_hub's HTTP session is."""

    def __init__(self, answer: Callable[[], object]) -> None:
        self.answer = answer

    def head(self, url: str, *, timeout: float) -> object:
        assert url == constants.ENDPOINT
        assert timeout <= 5
        return self.answer()


def raising() -> object:
    raise OSError("no route to host")


@pytest.mark.parametrize(
    ("answer", "expected"), [(raising, "no route to host"), (lambda: time.sleep(20), r"did not answer within 0\.5 s")]
)
def test_a_hub_id_without_network_fails_soon(monkeypatch, tmp_path, answer, expected):
    """transformers alone tries six times, over half a minute where names are not resolved and longer where nothing answers."""
    monkeypatch.setattr(sources, "get_session", lambda: Hub(answer))
    monkeypatch.setattr(sources, "HUB_TIMEOUT_S", 0.5)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=rf"no folder 'not/exist' here\. As a hub id.*cannot be reached: .*{expected}"):
        check_model_path(ModelConfig(path="not/exist"))
    assert time.monotonic() - started < 5


def test_a_hub_that_answers_is_left_to_transformers(monkeypatch):
    monkeypatch.setattr(sources, "get_session", lambda: Hub(lambda: None))
    check_model_path(ModelConfig(path="not/exist"))


def test_what_the_cache_has_needs_no_hub(monkeypatch):
    monkeypatch.setattr(sources, "get_session", lambda: Hub(raising))
    monkeypatch.setattr(sources, "try_to_load_from_cache", lambda hub_id, name: f"/cache/{hub_id}/{name}")
    check_model_path(ModelConfig(path="owner/name"))


def test_a_path_that_cannot_be_a_hub_id_is_an_error(monkeypatch):
    with pytest.raises(ConfigError, match=r"'a b/c' is neither a folder nor a hub id"):
        check_model_path(ModelConfig(path="a b/c"))

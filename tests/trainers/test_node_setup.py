"""What a node must have before workers are built on it: the run's folder and the models, as the driver sees them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from podium.config import ModelConfig
from podium.errors import ConfigError
from podium.trainers.node_setup import ModelFiles, NodeSetup, shared


def model_in(folder: Path) -> ModelFiles:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return ModelFiles.of("model.path", ModelConfig(path=str(folder)))


def test_a_node_that_sees_the_same_is_ready_and_the_probe_goes(tmp_path):
    files = model_in(tmp_path / "model")
    with shared(tmp_path) as folder:
        NodeSetup((files,), folder)()
        assert (tmp_path / folder.probe).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_a_node_does_not_share_is_an_error_that_names_it(tmp_path):
    with shared(tmp_path) as folder:
        with pytest.raises(
            ConfigError, match=rf"run_root: the driver keeps the run in {tmp_path}/gone, but this node does not see"
        ):
            replace(folder, path=tmp_path / "gone").check()
        with pytest.raises(ConfigError, match="but this node has another folder of that name"):
            replace(folder, probe=".probe-other").check()
        (tmp_path / folder.probe).write_text("of another run")
        with pytest.raises(ConfigError, match="holds 'of another run' on this node, not what the driver wrote"):
            folder.check()


def test_a_model_that_a_node_does_not_have_or_has_otherwise_is_an_error(tmp_path):
    """An older copy at the same path would train shards of two models."""
    files = model_in(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_text("w")
    with pytest.raises(
        ConfigError, match=r"model\.path: the driver sees .*model\.safetensors with 7 bytes, but this node has 1 b"
    ):
        files.check()
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"the driver sees .*/model/config\.json with 2 bytes, but this node does not have it"):
        files.check()


def test_a_built_in_model_needs_no_files():
    ModelFiles.of("model.path", ModelConfig(path="char_llama")).check()

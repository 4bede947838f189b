"""Whether the models that a run reads are still the same: checksums of those that it wrote, and of those that it was given."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from podium.checkpoint import Checkpoint, FileEntry, file_entry
from podium.checkpoint.manifest import MANIFEST_FILE
from podium.config import RunConfig
from podium.errors import CheckpointError, ConfigError
from podium.models import model_folder
from podium.trainers.json_files import read_json, write_json

logger = logging.getLogger(__name__)

ModelFiles: TypeAlias = dict[str, FileEntry]

SUFFIXES: Final = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt", ".py"}
"""Of files that transformers may read of a model's folder."""


class GivenModels(BaseModel):
    """The content of `models.json`: the files of each model that the run was given, by the model's path or hub id."""

    model_config = ConfigDict(strict=True, extra="forbid")

    models: dict[str, ModelFiles]


def check_published(folder: Path) -> None:
    """ConfigError when a model folder of the run (`publish_model`) lacks a file, or has one that was changed."""
    if not (folder / MANIFEST_FILE).is_file():
        logger.warning("%s does not have %s: whether its files are those that the run saved is not known", folder, MANIFEST_FILE)
        return
    try:
        Checkpoint.read(folder).verify()
    except CheckpointError as exc:
        raise ConfigError(
            f"{exc}. {folder} is not the model that the run saved: put the file back, or remove the folder, and "
            "podium train --resume makes it anew from the last checkpoint"
        ) from exc


def check_given(path: Path, config: RunConfig) -> dict[str, ModelFiles]:
    """The files of the models of `model.path` and `ref.model`; reads every byte of them.

    ConfigError when a file is missing, new or changed since they were pinned in `path`.
    """
    known, found = _read(path), _found(config)
    for name, files in found.items():
        if name in known.models:
            _compare(name, known.models[name], files)
    return found


def pin_given(path: Path, found: Mapping[str, ModelFiles]) -> None:
    """Add the files of models to those that `path` keeps."""
    known = _read(path).models
    if not found.keys() <= known.keys():
        write_json(path, GivenModels(models={**known, **found}).model_dump())


def _found(config: RunConfig) -> dict[str, ModelFiles]:
    """What can be looked at here; a built-in model has no files, and a hub id may not be in the cache yet."""
    models = [config.model, *([config.model.moved_to(config.ref.model)] if config.ref.model else [])]
    folders = {model.path: model_folder(model) for model in models}
    return {name: _entries(folder) for name, folder in folders.items() if folder is not None}


def _entries(folder: Path) -> ModelFiles:
    return {file.name: file_entry(file) for file in sorted(folder.iterdir()) if file.suffix in SUFFIXES and file.is_file()}


def _compare(name: str, was: ModelFiles, now: ModelFiles) -> None:
    if changed := sorted(file for file in was.keys() | now.keys() if was.get(file) != now.get(file)):
        raise ConfigError(
            f"the model {name} is not the one that the run began with: {', '.join(changed)} changed since. Put the files back as "
            "they were, or start a new run"
        )


def _read(path: Path) -> GivenModels:
    remedy = "put it back, or remove it to trust the models as they are"
    content = read_json(path, remedy=remedy)
    try:
        return GivenModels(models={}) if content is None else GivenModels.model_validate(content)
    except ValidationError as exc:
        raise ConfigError(f"{path} is damaged ({exc.errors()[0]['msg']}): {remedy}") from exc

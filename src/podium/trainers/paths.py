"""The paths in a config, made to mean the same from any working directory."""

from __future__ import annotations

from pathlib import Path

from podium.config import RunConfig, with_absolute_names
from podium.models import BUILT_IN

FILES = ("train_files", "validation_files", "held_out_files")


def anchored(config: RunConfig) -> RunConfig:
    """The config with the path of each file and folder that exists absolute; hub ids and what is not there stay as they are.

    A model's folder is followed through links, such as `runs/latest`, which soon means another run; a file keeps its own name,
    which is part of its rows' uids.
    """
    config = with_absolute_names(config)
    task = {key: tuple(map(_file, getattr(config.task, key))) for key in FILES}
    script, colon, function = (config.reward.function or "").rpartition(":")
    reward = {"function": f"{_file(script)}:{function}"} if colon else {}
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": _folder(config.model.path)}),
            "ref": config.ref.model_copy(update={"model": config.ref.model and _folder(config.ref.model)}),
            "task": config.task.model_copy(update=task),
            "reward": config.reward.model_copy(update=reward),
        }
    )


def _file(path: str) -> str:
    found = Path(path).expanduser()
    return str(found.parent.resolve() / found.name) if found.is_file() else path


def _folder(path: str) -> str:
    found = Path(path).expanduser()
    return str(found.resolve()) if path not in BUILT_IN and found.is_dir() else path

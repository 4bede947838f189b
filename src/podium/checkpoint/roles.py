"""A folder of a checkpoint for each role that has a state: `step-10/actor/`, `step-10/critic/`.

A checkpoint of an older Podium has the actor's files in the folder itself; these are still read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from podium.checkpoint.manifest import MANIFEST_FILE, WrittenFiles
from podium.checkpoint.store import Saver
from podium.errors import CheckpointError

FIRST_ROLE: Final = "actor"
"""The only role that older checkpoints hold."""


def save_roles(savers: Mapping[str, Saver]) -> Saver:
    """A saver that lets each role write into a folder of its own, one role after another."""

    def save(local_path: str, /) -> list[WrittenFiles]:
        written: list[WrittenFiles] = []
        for role, saver in savers.items():
            folder = Path(local_path) / role
            folder.mkdir()
            written += [files.below(role) for files in saver(str(folder))]
        return written

    return save


def load_roles(loaders: Mapping[str, Callable[[str], object]], checkpoint: Path) -> None:
    """Let each role read its folder of a checkpoint. CheckpointError, before any is read, for a role that is not in it."""
    folders = {role: role_folder(checkpoint, role) for role in loaders}
    for role, load in loaders.items():
        load(str(folders[role]))


def role_folder(checkpoint: Path, role: str) -> Path:
    """Where a checkpoint holds a role's files."""
    folder = checkpoint / role
    if folder.is_dir():
        return folder
    found = sorted(path.name for path in checkpoint.iterdir() if path.is_dir())
    files = [path for path in checkpoint.iterdir() if path.is_file() and path.name != MANIFEST_FILE]
    if role == FIRST_ROLE and not found and files:
        return checkpoint
    raise CheckpointError(
        f"{checkpoint} must hold a folder {role!r} with the state of that role; it has {', '.join(found) or 'the actor alone'}. "
        "Go on with the settings that the run had when it was saved, or start a new run"
    )

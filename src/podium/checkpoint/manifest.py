"""What makes a folder a checkpoint: `manifest.json`, written last, lists every file with its size and SHA-256."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from podium.errors import CheckpointError

MANIFEST_FILE: Final = "manifest.json"
VERSION: Final = 1


class FileEntry(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size_bytes: int
    sha256: str


class Manifest(BaseModel):
    """The content of `manifest.json`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, ser_json_inf_nan="constants"
    )

    version: Literal[1]
    """Of this format."""
    step: int
    """The training step after which the state was taken."""
    created: str
    """UTC, ISO 8601."""
    info: dict[str, JsonValue]
    """What the caller says of the state, such as its layout (`world_size`)."""
    files: dict[str, FileEntry]
    """By path inside the folder, with forward slashes; the manifest itself is not listed."""

    @classmethod
    def draft(cls, step: int, info: Mapping[str, JsonValue]) -> Manifest:
        """A manifest without files yet. CheckpointError when `info` is not plain JSON."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            return cls(version=VERSION, step=step, created=created, info=dict(info), files={})
        except ValidationError as exc:
            raise CheckpointError(f"the info of a checkpoint is plain JSON: {exc}") from exc


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a readable manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Read the manifest only. CheckpointError when it is missing or not a manifest."""
        file = path / MANIFEST_FILE
        try:
            return cls(path, Manifest.model_validate_json(file.read_bytes()))
        except FileNotFoundError as exc:
            raise CheckpointError(f"{file} is missing: the checkpoint was not finished, or lost it") from exc
        except (OSError, ValidationError) as exc:
            raise CheckpointError(f"{file} is damaged or of another version: {exc}") from exc

    def verify(self) -> None:
        """Compare every file with the manifest. CheckpointError names the first that is missing, cut short or changed.

        Reads every byte; sizes are compared first, so that a truncated file is found at once.
        """
        self.verify_sizes()
        for name, entry in self.manifest.files.items():
            if _sha256(self.path / name) != entry.sha256:
                raise CheckpointError(f"{self.path / name} is damaged: its SHA-256 is not the manifest's")

    def verify_sizes(self) -> None:
        """The cheap part of `verify`: all files are there, each with its size."""
        for name, entry in self.manifest.files.items():
            file = self.path / name
            size_bytes = file.stat().st_size if file.is_file() else None
            if size_bytes is None:
                raise CheckpointError(f"{file} is missing")
            if size_bytes != entry.size_bytes:
                raise CheckpointError(f"{file} has {size_bytes} bytes, the manifest says {entry.size_bytes}")


def seal(folder: Path, draft: Manifest) -> None:
    """Bring every file of the folder to the disk and write the manifest, which makes it a checkpoint.

    Reads every byte once more for its SHA-256. CheckpointError when a file has the manifest's name; OSError from the disk.
    """
    manifest_path = folder / MANIFEST_FILE
    if manifest_path.exists():
        raise CheckpointError(f"{manifest_path} was written by a caller; that name is the store's own")
    inside = sorted(folder.rglob("*"))
    files = {path.relative_to(folder).as_posix(): _synced_entry(path) for path in inside if path.is_file()}
    manifest_path.write_text(draft.model_copy(update={"files": files}).model_dump_json(indent=1), encoding="utf-8")
    sync(manifest_path)
    for inner in (*(path for path in inside if path.is_dir()), folder):
        sync(inner)


def sync(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _synced_entry(path: Path) -> FileEntry:
    sync(path)
    return FileEntry(size_bytes=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

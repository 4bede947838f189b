"""What makes a folder complete: `manifest.json`, written last, lists every file with its size and SHA-256.

Whoever writes files lists them: a rank reads its own files once more, where they are still in memory. The driver, which may
be on another machine, compares the lists with what it sees of the folder, and reads nothing.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from podium.errors import CheckpointError

MANIFEST_FILE: Final = "manifest.json"
VERSION: Final = 1
VISIBLE_WITHIN_S: Final = 60.0
"""How long a file of another node may take to be seen here: NFS keeps what it knows of a folder for up to a minute."""
LOOK_EVERY_S: Final = 0.2


class FileEntry(BaseModel):
    """One file of a folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class WrittenFiles:
    """What one process wrote into a folder, as it says itself."""

    writer: str
    """For messages: which rank on which node."""
    files: Mapping[str, FileEntry]
    """By path inside the folder, with forward slashes. Empty for a rank that wrote nothing."""

    @classmethod
    def of(cls, folder: Path, writer: str, names: Iterable[str] | None = None) -> WrittenFiles:
        """Bring these files (None: all that are in the folder) to the disk, and list them.

        Reads every byte for its SHA-256, so call it where the files were just written. OSError from the disk.
        """
        inside = sorted(folder.rglob("*")) if names is None else [folder / name for name in names]
        return cls(writer, {path.relative_to(folder).as_posix(): _synced_entry(path) for path in inside if not path.is_dir()})

    def below(self, name: str) -> WrittenFiles:
        """The same files as seen from the folder above, where theirs is called `name`."""
        return WrittenFiles(self.writer, {f"{name}/{path}": entry for path, entry in self.files.items()})


class Manifest(BaseModel):
    """The content of `manifest.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False)

    version: Literal[1]
    """Of this format."""
    step: int
    """The training step after which the files were written."""
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
        """Read the manifest only. CheckpointError when it is missing, lists no file or is not a manifest."""
        file = path / MANIFEST_FILE
        try:
            found = cls(path, Manifest.model_validate_json(file.read_bytes()))
        except FileNotFoundError as exc:
            raise CheckpointError(f"{file} is missing: the checkpoint was not finished, or lost it") from exc
        except (OSError, ValidationError) as exc:
            raise CheckpointError(f"{file} is damaged or of another version: {exc}") from exc
        if not found.manifest.files:
            raise CheckpointError(f"{file} lists no file: what was saved lies on the disk of another node, or nowhere")
        return found

    def verify(self) -> None:
        """Compare every file with the manifest. CheckpointError names the first that is missing, cut short or changed.

        Reads every byte; sizes are compared first, so that a truncated file is found at once.
        """
        self.verify_sizes()
        for name, entry in self.manifest.files.items():
            with _readable(self.path / name) as file:
                found = _sha256(file)
            if found != entry.sha256:
                raise CheckpointError(f"{file} is damaged: its SHA-256 is not the manifest's")

    def verify_sizes(self) -> None:
        """The cheap part of `verify`: all files are there, each with its size."""
        for name, entry in self.manifest.files.items():
            with _readable(self.path / name) as file:
                size_bytes = file.stat().st_size if file.is_file() else None
            if size_bytes is None:
                raise CheckpointError(f"{file} is missing")
            if size_bytes != entry.size_bytes:
                raise CheckpointError(f"{file} has {size_bytes} bytes, the manifest says {entry.size_bytes}")


def write_manifest(folder: Path, draft: Manifest, written: Sequence[WrittenFiles]) -> None:
    """Write the manifest of what `written` lists, which makes the folder complete, and bring its names to the disk.

    CheckpointError, naming the writer, when the folder is not as listed: a file is missing here or has another size, two ranks
    wrote the same one, one is not listed, or nothing was written. OSError from the disk.
    """
    files = _merged(folder, written)
    _await_visible(folder, written)
    inside = sorted(folder.rglob("*"))
    found = {path.relative_to(folder).as_posix() for path in inside if not path.is_dir()}
    if unlisted := sorted(found - files.keys()):
        raise CheckpointError(f"{folder} holds {', '.join(unlisted)}, but the writer did not list it: list all files")
    manifest_path = folder / MANIFEST_FILE
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


def _merged(folder: Path, written: Sequence[WrittenFiles]) -> dict[str, FileEntry]:
    """The files of all writers by name, sorted."""
    writers: dict[str, str] = {}
    for one in written:
        for name in one.files:
            if name == MANIFEST_FILE:
                raise CheckpointError(f"{one.writer} wrote {folder / name}; that name is the manifest's own: use another one")
            if name in writers:
                raise CheckpointError(f"{writers[name]} and {one.writer} both wrote {folder / name}: use a name for each rank")
            writers[name] = one.writer
    if not writers:
        asked = ", ".join(one.writer for one in written) or "no rank"
        raise CheckpointError(f"nothing was written into {folder} (asked: {asked}): there is nothing to keep")
    return dict(sorted(pair for one in written for pair in one.files.items()))


def _await_visible(folder: Path, written: Sequence[WrittenFiles]) -> None:
    """CheckpointError unless every file is seen here, with its size, within `VISIBLE_WITHIN_S`."""
    give_up = time.monotonic() + VISIBLE_WITHIN_S
    while (difference := _difference(folder, written)) is not None:
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"{difference}. The driver and all ranks must see the same files under {folder.parent}: use a folder that all "
                "nodes share, such as one on NFS or Lustre"
            )
        time.sleep(LOOK_EVERY_S)


def _difference(folder: Path, written: Sequence[WrittenFiles]) -> str | None:
    for one in written:
        for name, entry in one.files.items():
            file = folder / name
            size_bytes = file.stat().st_size if file.is_file() else None
            if size_bytes != entry.size_bytes:
                seen = "does not see the file" if size_bytes is None else f"sees {size_bytes} bytes"
                return f"{one.writer} wrote {file} with {entry.size_bytes} bytes, but the driver on {platform.node()} {seen}"
    return None


@contextmanager
def _readable(file: Path) -> Iterator[Path]:
    """CheckpointError where the disk does not give the file, so that an older checkpoint may take its place."""
    try:
        yield file
    except OSError as exc:
        raise CheckpointError(f"{file} cannot be read: {exc.strerror}") from exc


def file_entry(path: Path) -> FileEntry:
    """Size and SHA-256 of a file; reads every byte."""
    return FileEntry(size_bytes=path.stat().st_size, sha256=_sha256(path))


def _synced_entry(path: Path) -> FileEntry:
    sync(path)
    return file_entry(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

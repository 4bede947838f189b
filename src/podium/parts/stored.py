"""The files of a run's parts in its folder: each under its SHA-256, and an index that says which path has which."""

from __future__ import annotations

import json
import os
from pathlib import Path

from podium.errors import ConfigError
from podium.parts.source import SourceFile, Sources

INDEX = "index.json"


def write_sources(folder: Path, sources: Sources) -> None:
    """Add files to those that are stored. The index is written last and atomically, so that it names only whole files."""
    stored = read_sources(folder)
    if all(stored.get(path) == source for path, source in sources.items()):
        return
    folder.mkdir(exist_ok=True)
    for source in sources.values():
        _write(folder / f"{source.sha256}.py", source.text)
    index = {path: source.sha256 for path, source in {**stored, **sources}.items()}
    _write(folder / INDEX, json.dumps(index, indent=1))


def read_sources(folder: Path) -> dict[str, SourceFile]:
    """The stored files by the paths that they were read at; empty where none was stored. ConfigError where one is damaged."""
    index = folder / INDEX
    try:
        paths = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
        if not isinstance(paths, dict) or not all(isinstance(digest, str) for digest in paths.values()):
            raise ValueError("it must hold a SHA-256 for each path")
        texts = {digest: (folder / f"{digest}.py").read_bytes().decode() for digest in paths.values()}
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{index} is damaged ({exc}): put back the folder {folder} as it was, or start a new run") from exc
    sources = {path: SourceFile(path, texts[digest]) for path, digest in paths.items()}
    for path, source in sources.items():
        if source.sha256 != paths[path]:
            raise ConfigError(
                f"{folder / paths[path]}.py is not the text that the run began with (its SHA-256 is {source.sha256[:12]}): put "
                "it back, or start a new run"
            )
    return sources


def edited(source: SourceFile) -> bool:
    """Whether the file exists and has another text now."""
    path = Path(source.path)
    return path.is_file() and SourceFile.read(source.path).text != source.text


def _write(path: Path, text: str) -> None:
    """Atomically and through to the disk."""
    beside = path.with_suffix(".tmp")
    with beside.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)

"""What every node must have before workers are built on it: the run's folder, and the models as the driver sees them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from podium.checkpoint import sync
from podium.config import ModelConfig
from podium.errors import ConfigError
from podium.models import fetch_model, local_folder

PROBE_PREFIX = ".probe-"


@dataclass(frozen=True)
class SharedFolder:
    """A folder of the driver's, with a file in it that proves that another process sees the same folder."""

    path: Path
    probe: str
    """The file's name, and its content."""

    def check(self) -> None:
        """ConfigError unless this process sees the file."""
        try:
            found = (self.path / self.probe).read_text(encoding="utf-8")
        except OSError as exc:
            reason = "does not see it" if not self.path.is_dir() else "has another folder of that name"
            raise ConfigError(
                f"run_root: the driver keeps the run in {self.path}, but this node {reason} ({exc}). Checkpoints would be lost: "
                "set run_root to a folder that the driver and all nodes share under the same path"
            ) from exc
        if found != self.probe:
            raise ConfigError(f"run_root: {self.path / self.probe} holds {found!r} on this node, not what the driver wrote")


@contextmanager
def shared(path: Path) -> Iterator[SharedFolder]:
    """The folder with its probe, which is removed at the end."""
    folder = SharedFolder(path.absolute(), f"{PROBE_PREFIX}{secrets.token_hex(8)}")
    file = folder.path / folder.probe
    file.write_text(folder.probe, encoding="utf-8")
    try:
        sync(file)
        yield folder
    finally:
        file.unlink(missing_ok=True)


@dataclass(frozen=True)
class ModelFiles:
    """A model as the driver sees it: of a folder, its files and their sizes in bytes."""

    setting: str
    """That names the model, for messages."""
    model: ModelConfig
    sizes: Mapping[str, int] | None
    """None where the path is not a folder: a hub id or a built-in architecture."""

    @classmethod
    def of(cls, setting: str, model: ModelConfig) -> ModelFiles:
        folder = local_folder(model)
        return cls(setting, model, None if folder is None else _sizes(folder))

    def check(self) -> None:
        """ConfigError unless this node has the same files; a model of the hub is fetched into this node's cache."""
        if self.sizes is None:
            fetch_model(self.model)
            return
        folder = Path(self.model.path).expanduser()
        found = _sizes(folder) if folder.is_dir() else {}
        for name, size_bytes in self.sizes.items():
            if found.get(name) != size_bytes:
                here = "does not have it" if name not in found else f"has {found[name]} bytes"
                raise ConfigError(
                    f"{self.setting}: the driver sees {folder / name} with {size_bytes} bytes, but this node {here}. Put the "
                    "model into a folder that all nodes share, or copy it to the same path of each node"
                )


@dataclass(frozen=True)
class NodeSetup:
    """Called once on each node, by the first rank there. ConfigError says what this node lacks."""

    models: tuple[ModelFiles, ...]
    folder: SharedFolder | None = field(default=None)

    def __call__(self) -> None:
        if self.folder is not None:
            self.folder.check()
        for files in self.models:
            files.check()


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}

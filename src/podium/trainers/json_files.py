"""Small JSON files of a run directory: written atomically, read with a message when they are damaged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from podium.checkpoint import sync
from podium.errors import ConfigError


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Atomically: the file is the old one or the new one, never half of it, also after a power cut."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    """As `write_json`."""
    beside = path.with_suffix(".tmp")
    beside.write_text(text, encoding="utf-8")
    sync(beside)
    beside.replace(path)


def read_json(path: Path, *, remedy: str) -> dict[str, Any] | None:
    """The object in a file, None when there is no file. ConfigError, with the remedy, when it is not a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path} is damaged ({exc}): {remedy}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged (an object was expected, got {type(content).__name__}): {remedy}")
    return content


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"JSON has no {number}")

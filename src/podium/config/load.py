"""From YAML and `key=value` to a `RunConfig`, and back. Every complaint is one `ConfigError` that names all bad keys."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from podium.config.schema import RunConfig
from podium.errors import ConfigError, nearest

SHORTHANDS = {"model": "path"}
"""Sections that may be given as one string, and the field that it means; as an override, a string or a mapping, it replaces the
whole section."""


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. ConfigError when it is missing, does not parse or is not a mapping."""
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}") from None
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as exc:
        raise ConfigError(f"{path} cannot be read as YAML: {exc}") from exc
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def resolve(base: Mapping[str, Any] | RunConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """A checked config from settings and `key=value` overrides (dotted keys, YAML values); the last override wins."""
    settings = base.model_dump(mode="json") if isinstance(base, RunConfig) else dict(base)
    changes = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"an override is written key=value, got {text!r}")
        if key in SHORTHANDS:
            settings.pop(key, None)
            text = text if value.lstrip().startswith("{") else f"{key}.{SHORTHANDS[key]}={value}"
        changes.append(text)
    for key, field in SHORTHANDS.items():
        if isinstance(settings.get(key), str):
            settings[key] = {field: settings[key]}
    try:
        merged = OmegaConf.to_container(
            OmegaConf.merge(OmegaConf.create(settings), OmegaConf.from_dotlist(changes)), resolve=True
        )
    except (OmegaConfBaseException, YAMLError) as exc:
        raise ConfigError(f"the overrides cannot be read: {exc}") from exc
    try:
        return RunConfig.model_validate(merged)
    except ValidationError as exc:
        raise ConfigError("\n".join(_complaint(error) for error in exc.errors())) from None


def to_yaml(config: RunConfig) -> str:
    """The whole config as YAML that `resolve(read_yaml(...))` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def _complaint(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            known = _known_keys(RunConfig, error["loc"][:-1])
            hint = nearest(str(error["loc"][-1]), known)
            return f"unknown key {path!r}{hint or '; there are: ' + ', '.join(sorted(known))}"
        case "missing":
            return f"{path}: is required and was not given"
        case "value_error":
            return f"{path}: {error['ctx']['error']}" if path else str(error["ctx"]["error"])
        case "literal_error":
            hint = nearest(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
            return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}{hint}"
        case _:
            return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _known_keys(model: type[BaseModel], path: Sequence[str | int]) -> set[str]:
    """The keys of the section at `path`."""
    for part in path:
        field = model.model_fields[str(part)].annotation
        model = next((arg for arg in (field, *get_args(field)) if isinstance(arg, type) and issubclass(arg, BaseModel)), model)
    return set(model.model_fields)

"""From YAML and `key=value` to a `RunConfig`, and back. Every complaint is one `ConfigError` that names all bad keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
EXAMPLES = {
    "name": "name=my_run",
    "model.path": "model=char_llama",
    "task": "task.name=spell_backward, or your own rows: task.train_files=[my.jsonl]",
    "actor.optim.lr": "actor.optim.lr=4e-4 for char_llama, 1e-6 for a pretrained model",
    "trainer.total_steps": "trainer.total_steps=100",
    "trainer.prompts_per_step": "trainer.prompts_per_step=32",
}
"""What may stand for a setting that has no default."""


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
        raise ConfigError("\n".join(line for error in exc.errors() for line in _complaints(error))) from None


def to_yaml(config: RunConfig) -> str:
    """The whole config as YAML that `resolve(read_yaml(...))` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def _complaints(error: Any) -> list[str]:
    """A line, or where a whole section is missing one for each setting in it that has no default."""
    path = ".".join(str(part) for part in error["loc"])
    return [_missing(leaf) for leaf in _required_below(path)] if error["type"] == "missing" else [_complaint(error)]


def _missing(path: str) -> str:
    example = EXAMPLES.get(path)
    return f"{path}: is required and was not given" + (f", for example {example}" if example else "")


def _required_below(path: str) -> list[str]:
    """The settings without a default in the section at `path`; the path itself where that is one, or asks for a choice."""
    section = _model_at(RunConfig, path.split("."))
    required = [key for key, field in section.model_fields.items() if field.is_required()] if section else []
    return [leaf for key in required for leaf in _required_below(f"{path}.{key}")] or [path]


def _complaint(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            key, known = str(error["loc"][-1]), _known_keys(RunConfig, error["loc"][:-1])
            hint = _elsewhere(key) or nearest(key, known)
            return f"unknown key {path!r}{hint or '; there are: ' + ', '.join(sorted(known))}"
        case "value_error":
            return f"{path}: {error['ctx']['error']}" if path else str(error["ctx"]["error"])
        case "literal_error":
            hint = nearest(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
            return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}{hint}"
        case _:
            return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def settings_called(key: str) -> list[str]:
    """The dotted paths of all settings whose last part is `key`.

    >>> settings_called("lr")
    ['warmup.optim.lr', 'actor.optim.lr']
    """
    return [path for path in _leaf_paths(RunConfig) if path.rpartition(".")[2] == key]


def _elsewhere(key: str) -> str:
    found = settings_called(key)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _leaf_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name in model.model_fields:
        section = _model_at(model, [name])
        yield from [f"{prefix}{name}"] if section is None else _leaf_paths(section, f"{prefix}{name}.")


def _known_keys(model: type[BaseModel], path: Sequence[str | int]) -> set[str]:
    """The keys of the section at `path`."""
    return set((_model_at(model, path) or model).model_fields)


def _model_at(model: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel] | None:
    """The section at `path`; None where that is a single setting."""
    found: type[BaseModel] | None = model
    for part in path:
        field = found.model_fields[str(part)].annotation if found else None
        found = next((arg for arg in (field, *get_args(field)) if isinstance(arg, type) and issubclass(arg, BaseModel)), None)
    return found

"""From YAML and `key=value` to a `RunConfig`, and back. Every complaint is one `ConfigError` that names all bad keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from podium.config.reading import dump_yaml, load_yaml, read_value
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
        loaded = load_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no such file: {path}") from None
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read as YAML: {exc}") from exc
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, got {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def resolve(base: Mapping[str, Any] | RunConfig, overrides: Sequence[str] = ()) -> RunConfig:
    """A checked config from settings and `key=value` overrides (dotted keys, values as in `read_value`); the last one wins."""
    settings = base.model_dump(mode="json") if isinstance(base, RunConfig) else deepcopy(dict(base))
    _spell_out(settings)
    for text in overrides:
        _override(settings, text)
    _check_text(settings)
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as exc:
        raise ConfigError("\n".join(line for error in exc.errors() for line in _complaints(error))) from None


def to_yaml(config: RunConfig) -> str:
    """The whole config as YAML that `resolve(read_yaml(...))` reads back to an equal one."""
    return dump_yaml(config.model_dump(mode="json"))


def _override(settings: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"an override is written key=value, got {text!r}")
    if key in SHORTHANDS:
        settings.pop(key, None)
        key = key if value.lstrip().startswith("{") else f"{key}.{SHORTHANDS[key]}"
    path = key.split(".")
    try:
        found = read_value(value, is_text=_takes_text(path))
    except ConfigError as exc:
        raise ConfigError(f"{key}: {exc}") from exc
    for part in reversed(path):
        found = {part: found}
    _merge(settings, found)


def _merge(settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put the changes into the settings; a mapping is merged into a mapping, everything else replaces what was there."""
    for key, value in changes.items():
        if isinstance(value, dict):
            if not isinstance(settings.get(key), dict):
                settings[key] = {}
            _merge(settings[key], value)
        else:
            settings[key] = value


def _check_text(value: Any, key: str = "") -> None:
    """ConfigError for text that no file can hold, such as a path whose bytes are not UTF-8."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise ConfigError(f"{key}: a text must be valid Unicode, got {value!r}; rename the file or change the text") from exc
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_text(name, key or repr(name))
            _check_text(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            _check_text(item, f"{key}.{place}")


def _spell_out(settings: dict[str, Any]) -> None:
    for key, field in SHORTHANDS.items():
        if isinstance(settings.get(key), str):
            settings[key] = {field: settings[key]}


def _takes_text(path: Sequence[str]) -> bool:
    """Whether the setting at `path` is one text (or a name out of some), or null."""
    section = _model_at(RunConfig, path[:-1])
    field = section.model_fields.get(path[-1]) if section else None
    return field is not None and _is_text(field.annotation)


def _is_text(kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return all(isinstance(name, str) for name in inner)
    if origin is Annotated:
        return _is_text(inner[0])
    if origin in (Union, UnionType):
        return all(_is_text(one) for one in inner if one is not NoneType)
    return kind is str


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
        field = found.model_fields.get(str(part)) if found else None
        kind = field.annotation if field else None
        found = next((arg for arg in (kind, *get_args(kind)) if isinstance(arg, type) and issubclass(arg, BaseModel)), None)
    return found

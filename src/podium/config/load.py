"""From YAML and `key=value` to a `RunConfig`, and back. One `ConfigError` lists all bad keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from podium.config.parts import SOURCES, Place, model_in, sources_of
from podium.config.reading import dump_yaml, load_yaml, read_value
from podium.config.schema import RunConfig
from podium.errors import ConfigError, nearest
from podium.parts import Sources

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


MOVED = {
    "actor.engine.strategy": "actor.engine.name",
    "trainer.tensorboard": "trainer.trackers",
    "actor.clip_ratio_low": "actor.loss.clip_low",
    "actor.clip_ratio_high": "actor.loss.clip_high",
    "actor.clip_ratio_c": "actor.loss.clip_c",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.adv_estimator.norm_by_std",
}
"""Settings that have another name than in older versions and in verl."""


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


def resolve(base: Mapping[str, Any] | RunConfig, overrides: Sequence[str] = (), *, sources: Sources | None = None) -> RunConfig:
    """A checked config from settings and `key=value` overrides (dotted keys, values as in `read_value`); the last one wins.

    `sources` are files of parts that a run has stored: they stand in for the files of these paths.
    """
    if isinstance(base, RunConfig):
        sources = {**sources_of(base), **(sources or {})}
    settings = base.model_dump(mode="json") if isinstance(base, RunConfig) else deepcopy(dict(base))
    _spell_out(settings)
    for key, value in _names_first([_split(text) for text in overrides], settings, sources):
        _override(settings, key, value, sources)
    _check_text(settings)
    try:
        return RunConfig.model_validate(settings, context={SOURCES: sources})
    except ValidationError as exc:
        errors = exc.errors()
        where = Place(RunConfig, settings, sources)
        message = "\n".join(line for error in errors for line in _complaints(error, where))
        raise ConfigError(message) from _cause(errors)


def to_yaml(config: RunConfig) -> str:
    """The whole config as YAML that `resolve(read_yaml(...))` reads back to an equal one."""
    return dump_yaml(config.model_dump(mode="json"))


def _split(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"an override must be key=value, got {text!r}")
    return key, value


def _names_first(overrides: list[tuple[str, str]], settings: Mapping[str, Any], sources: Sources | None) -> list[tuple[str, str]]:
    """The overrides that choose a part before those of its own keys, wherever they stand."""
    where = Place(RunConfig, settings, sources)
    spelled = [(f"{key}.name" if _is_shorthand(where, key, value) else key, value) for key, value in overrides]
    return sorted(spelled, key=lambda override: not _is_part_name(where, override[0]))


def _is_shorthand(where: Place, key: str, value: str) -> bool:
    """Whether the override gives the section of a part as its name alone."""
    found = where.at(_keys(key))
    return found is not None and found.marker is not None and not value.lstrip().startswith("{")


def _is_part_name(where: Place, key: str) -> bool:
    *section, last = _keys(key)
    found = where.at(section)
    return last == "name" and found is not None and found.marker is not None


def _keys(key: str) -> list[str]:
    return key.split(".")


def _override(settings: dict[str, Any], key: str, value: str, sources: Sources | None) -> None:
    if key in SHORTHANDS:
        settings.pop(key, None)
        key = key if value.lstrip().startswith("{") else f"{key}.{SHORTHANDS[key]}"
    path = _keys(key)
    try:
        found = read_value(value, is_text=_takes_text(Place(RunConfig, settings, sources), path))
    except ConfigError as exc:
        raise ConfigError(f"{key}: {exc}") from exc
    for part in reversed(path):
        found = {part: found}
    _choose(settings, found, Place(RunConfig, settings, sources))
    _merge(settings, found)


def _choose(settings: dict[str, Any], changes: Mapping[str, Any], where: Place) -> None:
    """Where the changes choose another part, drop the own keys of the part that was chosen before."""
    for key, change in changes.items():
        place, section = where.child(key), settings.get(key)
        if place is None or not isinstance(change, Mapping):
            continue
        if place.marker is not None and isinstance(section, str):
            section = settings[key] = {"name": section}
        if place.marker is not None and isinstance(section, dict) and "name" in change:
            base = model_in(place.kind)
            known = base.model_fields if base else {}
            is_other = change["name"] != section.get("name", known["name"].default)
            settings[key] = {name: value for name, value in section.items() if name in known or not is_other}
        elif isinstance(section, dict):
            _choose(section, change, place)


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


def _takes_text(where: Place, path: Sequence[str]) -> bool:
    """Whether the setting at `path` is one text (or a name out of some), or null."""
    found = where.at(path)
    return found is not None and _is_text(found.kind)


def _is_text(kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return all(isinstance(name, str) for name in inner)
    if origin is Annotated:
        return _is_text(inner[0])
    if origin in (Union, UnionType):
        return all(_is_text(one) for one in inner if one is not NoneType)
    return kind is str


def _complaints(error: Any, where: Place) -> list[str]:
    """A line, or where a whole section is missing one for each setting in it that does not have a default."""
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "missing":
        return [_missing(leaf) for leaf in _required_below(where, path)]
    return [_complaint(error, where)]


def _missing(path: str) -> str:
    example = EXAMPLES.get(path)
    return f"{path}: is required and was not given" + (f", for example {example}" if example else "")


def _required_below(where: Place, path: str) -> list[str]:
    """The settings without a default in the section at `path`; the path itself where that is one, or asks for a choice."""
    found = where.at(_keys(path))
    section = found.section if found else None
    required = [key for key, field in section.model_fields.items() if field.is_required()] if section else []
    return [leaf for key in required for leaf in _required_below(where, f"{path}.{key}")] or [path]


def _complaint(error: Any, where: Place) -> str:
    path = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "extra_forbidden":
            found = where.at(error["loc"][:-1])
            key, known = str(error["loc"][-1]), set(found.section.model_fields) if found and found.section else set()
            if path in MOVED:
                return f"unknown key {path!r}: it is called {MOVED[path]!r} now"
            hint = _elsewhere(key, path) or nearest(key, known)
            return f"unknown key {path!r}{hint or '; there are: ' + ', '.join(sorted(known))}"
        case "value_error":
            return f"{path}: {error['ctx']['error']}" if path else str(error["ctx"]["error"])
        case "literal_error":
            hint = nearest(str(error["input"]), re.findall(r"'([^']*)'", error["ctx"]["expected"]))
            return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}{hint}"
        case _:
            return f"{path}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _cause(errors: Sequence[Any]) -> BaseException | None:
    """What a user's module raised when it was imported, if that is among the errors."""
    raised = [error["ctx"]["error"] for error in errors if error["type"] == "value_error"]
    return next((error.__cause__ for error in raised if error.__cause__ is not None), None)


def settings_called(key: str) -> list[str]:
    """The dotted paths of all settings whose last part is `key`; of parts, those of the default ones.

    >>> settings_called("lr")
    ['warmup.optim.lr', 'actor.optim.lr']
    """
    return [path for path in _leaf_paths(Place(RunConfig, {})) if path.rpartition(".")[2] == key]


def _elsewhere(key: str, path: str) -> str:
    found = [other for other in settings_called(key) if other != path]
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _leaf_paths(where: Place, prefix: str = "") -> Iterator[str]:
    for name in where.section.model_fields if where.section else ():
        place = where.child(name)
        assert place is not None  # the field was found there
        yield from [f"{prefix}{name}"] if place.section is None else _leaf_paths(place, f"{prefix}{name}.")

"""Settings as text: YAML files, the values of `key=value` overrides, and both written back.

A plain scalar means what it means in YAML 1.2: `null`, `true`, a decimal number, and else text. So `yes`, `007`, `1:30` and dates
are text, and `1e-3` is a number. `${...}` is text too: nothing is filled in, so that what was read can be written and read again.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable
from typing import Any, ClassVar, Final

import yaml
from yaml.constructor import ConstructorError

from podium.errors import ConfigError

_DIGITS: Final = r"(?:0|[1-9][0-9]*)"
_PLAIN: Final[list[tuple[str, str, str]]] = [
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", rf"[-+]?{_DIGITS}", "-+0123456789"),
    (
        "float",
        rf"[-+]?(?:{_DIGITS}\.?|{_DIGITS}?\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", "<<", "<"),
]
"""Tag, pattern, and the characters that such a scalar begins with; the first that fits wins."""

SHOWN_CHARACTERS: Final = 200
"""Of a value that cannot be read."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """YAML with the plain scalars above: without a key that is given twice, a value that holds itself, and other types."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: make
        for tag, make in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        return super().construct_object(node, deep=True)  # which refuses a value that holds itself

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for place, key in enumerate(keys):
            if key in keys[:place]:
                raise ConstructorError(None, None, f"the key {key[1]!r} is given twice", node.value[place][0].start_mark)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes what `_Loader`, and any other reader of YAML, reads back: text that either takes for something else is quoted."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """On one line, and what a terminal or YAML might change by its number."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


for _tag, _pattern, _first in _PLAIN:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"\Z"), [""])
_Dumper.add_representer(str, _text)


def load_yaml(text: str) -> Any:
    """What a YAML document holds; None for an empty one. ValueError says what does not parse, and where."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc
    except KeyError as exc:  # from PyYAML, of text under the tag !!bool
        raise ValueError(f"{exc} is not a bool") from exc
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc


def dump_yaml(value: Any, *, is_flow: bool = False) -> str:
    """The value as a document, or on one line, that `load_yaml` reads back."""
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=is_flow, allow_unicode=True, sort_keys=False, width=sys.maxsize
    )
    return text.removesuffix("...\n")


def read_value(text: str, *, is_text: bool = False) -> Any:
    """The value of an override: in quotes, brackets or braces it is YAML; else a scalar, whatever characters are in it.

    A setting that `is_text` takes brackets and numbers as they stand. ConfigError for an empty value, for quotes, brackets or
    braces that are not closed at the end, and for an item in them that has no value.

    >>> read_value("1e-3"), read_value("####"), read_value("a: b # c"), read_value("[1, 'x']"), read_value("7", is_text=True)
    (0.001, '####', 'a: b # c', [1, 'x'], '7')
    """
    text = text.strip()
    if not text:
        raise ConfigError("a value is missing: write null for none, or '' for an empty text")
    opening = "'\"" if is_text else "'\"[{"
    try:
        if text[0] in opening:
            return _read_closed(text)
        value = _scalar(text)
    except ValueError as exc:
        shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
        remedy = "quote a text that is meant literally, '\"like this\"'"
        raise ConfigError(f"the value {shown} cannot be read: {exc}; {remedy}") from exc
    return text if is_text and value is not None else value


def write_value(value: Any) -> str:
    """A value as an override spells it, so that `read_value` gives it back: [1, 2], true, null, '7'."""
    if isinstance(value, str) and value.isprintable() and _is_plain(value):
        return value
    return dump_yaml(value, is_flow=True).strip()


def _is_plain(text: str) -> bool:
    return bool(text.strip()) and text[0] not in "'\"[{ " and text == text.strip() and _scalar(text) == text


def _scalar(text: str) -> Any:
    loader = _Loader("")
    return loader.construct_object(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text))


def _read_closed(text: str) -> Any:
    """Of text in quotes, brackets or braces. ValueError when something follows them, or an item has no value."""
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError as exc:
        raise ValueError(getattr(exc, "problem", None) or str(exc)) from exc
    except RecursionError as exc:
        raise ValueError("it is nested too deeply") from exc
    if node.end_mark.index < len(text):
        raise ValueError(f"{text[node.end_mark.index :].strip()} follows its end")
    if _has_gap(node):
        raise ValueError("an item in it has no value")
    return load_yaml(text)


def _has_gap(node: yaml.Node) -> bool:
    if isinstance(node, yaml.ScalarNode):
        return node.style is None and not node.value
    return any(_has_gap(part) for item in node.value for part in (item if isinstance(item, tuple) else (item,)))

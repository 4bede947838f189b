"""Sections that name a part: `{name: ..., the part's own keys}`, checked by the settings class that the part brings.

The file of a part travels in its section, so that a section that was pickled finds its classes on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler, PrivateAttr, ValidationError, ValidationInfo
from pydantic_core import CoreSchema, InitErrorDetails, core_schema

from podium.config.base import Settings
from podium.errors import ConfigError
from podium.parts import PartTable, SourceFile, Sources, split_name

S = TypeVar("S", bound=BaseModel)

SOURCES = "sources"
"""Key in pydantic's validation context: the files that a run has stored, as `Sources`."""


class SourcedSettings(Settings):
    """Base of the sections that may name something in a user's file, which travels in the section."""

    _source: SourceFile | None = PrivateAttr(None)

    @property
    def source(self) -> SourceFile | None:
        """The file, where the name is a path."""
        return self._source

    def __reduce__(self) -> tuple[Any, ...]:
        """The file comes first: unpickling it imports the module that this class may be defined in."""
        return _blank, (self._source, type(self)), self.__getstate__()


def _blank(source: SourceFile | None, cls: type[SourcedSettings]) -> SourcedSettings:
    return cls.__new__(cls)


class PartSettings(SourcedSettings):
    """Base of the sections that name a part. A kind of parts has a subclass with the common keys, a part a subclass of that."""

    name: str
    """A name of the table of these parts, `package.module:Name` or `path/to/file.py:Name`."""


@dataclass(frozen=True)
class PartOf:
    """Marks a field, annotated with a kind's `PartSettings`, as a section that names a part of the table.

    The section is a mapping, or the name alone as a text. The value is an object of the part's own settings class.
    """

    table: PartTable

    def __get_pydantic_core_schema__(self, base: type[PartSettings], handler: GetCoreSchemaHandler) -> CoreSchema:
        def validated(value: Any, info: ValidationInfo) -> PartSettings:
            return self.read(value, base, (info.context or {}).get(SOURCES))

        return core_schema.with_info_plain_validator_function(validated, serialization=core_schema.simple_ser_schema("any"))

    def read(self, value: Any, base: type[PartSettings], sources: Sources | None = None) -> PartSettings:
        """The checked section. `sources` are files that a run has stored; ValidationError, as any section."""
        if isinstance(value, PartSettings):
            if value.source is not None:
                return value
            value = {key: getattr(value, key) for key in type(value).model_fields}
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping) or not isinstance(name := self._name(value, base), str):
            return base.model_validate(value)  # which says what is wrong with it
        try:
            source = self.table.source_of(name, sources)
            cls = self._settings(name, source, base)
        except ConfigError as exc:
            raise _at_name(exc, name, base) from exc
        section = cls.model_validate({**value, "name": name}, context={SOURCES: sources})
        section._source = source
        return section

    def settings_class(self, value: Any, base: type[PartSettings], sources: Sources | None = None) -> type[PartSettings]:
        """The settings class for an unchecked section, None for one that is not given; the kind's own where the name is wrong."""
        name = value if isinstance(value, str) else self._name(value or {}, base) if isinstance(value or {}, Mapping) else None
        try:
            return self._settings(name, self.table.source_of(name, sources), base) if isinstance(name, str) else base
        except ConfigError:
            return base

    def _name(self, value: Mapping[str, Any], base: type[PartSettings]) -> Any:
        name = value.get("name")
        return base.model_fields["name"].default if name is None else name

    def _settings(self, name: str, source: SourceFile | None, base: type[PartSettings]) -> type[PartSettings]:
        cls = self.table.settings_of(name, source)
        if cls is None:
            return base
        if not (isinstance(cls, type) and issubclass(cls, base)):
            raise ConfigError(
                f"the settings class of the {self.table.kind} {name!r} must be a subclass of podium.config.{base.__name__}, "
                f"got {cls!r}"
            )
        return cls


def _at_name(exc: ConfigError, name: str, base: type[PartSettings]) -> ValidationError:
    """The error as pydantic's, at the key `name`."""
    details = InitErrorDetails(type="value_error", loc=("name",), input=name, ctx={"error": exc})
    return ValidationError.from_exception_data(base.__name__, [details])


# -- walks ----------------------------------------------------------------------------------------------------------------


def part_sections(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, PartTable, PartSettings]]:
    """Every section of a configuration that names a part, with its dotted path and its table."""
    for key, field in type(settings).model_fields.items():
        value, marker = getattr(settings, key), _marker(field.annotation, field.metadata)
        items = [(f"{prefix}{key}.{place}", item) for place, item in enumerate(value)] if isinstance(value, tuple) else []
        for path, item in items or [(f"{prefix}{key}", value)]:
            if marker is not None and isinstance(item, PartSettings):
                yield path, marker.table, item
            if isinstance(item, BaseModel):
                yield from part_sections(item, f"{path}.")


def sources_of(settings: BaseModel) -> dict[str, SourceFile]:
    """The files of all parts that are named by a path, by their absolute paths."""
    found: dict[str, SourceFile] = {}
    if isinstance(settings, SourcedSettings) and settings.source is not None:
        found[settings.source.path] = settings.source
    for key in type(settings).model_fields:
        value = getattr(settings, key)
        for item in value if isinstance(value, tuple) else (value,):
            found |= sources_of(item) if isinstance(item, BaseModel) else {}
    return found


def with_absolute_names(settings: S) -> S:
    """The same settings, where the name of each part from a file has the file's absolute path."""
    changes: dict[str, Any] = {}
    for key in type(settings).model_fields:
        value = getattr(settings, key)
        if isinstance(value, BaseModel):
            changes[key] = with_absolute_names(value)
        elif isinstance(value, tuple) and any(isinstance(item, PartSettings) for item in value):
            changes[key] = tuple(map(with_absolute_names, value))
    if isinstance(settings, PartSettings) and settings.source is not None:
        changes["name"] = f"{settings.source.path}:{split_name(settings.name)[1]}"
    changed = {key: value for key, value in changes.items() if value != getattr(settings, key)}
    return settings.model_copy(update=changed) if changed else settings


@dataclass(frozen=True)
class Place:
    """A place in the schema beside what unchecked settings have there: walks meet the settings classes of the parts chosen."""

    kind: Any
    """An annotation."""
    value: Any
    sources: Sources | None = None
    metadata: Sequence[Any] = ()

    @property
    def section(self) -> type[BaseModel] | None:
        """The model of a section; None where the place is a single setting."""
        kind, marker = model_in(self.kind), self.marker
        if marker is not None and kind is not None and issubclass(kind, PartSettings):
            return marker.settings_class(self.value, kind, self.sources)
        return kind

    @property
    def marker(self) -> PartOf | None:
        """The mark of a section that names a part."""
        return _marker(self.kind, self.metadata) if model_in(self.kind) else None

    def child(self, key: str | int) -> Place | None:
        """The place of a key, or of an item of a list; None where the schema does not have it."""
        section = self.section
        if section is None:
            items = get_args(self.kind) if get_origin(self.kind) is tuple else ()
            listed = isinstance(key, int) and isinstance(self.value, list | tuple) and key < len(self.value)
            return Place(items[0], self.value[key] if listed else None, self.sources) if items else None
        field = section.model_fields.get(str(key))
        value = self.value.get(key) if isinstance(self.value, Mapping) else None
        return None if field is None else Place(field.annotation, value, self.sources, field.metadata)

    def at(self, path: Sequence[str | int]) -> Place | None:
        """The place below this one."""
        found: Place | None = self
        for key in path:
            found = found.child(key) if found else None
        return found


def _marker(kind: Any, metadata: Sequence[Any]) -> PartOf | None:
    """The mark of a field, or of the items of its tuple."""
    inner = [mark for item in get_args(kind) if get_origin(item) is Annotated for mark in get_args(item)[1:]]
    own = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((mark for mark in (*metadata, *own, *inner) if isinstance(mark, PartOf)), None)


def model_in(kind: Any) -> type[BaseModel] | None:
    """The model that an annotation is, perhaps beside null."""
    if get_origin(kind) is Annotated:
        return model_in(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return next(filter(None, map(model_in, get_args(kind))), None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None

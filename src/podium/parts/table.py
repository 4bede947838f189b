"""`PartTable`: from the name of a part to the class or function that it means, in the driver and in the ranks alike.

A name is a row of the table, `package.module:Name` or `path/to/file.py:Name`. What is not here: the settings of parts
(`podium.config`), and the tables themselves (`tables`).
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from podium.errors import ConfigError, MissingExtraError, nearest
from podium.parts.source import SourceFile, Sources, absolute_path


@dataclass(frozen=True)
class Row:
    """One part of ours. A table may hold its `target` alone, where the rest has its defaults."""

    target: str
    """`package.module:Name` of the class or function; its module is imported when the part is used."""
    settings: str | None = None
    """`package.module:Name` of its settings class, where importing the part's own module takes long. None: see
    `PartTable.settings_of`."""
    package: str | None = None
    """A library that the part needs besides Podium's own dependencies, by the name that is imported."""
    extra: str | None = None
    """Podium's extra that installs the library."""


@dataclass(frozen=True)
class PartTable:
    """The parts of one kind that are ours, and how a user's own are found and checked."""

    kind: str
    """What the parts are, in messages: "rollout engine"."""
    rows: Mapping[str, str | Row]
    base: str | None = None
    """`package.module:Name` of the class, or runtime-checkable Protocol, that a part must be a subclass of. None: a part must be
    callable."""
    others: Row | None = None
    """The part that takes every other plain name, such as the names of a library's datasets. None: other names are unknown."""
    _ours: Mapping[str, Row] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rows = {name: row if isinstance(row, Row) else Row(row) for name, row in self.rows.items()}
        object.__setattr__(self, "_ours", rows)

    def resolve(self, name: str, source: SourceFile | None = None) -> Any:
        """The class or function. `source` is the text of the file that the name has a path of; without it the file is read.

        ConfigError where nothing of the name can be had, or where it is not of this kind; MissingExtraError (which is one too)
        with the pip line where a library is not installed.
        """
        what = f"the {self.kind} {name!r}"
        if row := self.row(name):
            if missing := self.missing_extra(name):
                raise missing
            return load(row.target, what)
        place, attribute = self._outside(name)
        module = _module(place, what, source)
        part = _attribute(module, attribute, place, what, self._names(module))
        self._check(part, module, what)
        return part

    def settings_of(self, name: str, source: SourceFile | None = None) -> type[Any] | None:
        """The part's settings class: that of its row, or else its attribute `Settings`; None where it does not have one."""
        row = self.row(name)
        if row is not None and row.settings is not None:
            found: type[Any] = load(row.settings, f"the settings of the {self.kind} {name!r}")
            return found
        return getattr(self.resolve(name, source), "Settings", None)

    def source_of(self, name: str, sources: Sources | None = None) -> SourceFile | None:
        """The file of a name that has a path: as it is in `sources`, or else as it stands; None for other names."""
        if self.row(name):
            return None
        place, _ = self._outside(name)
        if not _is_file(place):
            return None
        return (sources or {}).get(absolute_path(place)) or SourceFile.read(place)

    def place_of(self, name: str) -> str:
        """Where the part is, for people: the target of a row, or else the name itself."""
        row = self.row(name)
        return row.target if row else name

    def row(self, name: str) -> Row | None:
        """The row of a part of ours; None for a module's or a file's name, and for one that is unknown."""
        return self._ours.get(name) or (None if ":" in name or "." in name else self.others)

    def missing_extra(self, name: str) -> MissingExtraError | None:
        """The error for a row whose library is not installed; imports nothing."""
        row = self.row(name)
        if row is None or row.package is None or find_spec(row.package) is not None:
            return None
        return MissingExtraError(row.package.replace("_", "-"), row.extra or row.package, f"the {self.kind} {name!r}")

    def _outside(self, name: str) -> tuple[str, str]:
        """A name that is not in the table as place and attribute."""
        known = f"Known: {', '.join(sorted(self._ours)) or 'none'}; your own: package.module:Name or path/to/file.py:Name"
        if ":" not in name and "." not in name:
            raise ConfigError(f"unknown {self.kind} {name!r}{nearest(name, self._ours) or '.'} {known}")
        place, attribute = split_name(name)
        if not place or not attribute.isidentifier():
            raise ConfigError(f"the {self.kind} must be package.module:Name or path/to/file.py:Name, got {name!r}. {known}")
        return place, attribute

    def _names(self, module: ModuleType) -> list[str]:
        """The module's own public names of this kind."""
        own = {name: value for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
        return sorted(name for name, value in own.items() if not name.startswith("_") and self._objection(value) is None)

    def _check(self, part: Any, module: ModuleType, what: str) -> None:
        if objection := self._objection(part):
            fitting = ", ".join(self._names(module))
            raise ConfigError(f"{what} {objection}" + (f"; of this kind the module has: {fitting}" if fitting else ""))

    def _objection(self, part: Any) -> str | None:
        """Why an object is not a part of this kind; None where it is."""
        if self.base is None:
            return None if callable(part) else f"must be callable, got {part!r}"
        base = load(self.base, f"the base class of each {self.kind}")
        if not (isinstance(part, type) and issubclass(part, base)):
            return f"must be a subclass of {self.base.replace(':', '.')}, got {part!r}"
        if inspect.isabstract(part):
            missing: frozenset[str] = getattr(part, "__abstractmethods__", frozenset())
            return f"is abstract: it must define {', '.join(sorted(missing))}"
        return None


def split_name(name: str) -> tuple[str, str]:
    """Place and attribute of a name, also of `package.module.Name`; empty texts for what is not there.

    >>> split_name("my/file.py:Mine"), split_name("package.module:Mine"), split_name("package.module.Mine"), split_name("a.py")
    (('my/file.py', 'Mine'), ('package.module', 'Mine'), ('package.module', 'Mine'), ('a.py', ''))
    """
    if ":" not in name and name.endswith(".py"):
        return name, ""
    place, _, attribute = name.rpartition(":" if ":" in name else ".")
    return place, attribute


def load(target: str, what: str) -> Any:
    """What `package.module:Name` means. ConfigError, with the cause, says `what` could not be had."""
    place, attribute = split_name(target)
    module = _module(place, what, None)
    return _attribute(module, attribute, place, what, [name for name in vars(module) if not name.startswith("_")])


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _module(place: str, what: str, source: SourceFile | None) -> ModuleType:
    try:
        if _is_file(place):
            return (source or SourceFile.read(place)).module()
        if not f"{place}.".startswith("podium."):
            _look_in_working_directory()
        return import_module(place)
    except ConfigError as exc:
        raise ConfigError(f"{what}: {exc}") from exc
    except ModuleNotFoundError as exc:
        if exc.name is not None and f"{place}.".startswith(f"{exc.name}."):
            raise ConfigError(
                f"{what}: no module {exc.name!r} in {Path.cwd()} or where Python looks for packages; for a file write "
                "path/to/file.py:Name"
            ) from exc
        raise ConfigError(f"{what}: {place} imports {exc.name!r}, which is not installed here") from exc
    except (Exception, SystemExit) as exc:  # the rim of a user's module: its own error is the cause
        raise ConfigError(f"{what}: importing {place} failed: {type(exc).__name__}: {exc}{_line(exc)}") from exc


def _line(exc: BaseException) -> str:
    """Where an import failed; a SyntaxError says so itself."""
    last = traceback.extract_tb(exc.__traceback__)[-1]
    return "" if isinstance(exc, SyntaxError) else f" ({Path(last.filename).name}, line {last.lineno})"


def _look_in_working_directory() -> None:
    """As `python` does for a script: a package beside the run can be imported, in the ranks too."""
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)


def _attribute(module: ModuleType, attribute: str, place: str, what: str, names: list[str]) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError:
        there = f" It has: {', '.join(names)}" if names else ""
        raise ConfigError(f"{what}: {place} does not have {attribute!r}{nearest(attribute, names) or '.'}{there}") from None

"""A user's Python file as a value: its path and its text, imported under a name made of the text's SHA-256.

A file that travels as text needs to exist on no other machine, and an edit of it after the start changes no run.
"""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from podium.errors import ConfigError

MODULE_PREFIX = "podium_part_"
"""Of the names of modules that are imported from files."""


@dataclass(frozen=True)
class SourceFile:
    """The text of a Python file. Unpickling imports it, so that objects of its classes can be unpickled after it."""

    path: str
    """Where the file was read; absolute."""
    text: str

    @classmethod
    def read(cls, path: str) -> SourceFile:
        """The file as it is now. ConfigError where it cannot be read."""
        absolute = absolute_path(path)
        try:
            return cls(absolute, Path(absolute).read_bytes().decode())
        except FileNotFoundError:
            where = "" if Path(path).expanduser().is_absolute() else f" (relative to {Path.cwd()})"
            raise ConfigError(f"no such file: {path}{where}") from None
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{path} cannot be read as text in UTF-8: {exc}") from exc

    @cached_property
    def sha256(self) -> str:
        """Of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def module(self) -> ModuleType:
        """The text as a module, which a process imports once. What the text raises comes through.

        Its name begins with MODULE_PREFIX and holds the hash. A traceback and a debugger show the lines of the text.
        """
        name = MODULE_PREFIX + self.sha256[:16]
        if name not in sys.modules:
            linecache.cache[self.path] = (len(self.text), None, self.text.splitlines(keepends=True), self.path)
            module = module_from_spec(ModuleSpec(name, _Loader(self), origin=self.path))
            module.__file__ = self.path
            sys.modules[name] = module  # first, as `import` does: dataclasses and pickle look a module up by its name
            try:
                exec(compile(self.text, self.path, "exec"), vars(module))
            except BaseException:
                del sys.modules[name]
                raise
        return sys.modules[name]

    def __reduce__(self) -> tuple[Any, ...]:
        return _imported, (self.path, self.text)


Sources: TypeAlias = Mapping[str, SourceFile]
"""Files by their absolute path, as a run has stored them; a file that is not in it is read where it stands."""


class _Loader(InspectLoader):
    """Where Python looks for the text of a module that has no file."""

    def __init__(self, source: SourceFile) -> None:
        self._source = source

    def get_source(self, fullname: str) -> str:
        return self._source.text


def absolute_path(path: str) -> str:
    """The path with its folder resolved; a file keeps its own name."""
    given = Path(path).expanduser()
    return str(given.parent.resolve() / given.name)


def _imported(path: str, text: str) -> SourceFile:
    source = SourceFile(path, text)
    source.module()
    return source

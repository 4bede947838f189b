"""Training engines by name; users may add their own."""

from __future__ import annotations

from importlib import import_module

from podium.engines.base import BaseEngine
from podium.errors import RegistrationError, unknown_name


class EngineRegistry:
    """Name of a strategy -> engine class. Ours are listed as "module:Class" and imported when chosen."""

    _classes: dict[str, str | type[BaseEngine]] = {"fsdp2": "podium.engines.fsdp2:FSDP2Engine"}  # noqa: RUF012 - a registry

    @classmethod
    def register(cls, name: str, engine: type[BaseEngine], *, override: bool = False) -> None:
        """Add an engine under a new name. RegistrationError when the name is taken (unless `override`) or no engine is given."""
        if not (isinstance(engine, type) and issubclass(engine, BaseEngine)):
            raise RegistrationError(f"an engine is a subclass of BaseEngine, got {engine!r}")
        if name in cls._classes and not override:
            taken_by = cls._classes[name]
            raise RegistrationError(f"the engine name {name!r} is taken by {taken_by!r}; pass override=True to replace it")
        cls._classes[name] = engine

    @classmethod
    def get(cls, name: str) -> type[BaseEngine]:
        """The engine class of a strategy. RegistrationError lists the known names."""
        if name not in cls._classes:
            raise RegistrationError(unknown_name("engine", name, cls._classes))
        entry = cls._classes[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = cls._classes[name] = getattr(import_module(module), attribute)
        return entry

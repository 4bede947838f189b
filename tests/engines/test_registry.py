"""Engines by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from podium.engines import BaseEngine, EngineRegistry
from podium.engines.fsdp2 import FSDP2Engine
from podium.errors import RegistrationError


@pytest.fixture(autouse=True)
def names_put_back() -> Iterator[None]:
    before = dict(EngineRegistry._classes)
    yield
    EngineRegistry._classes.clear()
    EngineRegistry._classes.update(before)


class Mine(FSDP2Engine):
    pass


def test_ours_is_imported_when_chosen() -> None:
    assert EngineRegistry.get("fsdp2") is FSDP2Engine
    assert EngineRegistry.get("fsdp2") is FSDP2Engine
    assert issubclass(FSDP2Engine, BaseEngine)


def test_an_unknown_name_is_answered_with_the_nearest_and_all() -> None:
    EngineRegistry.register("mine", Mine)
    with pytest.raises(RegistrationError, match=r"unknown engine 'fsdp'; did you mean 'fsdp2'.* Known: fsdp2, mine"):
        EngineRegistry.get("fsdp")


def test_a_name_is_taken_once_unless_replaced_on_purpose() -> None:
    EngineRegistry.register("mine", Mine)
    assert EngineRegistry.get("mine") is Mine
    with pytest.raises(RegistrationError, match=r"'mine' is taken by .*Mine.*; pass override=True"):
        EngineRegistry.register("mine", FSDP2Engine)
    EngineRegistry.register("fsdp2", Mine, override=True)
    assert EngineRegistry.get("fsdp2") is Mine


@pytest.mark.parametrize("engine", [int, "podium.engines.fsdp2:FSDP2Engine", None])
def test_only_engines_are_registered(engine: type[BaseEngine]) -> None:
    with pytest.raises(RegistrationError, match="an engine is a subclass of BaseEngine, got"):
        EngineRegistry.register("bad", engine)
    with pytest.raises(RegistrationError, match="unknown engine 'bad'"):
        EngineRegistry.get("bad")


def test_a_broken_module_says_what_is_missing() -> None:
    """D8: the import error of the backend itself comes through, not "unknown engine"."""
    EngineRegistry._classes["broken"] = "podium_no_such_module:Engine"
    with pytest.raises(ImportError, match="podium_no_such_module"):
        EngineRegistry.get("broken")

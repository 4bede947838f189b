from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import pytest

from podium.compat.verl import ClassWithInitArgs
from podium.errors import RegistrationError
from podium.single_controller import (
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
)

anything = cast(Any, Init)  # for calls that a type checker would refuse


class Plain(Worker):
    def __init__(self, x: int = 1) -> None:
        self.x = x


class Half(Worker, ABC):
    @abstractmethod
    def update(self) -> None: ...

    @property
    @abstractmethod
    def size(self) -> int: ...


class Whole(Half):
    size = 2

    def update(self) -> None: ...


class NoSignature:
    __init__ = cast(Any, {}.update)  # a function of C whose signature Python does not know


class FalseSignature:
    def __init__(self, x: int) -> None:
        self.x = x

    cast(Any, __init__).__signature__ = "none"


@pytest.mark.parametrize("cls", [3, None, "Plain", len, Plain(), [Plain]])
@pytest.mark.parametrize("make", [Init, ClassWithInitArgs])
def test_anything_but_a_class_is_refused(make: Any, cls: Any):
    with pytest.raises(RegistrationError, match=r"a group must be made of a class, got .*: give the class itself"):
        make(cls)


def test_the_arguments_of_an_init_are_not_dropped():
    with pytest.raises(RegistrationError, match="got an Init of Plain, whose arguments would be lost"):
        anything(Init(Plain, 3))


def test_an_abstract_class_is_refused_with_what_it_lacks():
    makers = (anything, lambda cls: WorkerGroup(ResourcePool([1]), cls), lambda cls: create_colocated_worker_cls({"half": cls}))
    for make in makers:
        with pytest.raises(RegistrationError, match=r"Half must not be abstract: give a subclass that implements size, update"):
            make(Half)
    assert anything(Whole)().size == 2


def test_a_constructor_without_a_signature_is_left_to_the_ranks():
    assert anything(NoSignature, [("a", 1)]).args == ([("a", 1)],)
    assert anything(FalseSignature, 3)().x == 3


@pytest.mark.parametrize("args", [(1, 2), ()])
def test_arguments_that_do_not_fit_raise_at_once(args: tuple[int, ...]):
    class Needs(Worker):
        def __init__(self, x: int) -> None: ...

    with pytest.raises(TypeError, match=r"Needs\(\): (too many|missing a required)"):
        anything(Needs, *args)

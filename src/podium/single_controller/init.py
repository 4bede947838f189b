"""`Init`: a worker class with the arguments of its constructor, which every rank calls."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

from podium.errors import RegistrationError

P = ParamSpec("P")
W = TypeVar("W")


class Init(Generic[W]):
    """A worker class with the arguments of its constructor. TypeError at once if they do not fit.

    The class is a subclass of `Worker`, or any class whose methods are decorated with `@register`; one that `ray.remote` has
    wrapped is unwrapped. RegistrationError, a TypeError too, unless it is a class that can be instantiated.
    """

    def __init__(self, cls: Callable[P, W], /, *args: P.args, **kwargs: P.kwargs) -> None:
        if isinstance(cls, Init):
            name = cls.cls.__name__
            raise RegistrationError(
                f"Init must be given a class, got an Init of {name}, whose arguments would be lost: use that Init itself"
            )
        self.cls: type[Any] = class_of(cls)
        _check_abstract(self.cls)
        _check_arguments(self.cls, args, kwargs)
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self.options: dict[str, Any] = {}
        """Options for one runtime: on Ray, those of the ranks' actors."""

    def __call__(self) -> W:
        """Construct the worker here."""
        return cast(W, self.cls(*self.args, **self.kwargs))

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """The same class and arguments with further options; this object stays as it is."""
        made = copy.copy(self)
        made.options = {**self.options, **options}
        return made


def class_of(cls: object) -> type[Any]:
    """The class itself, from an `Init` or from the result of `ray.remote`. RegistrationError for anything else."""
    if isinstance(cls, Init):
        return cls.cls
    modified = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", None)  # the result of ray.remote
    original = getattr(modified, "__ray_actor_class__", cls)
    if not isinstance(original, type):
        raise RegistrationError(
            f"a group must be made of a class, got {cls!r}: give the class itself, with its arguments in an Init"
        )
    return original


def _check_abstract(cls: type[Any]) -> None:
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise RegistrationError(f"{cls.__name__} must not be abstract: give a subclass that implements {missing}")


def _check_arguments(cls: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(cls.__init__)
    except (TypeError, ValueError):
        return  # a class written in C, or an invalid __signature__: the ranks report arguments that do not fit
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{cls.__name__}(): {error}") from None

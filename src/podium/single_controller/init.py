"""`Init`: a worker class with its constructor's arguments, which every rank will construct."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, Self, TypeVar, cast

P = ParamSpec("P")
W = TypeVar("W")


class Init(Generic[W]):
    """A worker class with its constructor's arguments. TypeError at once when they do not fit.

    The class is a subclass of `Worker`, or any class whose methods are decorated with `@register`; one that `ray.remote`
    has wrapped is unwrapped.
    """

    def __init__(self, cls: Callable[P, W], /, *args: P.args, **kwargs: P.kwargs) -> None:
        self.cls: type[Any] = class_of(cls)
        try:
            inspect.signature(self.cls.__init__).bind(None, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.cls.__name__}(): {error}") from None
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self.options: dict[str, Any] = {}
        """What only one runtime understands: on Ray, options of the ranks' actors."""

    def __call__(self) -> W:
        """Construct the worker here."""
        return cast(W, self.cls(*self.args, **self.kwargs))

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """The same class and arguments with further options; this object stays as it is."""
        made = copy.copy(self)
        made.options = {**self.options, **options}
        return made


def class_of(cls: object) -> type[Any]:
    """The class itself, of an `Init` or of what `ray.remote` has made of it. TypeError for anything else."""
    if isinstance(cls, Init):
        return cls.cls
    modified = getattr(getattr(cls, "__ray_metadata__", None), "modified_class", None)  # what ray.remote made of a class
    original = getattr(modified, "__ray_actor_class__", cls)
    if not isinstance(original, type):
        raise TypeError(f"a group is made of a class, got {cls!r}")
    return original

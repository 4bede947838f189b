"""What an actor's entry is called with: positional arguments, of which only as many are sent as say something.

Ray binds a call to the entry's signature and looks at each argument, so an entry takes `*message`, and an empty call nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from podium.single_controller.runtime.payload import Packed, unpack
from podium.single_controller.runtime.sequencing import SequenceNumber


class CallMessage(NamedTuple):
    """A call's arguments on their way to a rank."""

    packed: Packed | None = None
    """All of them as one piece; None where there are none, or where only Ray may carry them."""
    number: SequenceNumber | None = None
    bodies: tuple[Any, ...] = ()
    """References of rows that the rank reads from where they lie."""
    names: tuple[str, ...] = ()
    """Of the last of the values: the keyword arguments among them."""
    values: tuple[Any, ...] = ()
    """What only Ray may carry: arguments with references, which Ray finds and puts in their places."""

    @classmethod
    def from_positional(cls, sent: tuple[Any, ...]) -> CallMessage:
        """What `to_positional` gave."""
        return cls._make((*sent[:4], sent[4:])) if len(sent) > 4 else cls(*sent)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Private ones: what Ray hands out may be read-only."""
        if self.packed is not None:
            return cast(tuple[tuple[Any, ...], dict[str, Any]], unpack(self.packed))
        if not self.values:
            return (), {}
        values = copy.deepcopy(self.values)
        positional = len(values) - len(self.names)
        return values[:positional], dict(zip(self.names, values[positional:], strict=True))


EMPTY = CallMessage()


def to_positional(
    packed: Packed | None,
    number: SequenceNumber | None,
    bodies: tuple[Any, ...],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[Any, ...]:
    """A message as the positional arguments of an entry."""
    if args or kwargs:
        return (None, number, bodies, tuple(kwargs), *args, *kwargs.values())
    if bodies:
        return packed, number, bodies
    if number is not None:
        return packed, number
    return () if packed is None else (packed,)

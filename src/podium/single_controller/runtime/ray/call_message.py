"""What an actor's entry is called with: positional arguments, of which only as many are sent as are needed.

Ray binds a call to the entry's signature and looks at each argument. So an entry takes `*message`, and an empty call nothing.
See `payload` for how values are packed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import ray

from podium.errors import DispatchError
from podium.single_controller.rank.naming import ranks_named
from podium.single_controller.rank.user_code import called_as
from podium.single_controller.runtime.base import RankCall
from podium.single_controller.runtime.payload import IN_MESSAGE_BYTES, HoldsReference, Packed, pack, unpack
from podium.single_controller.runtime.ray.store import encode_argument
from podium.single_controller.runtime.sequencing import SequenceNumber


class CallMessage(NamedTuple):
    """A call's arguments on their way to a rank."""

    packed: Packed | None = None
    """All of them as one piece; None where there are none, or where only Ray may carry them."""
    number: SequenceNumber | None = None
    blocks: tuple[Any, ...] = ()
    """References of rows that the rank reads from where they lie."""
    names: tuple[str, ...] = ()
    """The keyword arguments among the values, which come last."""
    values: tuple[Any, ...] = ()
    """What only Ray may carry: arguments with references, which Ray finds and puts in their places."""

    @classmethod
    def of(cls, call: RankCall) -> CallMessage:
        """The message of a call. What is large and goes to several ranks is stored once.

        DispatchError, with ranks and argument, for what cannot be sent.
        """
        if not call.args and not call.kwargs:
            return EMPTY
        refs: list[Any] = []
        args = tuple([encode_argument(value, refs) for value in call.args])
        kwargs = {name: encode_argument(value, refs) for name, value in call.kwargs.items()}
        try:
            return cls.packing(args, kwargs, blocks=tuple(refs), is_shared=len(call.ranks) > 1)
        except Exception as error:  # a foreign class may raise anything when it is pickled
            what = f"{_what_cannot_be_sent(call)} of {called_as(call.role, call.method)!r}"
            raise DispatchError(f"{what} cannot be sent to {ranks_named(call.ranks)}: {error}") from error

    @classmethod
    def packing(
        cls,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        blocks: tuple[Any, ...] = (),
        is_shared: bool = True,
    ) -> CallMessage:
        """These arguments as one piece if that can be, stored once where several ranks share it."""
        try:
            packed: Any = pack((args, kwargs), is_reference)
        except HoldsReference:
            return cls(None, None, blocks, tuple(kwargs), (*args, *kwargs.values()))
        is_small = isinstance(packed, bytes) and len(packed) <= IN_MESSAGE_BYTES
        once: Any = ray.put(packed) if is_shared and not is_small else packed
        return cls(once, None, blocks)

    @classmethod
    def from_positional(cls, sent: tuple[Any, ...]) -> CallMessage:
        """The inverse of `to_positional`."""
        return cls._make((*sent[:4], sent[4:])) if len(sent) > 4 else cls(*sent)

    def to_positional(self, number: SequenceNumber | None = None) -> tuple[Any, ...]:
        """The message as the positional arguments of an entry, with its number on this rank."""
        if self.values:
            return (None, number, self.blocks, self.names, *self.values)
        if self.blocks:
            return self.packed, number, self.blocks
        if number is not None:
            return self.packed, number
        return () if self.packed is None else (self.packed,)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Private copies: Ray may hand out read-only memory."""
        if self.packed is not None:
            return cast(tuple[tuple[Any, ...], dict[str, Any]], unpack(self.packed))
        if not self.values:
            return (), {}
        values = copy.deepcopy(self.values)
        positional = len(values) - len(self.names)
        return values[:positional], dict(zip(self.names, values[positional:], strict=True))


EMPTY = CallMessage()


def is_reference(value: object) -> bool:
    """Whether only Ray may carry the value, because Ray counts who has it."""
    return isinstance(value, ray.ObjectRef | ray.actor.ActorHandle)


def _what_cannot_be_sent(call: RankCall) -> str:
    for name, value in [*enumerate(call.args), *call.kwargs.items()]:
        try:
            pack(value, is_reference)
        except Exception:  # this is the one
            return f"argument {name!r} ({type(value).__name__})"
    return "what the arguments share"

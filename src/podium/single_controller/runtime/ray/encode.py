"""What an actor's entry is called with. See `payload` for how values are packed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import ray

from podium.errors import DispatchError
from podium.single_controller.rank.naming import ranks_named
from podium.single_controller.rank.user_code import called_as
from podium.single_controller.runtime.base import RankCall
from podium.single_controller.runtime.payload import IN_MESSAGE_BYTES, HoldsReference, is_plain, pack
from podium.single_controller.runtime.ray.actor import is_reference
from podium.single_controller.runtime.ray.call_message import to_positional
from podium.single_controller.runtime.ray.store import encode_argument


class EncodedCall(NamedTuple):
    """Nothing, one packed piece, or arguments that only Ray may carry."""

    packed: Any = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})  # a default that all share, and nobody can fill
    bodies: tuple[Any, ...] = ()
    """References of rows that the rank reads from where they lie."""

    @classmethod
    def of(cls, call: RankCall) -> Self:
        """What is sent for `call`. What is large and shared by several ranks is stored once.

        DispatchError, with ranks and argument, for what cannot travel.
        """
        if not call.args and not call.kwargs:
            return cls()
        refs: list[Any] = []
        args = tuple([encode_argument(value, refs, zero_copy=call.zero_copy) for value in call.args])
        kwargs = {name: encode_argument(value, refs, zero_copy=call.zero_copy) for name, value in call.kwargs.items()}
        try:
            packed = pack((args, kwargs), is_reference, shared=call.zero_copy)
        except HoldsReference:
            return cls(args=args, kwargs=kwargs, bodies=tuple(refs))
        except Exception as error:  # whatever a foreign class does when it is pickled
            what = f"{_what_cannot_travel(call)} of {called_as(call.role, call.method)!r}"
            raise DispatchError(f"{what} cannot be sent to {ranks_named(call.ranks)}: {error}") from error
        return cls(stored_once(packed) if len(call.ranks) > 1 else packed, bodies=tuple(refs))

    @property
    def holds_references(self) -> bool:
        """Whether Ray has to find arguments before the call can start."""
        return bool(self.args or self.kwargs)


def encoding_cannot_fail(call: RankCall) -> bool:
    """Whether nothing can go wrong when the arguments are packed: then the first ranks may begin while others are still sent."""
    return is_plain((call.args, call.kwargs))


def constructor_message(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The message with a constructor's arguments, one for all ranks."""
    try:
        return to_positional(stored_once(pack((args, kwargs), is_reference)), None, (), (), {})
    except HoldsReference:
        return to_positional(None, None, (), args, kwargs)


def stored_once(packed: Any) -> Any:
    """What is large as a reference, so that Ray stores it once and not for every rank."""
    is_small = isinstance(packed, bytes) and len(packed) <= IN_MESSAGE_BYTES
    return packed if is_small else ray.put(packed)


def _what_cannot_travel(call: RankCall) -> str:
    for name, value in [*enumerate(call.args), *call.kwargs.items()]:
        try:
            pack(value, is_reference)
        except Exception:  # this is the one
            return f"argument {name!r} ({type(value).__name__})"
    return "what the arguments share"

"""`@register`: how a method's data is split and joined is written beside the method, not at the call.

The decorator returns the very function it was given, with one frozen record attached. So the method keeps its signature,
stays callable inside its worker, and travels like any function (Ray drops descriptor objects from actor classes).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from podium.errors import RegistrationError
from podium.single_controller.dispatch import BatchMode, DispatchMode, Execute, ListMode, route_of

if TYPE_CHECKING:
    from podium.single_controller.typed_calls import RegisterList, RegisterListFuture, RegisterOne, RegisterOneFuture

MAGIC_ATTR = "attrs_3141562937"  # verl's name, which ported code looks up
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class Registration:
    """How a group calls a method."""

    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool


@overload
def register(
    *, dispatch_mode: ListMode, execute_mode: Literal[Execute.ALL] = Execute.ALL, blocking: Literal[True] = True
) -> RegisterList: ...
@overload
def register(
    *, dispatch_mode: ListMode, execute_mode: Literal[Execute.ALL] = Execute.ALL, blocking: Literal[False]
) -> RegisterListFuture: ...
@overload
def register(
    *, dispatch_mode: ListMode, execute_mode: Literal[Execute.RANK_ZERO], blocking: Literal[True] = True
) -> RegisterOne: ...
@overload
def register(
    *, dispatch_mode: ListMode, execute_mode: Literal[Execute.RANK_ZERO], blocking: Literal[False]
) -> RegisterOneFuture: ...
@overload
def register(
    *, dispatch_mode: BatchMode, execute_mode: Literal[Execute.ALL] = Execute.ALL, blocking: Literal[True] = True
) -> RegisterOne: ...
@overload
def register(
    *, dispatch_mode: BatchMode, execute_mode: Literal[Execute.ALL] = Execute.ALL, blocking: Literal[False]
) -> RegisterOneFuture: ...
def register(*, dispatch_mode: DispatchMode, execute_mode: Execute = Execute.ALL, blocking: bool = True) -> Any:
    """Make a method of a `Worker`, plain or async, callable on a group of them.

    dispatch_mode: how arguments are split and results joined. execute_mode: which ranks run it. blocking: whether the
    group waits for the result or returns a `GroupFuture`. RegistrationError, at decoration, when these cannot work.
    """
    _check_modes(dispatch_mode, execute_mode)

    def attach(method: FunctionT) -> FunctionT:
        _check_method(method, dispatch_mode)
        setattr(method, MAGIC_ATTR, Registration(dispatch_mode, execute_mode, blocking))
        return method

    return attach


def registration_of(method: object) -> Registration | None:
    """The record that `register` attached, if it did."""
    return getattr(method, MAGIC_ATTR, None)


def _check_modes(dispatch_mode: object, execute_mode: object) -> None:
    if not isinstance(dispatch_mode, DispatchMode):
        raise RegistrationError(f"dispatch_mode is a member of Dispatch, got {dispatch_mode!r}")
    if not isinstance(execute_mode, Execute):
        raise RegistrationError(f"execute_mode is a member of Execute, got {execute_mode!r}")
    route_of(dispatch_mode)
    if isinstance(dispatch_mode, BatchMode) and execute_mode is not Execute.ALL:
        raise RegistrationError(f"{dispatch_mode.name} splits rows over all ranks, so it cannot run on {execute_mode.name} only")


def _check_method(method: object, dispatch_mode: DispatchMode) -> None:
    if not inspect.isfunction(method):
        raise RegistrationError(f"@register goes on a plain method, not on a property, static or class method; got {method!r}")
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise RegistrationError(f"{method.__qualname__} must take self first")
    takes_batch = any(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters[1:])
    if isinstance(dispatch_mode, BatchMode) and not takes_batch:
        raise RegistrationError(f"{method.__qualname__} takes no batch, but {dispatch_mode.name} splits one over the ranks")

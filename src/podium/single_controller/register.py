"""`@register` declares beside a method, not at its calls, how its data is split and joined.

The decorator returns the function itself, with one frozen record attached. So the method keeps its signature, can be called
inside its worker, and is pickled like any function (Ray drops descriptor objects from actor classes).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from podium.errors import RegistrationError
from podium.single_controller.routing.dispatch import route_of
from podium.single_controller.routing.modes import (
    BatchMode,
    DirectMode,
    Dispatch,
    DispatchMode,
    DispatchPair,
    Execute,
    InPlaceMode,
    ListMode,
    RankZeroMode,
    UserMode,
    check_functions,
)
from podium.single_controller.routing.registration import MAGIC_ATTR, Registration

if TYPE_CHECKING:
    from podium.single_controller.typed_calls import (
        RegisterAny,
        RegisterDirect,
        RegisterList,
        RegisterListFuture,
        RegisterOne,
        RegisterOneFuture,
        RegisterReference,
    )

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class RowOptions(TypedDict, total=False):
    """Options of `register` for the rows that a method takes and returns."""

    reads: Sequence[str]
    writes: Sequence[str]


@overload
def register(
    dispatch_mode: ListMode = ...,
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **rows: Unpack[RowOptions],
) -> RegisterList: ...
@overload
def register(
    dispatch_mode: ListMode = ...,
    execute_mode: Literal[Execute.ALL] = ...,
    *,
    blocking: Literal[False],
    materialize_futures: bool = ...,
    **rows: Unpack[RowOptions],
) -> RegisterListFuture: ...
@overload
def register(
    dispatch_mode: ListMode = ...,
    *,
    execute_mode: Literal[Execute.RANK_ZERO],
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **rows: Unpack[RowOptions],
) -> RegisterOne: ...
@overload
def register(
    dispatch_mode: ListMode = ...,
    *,
    execute_mode: Literal[Execute.RANK_ZERO],
    blocking: Literal[False],
    materialize_futures: bool = ...,
    **rows: Unpack[RowOptions],
) -> RegisterOneFuture: ...
@overload
def register(
    dispatch_mode: BatchMode,
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: bool = ...,
    materialize_futures: bool = ...,
    *,
    by_reference: Literal[True],
    **rows: Unpack[RowOptions],
) -> RegisterReference: ...
@overload
def register(
    dispatch_mode: BatchMode | RankZeroMode,
    execute_mode: Literal[Execute.ALL] = ...,
    blocking: Literal[True] = ...,
    materialize_futures: bool = ...,
    **rows: Unpack[RowOptions],
) -> RegisterOne: ...
@overload
def register(
    dispatch_mode: BatchMode | RankZeroMode,
    execute_mode: Literal[Execute.ALL] = ...,
    *,
    blocking: Literal[False],
    materialize_futures: bool = ...,
    **rows: Unpack[RowOptions],
) -> RegisterOneFuture: ...
@overload
def register(dispatch_mode: DirectMode) -> RegisterDirect: ...
@overload
def register(
    dispatch_mode: UserMode | DispatchPair,
    execute_mode: Execute = ...,
    blocking: bool = ...,
    materialize_futures: bool = ...,
    **rows: Unpack[RowOptions],
) -> RegisterAny: ...
def register(
    dispatch_mode: DispatchMode | DispatchPair = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    by_reference: bool = False,
    **rows: Unpack[RowOptions],
) -> Any:
    """Make a method of a worker, plain or async, callable on a group of them.

    dispatch_mode: how arguments are split and results joined: a member of `Dispatch`, a mesh's mode, or a user's own pair
    of functions, `{"dispatch_fn": ..., "collect_fn": ...}` (see `Route`). execute_mode: which ranks run it. blocking: whether
    the group waits for the result or returns a future at once. materialize_futures: whether a future among the arguments is
    replaced by its value before dispatch; otherwise `dispatch_fn` gets the future. by_reference: in batch modes, the rows stay
    where they were made, and the group returns a `DataProtoFuture`.

    reads and writes name the columns that the method needs and makes; each call checks them.
    RegistrationError, at decoration, if these contradict each other or the method's signature.
    """
    flags = {"blocking": blocking, "materialize_futures": materialize_futures, "by_reference": by_reference}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise RegistrationError(f"{name} must be True or False, got {flag!r}")
    mode = _checked_mode(dispatch_mode)
    execute = _checked_execute(execute_mode, mode)
    if by_reference and not isinstance(mode, BatchMode):
        raise RegistrationError(
            f"by_reference needs a batch mode, got {mode.name}, which does not collect rows: leave it out or change the mode"
        )
    columns = _checked_columns(mode, rows)

    def attach(method: FunctionT) -> FunctionT:
        _check_method(method, mode)
        is_async = inspect.iscoroutinefunction(method)
        setattr(method, MAGIC_ATTR, Registration(mode, execute, blocking, materialize_futures, is_async, by_reference, **columns))
        return method

    return attach


def _checked_mode(mode: object) -> DispatchMode:
    if isinstance(mode, dict):
        return _in_place(mode)
    if not isinstance(mode, DispatchMode):
        hint = "; write @register() with parentheses" if inspect.isfunction(mode) else ""
        raise RegistrationError(
            f"dispatch_mode must be a member of Dispatch or a dict with 'dispatch_fn' and 'collect_fn', got {mode!r}{hint}"
        )
    route_of(mode)
    return mode


def _checked_columns(mode: DispatchMode, options: RowOptions) -> dict[str, tuple[str, ...] | None]:
    unknown = set(options) - set(RowOptions.__annotations__)
    if unknown:
        raise TypeError(f"register() got unexpected keyword arguments: {', '.join(sorted(unknown))}")
    if options and not isinstance(mode, BatchMode | UserMode) and mode != Dispatch.DP_COMPUTE_METRIC:
        raise RegistrationError(
            f"{', '.join(options)} needs a mode that splits rows, got {mode.name}: leave it out or change the mode"
        )
    return {option: _column_names(option, columns) for option, columns in options.items()}


def _column_names(option: str, columns: object) -> tuple[str, ...] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not all(isinstance(name, str) for name in columns):
        raise RegistrationError(f"{option} must be a list of column names, got {columns!r}")
    return tuple(columns)


def _in_place(pair: dict[str, Any]) -> InPlaceMode:
    if set(pair) != {"dispatch_fn", "collect_fn"}:
        raise RegistrationError(f"dispatch_mode must have the keys 'dispatch_fn' and 'collect_fn', got {pair!r}")
    check_functions(**pair)
    names = [getattr(function, "__name__", type(function).__name__) for function in pair.values()]
    return InPlaceMode("+".join(names), pair["dispatch_fn"], pair["collect_fn"])


def _checked_execute(execute: object, mode: DispatchMode) -> Execute:
    if not isinstance(execute, Execute):
        raise RegistrationError(f"execute_mode must be a member of Execute, got {execute!r}")
    if isinstance(mode, RankZeroMode):
        return Execute.RANK_ZERO
    splits = isinstance(mode, BatchMode) or mode in (Dispatch.DP_COMPUTE, Dispatch.DP_COMPUTE_METRIC)
    if splits and execute is not Execute.ALL:
        raise RegistrationError(
            f"execute_mode must be Execute.ALL for {mode.name}, which splits the arguments over all ranks, got {execute.name}"
        )
    return execute


def _check_method(method: object, mode: DispatchMode) -> None:
    if not inspect.isfunction(method):
        raise RegistrationError(f"@register must decorate a plain method, not a property, static or class method, got {method!r}")
    if inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method):
        raise RegistrationError(f"{method.__qualname__} must return its results, but is a generator: return a list")
    parameters = list(inspect.signature(method).parameters.values())
    if not parameters or parameters[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
        raise RegistrationError(f"{method.__qualname__} must take self first")
    splits_rows = isinstance(mode, BatchMode) or mode == Dispatch.DP_COMPUTE_METRIC
    takes_rows = any(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters[1:])
    if splits_rows and not takes_rows:
        raise RegistrationError(f"{method.__qualname__} takes no batch, but {mode.name} splits one over the ranks")
    if mode == Dispatch.DP_COMPUTE_PROTO_WITH_FUNC and not _takes_function_and_rows(parameters[1:]):
        raise RegistrationError(f"{method.__qualname__} must take a function first and rows after it, for {mode.name}")


def _takes_function_and_rows(parameters: list[inspect.Parameter]) -> bool:
    kinds = inspect.Parameter
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL)]
    return bool(positional) and (len(parameters) > 1 or positional[0].kind is kinds.VAR_POSITIONAL)

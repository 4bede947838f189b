"""`SharedTensor`: a tensor over memory that others read too, and that nobody may write.

Torch has no read-only tensor, and a write into a read-only mapping ends the process. So whatever would write, an in-place
operation, `out=` or a collective, is refused before it begins; views of a shared tensor are shared, everything else that is
computed from one is an ordinary tensor. What torch does not see is not refused: writes to `data_ptr()` or to the storage,
and to a tensor that was made of the read-only array which `.numpy()` gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError


class SharedTensor(Tensor):
    """Made by `shared`. It keeps the memory alive, as any view does."""

    plain: Tensor
    """The same memory without the guard."""

    # No Python-level overriding: every operation gets to `__torch_dispatch__`, with a schema that says what it writes.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation is of an instance method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        written, is_view = _effects(func)
        for position, name in written:
            value = args[position] if position < len(args) else named.get(name)
            if _holds_shared(value):
                _refuse(f"{func} would write into it")
        result = func(*map(_plain, args), **{name: _plain(value) for name, value in named.items()})
        return _shared_again(result, args, named) if is_view else result

    def numpy(self, *, force: bool = False) -> NDArray[Any]:
        """A read-only array of the same memory."""
        array = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.plain.tolist()

    def apply_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Torch runs it where no operation is seen."""
        _refuse("apply_ would write into it")

    def __repr__(self) -> str:  # type: ignore[override]  # torch takes options that nobody gives
        return repr(self.plain)

    def __format__(self, format_spec: str) -> str:
        return format(self.plain, format_spec)

    def __dlpack__(self, **options: Any) -> NoReturn:
        _refuse("DLPack would hand it out unguarded")

    def __copy__(self) -> Tensor:
        return shared(self.plain)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = memo.setdefault(id(self), self.plain.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)


def shared(tensor: Tensor) -> SharedTensor:
    """A guarded view of a dense tensor, or the tensor itself where it is one."""
    if isinstance(tensor, SharedTensor):
        return tensor
    guarded: SharedTensor = Tensor._make_subclass(SharedTensor, tensor)
    guarded.plain = tensor
    return guarded


def unguarded(tensor: Tensor) -> Tensor:
    """The tensor itself, or what a shared one guards: to be read only."""
    return tensor.plain if isinstance(tensor, SharedTensor) else tensor


def tensor_over(array: NDArray[Any]) -> Tensor:
    """A tensor of the array's memory, whether that may be written or not; torch warns of the latter."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_CalledWritable(array)))


class _CalledWritable:
    """The memory of an array, as numpy asks for it, called writable."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.owner = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def _refuse(what: str) -> NoReturn:
    raise DataError(f"this tensor is a view of memory that others share (zero_copy=True): {what}; .clone() it first")


_UNDECLARED_WRITES = dict.fromkeys((f"aten::{kind}_batch_norm" for kind in ("native", "cudnn", "miopen")), "running_")
"""Operations that write arguments without saying so, and what the names of these begin with."""
_UNDECLARED_VIEWS = ("aten::_unsafe_view", "aten::unsafe_")


@cache
def _effects(func: Any) -> tuple[tuple[tuple[int, str], ...], bool]:
    """The arguments that an operation writes, by position and name, and whether its result may be a view of an argument."""
    name = func._schema.name
    arguments = list(enumerate(func._schema.arguments))
    written = [(place, each.name) for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]
    if not written and name.endswith("_"):  # collectives do not declare what they write
        written = [(place, each.name) for place, each in arguments if not each.name.startswith("input")]
    if name in _UNDECLARED_WRITES:
        written = [(place, each.name) for place, each in arguments if each.name.startswith(_UNDECLARED_WRITES[name])]
    is_view = name.startswith(_UNDECLARED_VIEWS) or any(each.alias_info is not None for each in func._schema.returns)
    return tuple(written), is_view


def _plain(value: Any) -> Any:
    if isinstance(value, SharedTensor):
        return value.plain
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _holds_shared(value: Any) -> bool:
    return isinstance(value, SharedTensor) or (isinstance(value, list | tuple) and any(map(_holds_shared, value)))


def _shared_again(result: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """The result with a guard on what lies in the memory of a shared argument: some views are copies when they must be."""
    guarded = {_place(value) for value in (*args, *named.values()) if isinstance(value, SharedTensor)}

    def again(part: Any) -> Any:
        if type(part) is Tensor:
            return shared(part) if _place(part) in guarded else part
        return _nested_again(part) if isinstance(part, Tensor) and part.is_nested else part

    return type(result)(map(again, result)) if isinstance(result, list | tuple) else again(result)


def _nested_again(nested: Tensor) -> Tensor:
    """Torch's own constructor of nested tensors gives a view of the values."""
    from podium.protocol import jagged  # its arithmetic is of columns that may be guarded

    values, offsets = jagged.parts(nested)
    return jagged.like(nested, shared(values), offsets)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

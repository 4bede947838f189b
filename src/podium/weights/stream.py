"""Weights as a stream of (name, tensor): what a trainer gives and a rollout takes.

A stream is lazy, so that a sharded trainer can gather one tensor at a time. It covers everything that a forward pass reads:
parameters and all buffers, the non-persistent ones too (`state_dict` leaves those out). Tied tensors travel once. What is
not here: versions (the rollout keeps them) and transports between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from podium.errors import RolloutError, nearest


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a module by its dotted name, tied ones once, under their first name.

    The tensors are detached views of the module's own storage: they change when the module is trained, so a consumer
    copies each before it asks for the next.
    """
    return ((names[0], tensor.detach()) for tensor, names in _weights(module))


def copy_weights(module: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a complete stream into a module's own storage: nothing is shared with the source, and ties stay ties.

    Tensors may be strided in any way and lie on any device. Floating dtypes are converted to the module's, rounding to
    nearest; any other change of dtype is an error. A tied tensor may come under any of its names; when it comes under two,
    the values must be equal, since a source that has untied them cannot be represented here.

    Raises RolloutError for a name that the module does not have, a name that comes twice, a wrong shape or dtype, tied names
    with different values, and, at the end, for names that are missing from the stream. The entries before the bad one
    are then written already and the rest are not: copy a complete stream before the module is used again.
    """
    weights = _weights(module)
    number_of = {name: number for number, (_, names) in enumerate(weights) for name in names}
    copied: dict[int, list[str]] = {}
    with torch.no_grad():
        for name, source in stream:
            number = _known(name, number_of)
            _write(weights[number][0], name, source, copied.setdefault(number, []))
    missing = [names[0] for number, (_, names) in enumerate(weights) if number not in copied]
    if missing:
        raise RolloutError(f"the weight stream ended without {len(missing)} of {len(weights)} tensors: {', '.join(missing)}")


def _weights(module: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Each distinct tensor with all of its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _known(name: str, number_of: dict[str, int]) -> int:
    if name not in number_of:
        raise RolloutError(f"the weight stream has {name!r}, which the module does not have{nearest(name, number_of)}")
    return number_of[name]


def _write(target: Tensor, name: str, source: Tensor, copied: list[str]) -> None:
    """Copy one tensor, or compare it when its tied partner in `copied` has been copied already."""
    if source.shape != target.shape:
        raise RolloutError(f"weight {name!r} came with shape {tuple(source.shape)}, the module's is {tuple(target.shape)}")
    if source.dtype != target.dtype and not (source.is_floating_point() and target.is_floating_point()):
        raise RolloutError(f"weight {name!r} came as {source.dtype}, the module's is {target.dtype}; only floats are converted")
    if name in copied:
        raise RolloutError(f"weight {name!r} came twice in one stream")
    if not copied:
        target.copy_(source)
    elif not torch.equal(target, source.to(target)):
        raise RolloutError(f"weights {copied[0]!r} and {name!r} are tied here, but came with different values; tie the source's")
    copied.append(name)

"""Mixed precision: forward and backward in a narrow dtype, everything that lasts in the parameters' own (the masters).

The ranks of a group leave it to FSDP2, which gathers the parameters narrow and adds their gradients up in the masters' dtype.
A rank without a group computes with narrow stand-ins. The arithmetic is the same: parameters are rounded, buffers and inputs
are not; each micro-batch's gradient is narrow, and added to those before it in the masters' dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PreTrainedModel

from podium.errors import EngineError

TRAINABLE = (torch.float32, torch.float64)
"""dtypes whose AdamW update of about lr is not rounded away; of bfloat16's, at lr 1e-6, 2.6 % was found in the weights."""


def prepare(model: PreTrainedModel, compute_dtype: str | None, *, is_trained: bool) -> torch.dtype | None:
    """The dtype that passes of this model are to be put into; None: that of its parameters.

    A model that is not trained needs no masters: its parameters are rounded for good, in place. EngineError for one that would
    be trained in a dtype too narrow for its updates, or of which some parameters must not be rounded.
    """
    if is_trained:
        _check_trainable(model)
    if compute_dtype is None:
        return None
    dtype: torch.dtype = getattr(torch, compute_dtype)
    _check_narrowable(model, compute_dtype)
    if is_trained:
        return dtype
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return None


def _check_trainable(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in TRAINABLE:
            raise EngineError(
                f"{name} is {_name(parameter.dtype)}, whose rounding loses nearly all of a small update: load the model with "
                "model.dtype=float32, and set engine.compute_dtype=bfloat16 to compute in bfloat16 all the same"
            )


def _check_narrowable(model: PreTrainedModel, compute_dtype: str) -> None:
    """transformers names the parameters that a model needs in float32, whatever the rest is in."""
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    found = sorted(name for name, _ in model.named_parameters() if any(part in name for part in kept))
    if found:
        raise EngineError(
            f"{type(model).__name__} needs {len(found)} of its parameters in float32 ({found[0]}, for one), and "
            f"engine.compute_dtype={compute_dtype} rounds all of them: use engine.compute_dtype=null"
        )


def sharding_policy(model: nn.Module, dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """FSDP2's policy to compute in `dtype`; None: in the parameters' own."""
    if dtype is None:
        return MixedPrecisionPolicy()
    masters = next(model.parameters()).dtype
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=masters, cast_forward_inputs=False)


class StandIns:
    """Narrow copies of a model's parameters, in their place while it computes; gradients go to the masters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype, self._are_in_place = model, dtype, False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model's parameters are the stand-ins, made of what the masters are now; inside of itself, nothing changes.

        A backward pass adds to the masters' `grad` and leaves none on the stand-ins.
        """
        if self._are_in_place:
            yield
            return
        slots = [
            (module, name, master)
            for module in self._model.modules()
            for name, master in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        stand_ins = {master: _stand_in(master, self._dtype) for master in self._model.parameters()}
        self._are_in_place = True
        try:
            for module, name, master in slots:
                setattr(module, name, stand_ins[master])
            yield
        finally:
            for module, name, master in slots:
                setattr(module, name, master)
            self._are_in_place = False


def _stand_in(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copied = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
    if master.requires_grad:
        copied.register_post_accumulate_grad_hook(_handing_over(master))
    return copied


def _handing_over(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(stand_in: Tensor) -> None:
        gradient, stand_in.grad = stand_in.grad, None
        assert gradient is not None  # autograd calls this after it has been set
        master.grad = gradient.to(master.dtype) if master.grad is None else master.grad.add_(gradient)

    return hand_over


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

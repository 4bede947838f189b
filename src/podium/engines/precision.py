"""Mixed precision: forward and backward in a narrow dtype, all state in the dtype of the parameters (the masters).

In a group FSDP2 does this: it gathers the parameters narrow and adds their gradients up in the masters' dtype.
A rank without a group computes with low-precision copies. The arithmetic is the same. Parameters are rounded; buffers and inputs
are not. Each micro-batch's gradient is narrow, and added to those before it in the masters' dtype.
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
"""dtypes that keep an AdamW update of about lr. In bfloat16, at lr 1e-6, 2.6 % of the updates arrived in the weights."""


def prepare(model: PreTrainedModel, compute_dtype: str | None, *, is_trained: bool) -> torch.dtype | None:
    """The dtype of this model's passes; None: that of its parameters.

    A model that is not trained does not need masters: its parameters are rounded in place. EngineError for a model that would be
    trained in a dtype too narrow for its updates, or some of whose parameters must not be rounded.
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
                f"{name} must be float32 or float64 to be trained, got {_name(parameter.dtype)}, which loses small updates: "
                "set model.dtype=float32, and engine.compute_dtype=bfloat16 to compute in bfloat16"
            )


def _check_narrowable(model: PreTrainedModel, compute_dtype: str) -> None:
    """transformers names the parameters that a model needs in float32."""
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


class LowPrecisionCopies:
    """Narrow copies of a model's parameters, in their place while it computes; gradients go to the masters."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype, self._are_in_place = model, dtype, False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model's parameters are copies of the masters' present values. Entering it again inside changes nothing.

        A backward pass adds to the masters' `grad`; the copies keep no gradient.
        """
        if self._are_in_place:
            yield
            return
        slots = [
            (module, name, master)
            for module in self._model.modules()
            for name, master in module.named_parameters(recurse=False, remove_duplicate=False)
        ]
        copies = {master: _low_copy(master, self._dtype) for master in self._model.parameters()}
        self._are_in_place = True
        try:
            for module, name, master in slots:
                setattr(module, name, copies[master])
            yield
        finally:
            for module, name, master in slots:
                setattr(module, name, master)
            self._are_in_place = False


def _low_copy(master: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    copied = nn.Parameter(master.detach().to(dtype), requires_grad=master.requires_grad)
    if master.requires_grad:
        copied.register_post_accumulate_grad_hook(_handing_over(master))
    return copied


def _handing_over(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hand_over(low_copy: Tensor) -> None:
        gradient, low_copy.grad = low_copy.grad, None
        assert gradient is not None  # autograd sets it before this call
        master.grad = gradient.to(master.dtype) if master.grad is None else master.grad.add_(gradient)

    return hand_over


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

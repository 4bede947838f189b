"""What dtypes a model computes in, as its layers see them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Seen:
    """dtypes of the parameters, outputs and gradients of outputs of each layer that has parameters, while it runs."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters, self.outputs, self.gradients = set[torch.dtype](), set[torch.dtype](), set[torch.dtype]()
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, _: Any, output: Tensor) -> None:
        self.parameters |= {parameter.dtype for parameter in module.parameters(recurse=False)}
        self.outputs.add(output.dtype)
        if output.requires_grad:
            output.register_hook(self._backward)

    def _backward(self, slope: Tensor) -> None:
        self.gradients.add(slope.dtype)

"""Ways around the guard of shared tensors that torch does not declare: they are refused, or what they give is guarded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.errors import DataError
from podium.protocol.guard import SharedTensor, shared
from podium.protocol.jagged import parts

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "running statistics": lambda t: torch.nn.functional.batch_norm(torch.randn(3, 4), t[0], t[1], training=True),
    "function per element": lambda t: t.apply_(lambda value: value + 1),
    "unsafe chunk": lambda t: torch.unsafe_chunk(t, 3)[0].zero_(),
    "unsafe split": lambda t: torch.unsafe_split(t, 1)[0].zero_(),
    "unsafe view": lambda t: torch.ops.aten._unsafe_view(t, [12]).zero_(),
    "nested values": lambda t: nested(t).values().zero_(),
    "nested row": lambda t: nested(t).unbind()[1].zero_(),
    "nested in place": lambda t: nested(t).mul_(2),
    "nested detached": lambda t: nested(t).detach().values().zero_(),
    "optimizer": lambda t: stepped(torch.nn.Parameter(t)),
    "gradient": lambda t: clipped(t),
    "module": lambda t: torch.nn.init.xavier_uniform_(torch.nn.Parameter(t)),
    "part of a complex one": lambda t: torch.view_as_complex(t.view(3, 2, 2)).real.zero_(),
}


def nested(values: Tensor, ragged: int = 1) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 3]), jagged_dim=ragged)


def stepped(parameter: torch.nn.Parameter) -> None:
    parameter.grad = torch.ones(3, 4)
    torch.optim.SGD([parameter], lr=0.1).step()


def clipped(gradient: Tensor) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 4))
    parameter.grad = gradient
    torch.nn.utils.clip_grad_norm_([parameter], 1e-3)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_torch_does_not_declare_is_refused_too(write: Callable[[Tensor], Any]):
    memory = torch.arange(12.0).reshape(3, 4)
    before = memory.clone()
    with pytest.raises(DataError, match=r"memory that others share .*\.clone\(\) it first"):
        write(shared(memory))
    assert torch.equal(memory, before)


def test_nested_tensors_that_torch_makes_of_shared_values_compute_as_others():
    values = torch.arange(12.0).reshape(3, 4)
    weight = torch.ones(4, 2, requires_grad=True)
    made, plain = nested(shared(values)), nested(values)
    assert isinstance(parts(made)[0], SharedTensor)
    assert torch.equal((made * 2).values(), (plain * 2).values())
    (made @ weight).values().sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, values.sum(0)[:, None].expand(4, 2))
    later = nested(shared(values.T.contiguous()), 2)
    assert isinstance(parts(later)[0], SharedTensor)
    assert parts(later)[0].tolist() == values.tolist()


def test_batch_norm_that_only_reads_a_shared_batch_works():
    values, mean, var = torch.arange(12.0).reshape(3, 4), torch.zeros(4), torch.ones(4)
    seen = torch.nn.functional.batch_norm(shared(values), mean, var, training=True)
    assert torch.allclose(seen.mean(0), torch.zeros(4), atol=1e-6)
    assert mean.tolist() != [0.0] * 4


def test_a_number_is_formatted_as_that_of_an_ordinary_tensor():
    assert f"{shared(torch.tensor([0.25, 1.0]))[0]:.1f}" == f"{torch.tensor(0.25):.1f}"
    assert f"{shared(torch.tensor([1.5]))}" == "tensor([1.5000])"

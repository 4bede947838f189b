"""Copies as if a value had crossed a process: nothing is shared, and no graph is kept."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from podium.protocol import DataProto, jagged_from_rows
from podium.single_controller.runtime.copies import detached, detached_copy


@dataclass
class Box:
    tensor: Tensor


LEAF = torch.ones(2, requires_grad=True)
COMPUTED = LEAF * 2


@pytest.mark.parametrize("tensor", [LEAF, COMPUTED], ids=["leaf", "computed"])
def test_a_copied_tensor_is_detached_wherever_it_is(tensor: Tensor):
    rows = DataProto({"y": tensor}, meta_info={"scale": tensor})
    nested = TensorDict({"y": tensor}, batch_size=[2])
    copied = detached_copy((tensor, [tensor], {"k": tensor}, Box(tensor), rows, nested))
    alone, (item,), named, box, rows, nested = copied
    for found in (alone, item, named["k"], box.tensor, rows.batch["y"], rows.meta_info["scale"], nested["y"]):
        assert not found.requires_grad
        assert found.tolist() == tensor.tolist()
        assert found.data_ptr() != tensor.data_ptr()
    assert alone is item  # what was one object still is
    assert tensor.requires_grad


def test_a_jagged_column_is_detached():
    column = jagged_from_rows([COMPUTED, COMPUTED[:1]])
    copied = detached_copy(DataProto({"j": column})).batch["j"]
    assert not copied.requires_grad
    assert [row.tolist() for row in copied.unbind()] == [[2.0, 2.0], [2.0]]


def test_parameters_stay_parameters():
    copied = detached_copy(nn.Linear(2, 2))
    assert all(weight.requires_grad and isinstance(weight, nn.Parameter) for weight in copied.parameters())


def test_detached_shares_storage_and_leaves_the_rest():
    box = Box(COMPUTED)
    value = detached(((COMPUTED,), [LEAF], {"k": LEAF}, box, 3))
    (computed,), (leaf,), named, same, three = value
    for found, source in ((computed, COMPUTED), (leaf, LEAF), (named["k"], LEAF)):
        assert not found.requires_grad
        assert found.data_ptr() == source.data_ptr()
    assert same is box
    assert three == 3

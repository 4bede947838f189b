"""Shared tensors: every write is refused, every read is what it is of an ordinary tensor, and views stay guarded."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto
from podium.protocol.guard import SharedTensor, shared, tensor_over, unguarded
from podium.protocol.jagged import jagged, parts


def read_only() -> NDArray[np.float32]:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    array.flags.writeable = False
    return array


def guarded() -> SharedTensor:
    return shared(tensor_over(read_only()))


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda t: t.add_(1),
    "operator": lambda t: t.__iadd__(1),
    "item": lambda t: t.__setitem__(0, 1),
    "mask": lambda t: t.__setitem__(t > 1, 1),
    "out": lambda t: torch.add(torch.ones(3, 4), 1, out=t),
    "several": lambda t: torch._foreach_add_([torch.ones(3, 4), t], 1),
    "functional": lambda t: torch.nn.functional.relu(t, inplace=True),
    "initialiser": torch.nn.init.zeros_,
    "random": lambda t: t.random_(),
    "resize": lambda t: t.resize_(1),
    "storage": lambda t: t.set_(torch.ones(1)),  # type: ignore[call-overload]
    "data": lambda t: t.data.zero_(),
    "detached": lambda t: t.detach().zero_(),
    "row": lambda t: t[0].zero_(),
    "transposed": lambda t: t.T.zero_(),
    "flattened": lambda t: t.flatten().zero_(),
    "reshaped": lambda t: t.reshape(4, 3).zero_(),
    "same dtype": lambda t: t.to(torch.float32).zero_(),
    "contiguous": lambda t: t.contiguous().zero_(),
    "bits": lambda t: t.view(torch.int32).zero_(),
    "unbound": lambda t: t.unbind()[1].zero_(),
    "split": lambda t: t.split(2)[1].zero_(),
    "copied": lambda t: copy.copy(t).zero_(),
    "in a list": lambda t: torch.as_tensor(t).zero_(),
    "dlpack": torch.from_dlpack,
    "parameter": lambda t: torch.nn.Parameter(t).data.zero_(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_refused_and_says_what_to_do(write: Callable[[Tensor], Any], inference: bool):
    tensor = guarded()
    with torch.inference_mode(inference), pytest.raises(DataError, match=r"memory that others share .*\.clone\(\) it first"):
        write(tensor)
    assert tensor.tolist() == read_only().tolist()


def test_numpy_gets_a_read_only_array_of_the_same_memory():
    array = read_only()
    for seen in (shared(tensor_over(array)).numpy(), np.asarray(shared(tensor_over(array)))):
        assert np.shares_memory(seen, array)
        with pytest.raises(ValueError, match="read-only"):
            seen[0] = 1


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_computed_is_an_ordinary_tensor(inference: bool):
    tensor = guarded()
    with torch.inference_mode(inference):
        made = [tensor + 1, tensor.clone(), tensor.to(torch.float64), tensor.T.contiguous(), tensor.T.reshape(-1), tensor[[0, 2]]]
        made += [torch.cat([tensor, tensor]), torch.stack([tensor]), tensor.sum(), tensor @ tensor.T, tensor > 1]
    made += [copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))]
    assert {type(result) for result in made} == {Tensor}
    with torch.inference_mode(inference):
        for result in made:
            result.zero_()
    assert tensor.tolist() == read_only().tolist()


def test_it_may_be_read_by_what_writes_elsewhere():
    tensor, mine = guarded(), torch.ones(3, 4)
    mine.copy_(tensor)
    mine += tensor
    mine[tensor > 10] = 0
    mine.index_copy_(0, shared(torch.tensor([0])), tensor[2:])
    assert type(mine) is Tensor
    assert mine.tolist() == [[8, 9, 10, 11], [8, 10, 12, 14], [16, 18, 20, 0]]


def test_gradients_are_those_of_an_ordinary_tensor():
    ids, targets, weights = torch.tensor([[1, 2], [0, 3]]), torch.tensor([0, 1, 2, 0]), torch.arange(4.0)

    def gradient(view: Callable[[Tensor], Tensor]) -> Tensor:
        table = torch.linspace(0, 1, 15).reshape(5, 3).requires_grad_()
        looked_up = torch.nn.functional.embedding(view(ids), table).view(-1, 3)
        losses = torch.nn.functional.cross_entropy(looked_up, view(targets), reduction="none")
        (losses * view(weights)).sum().backward()
        assert table.grad is not None
        return table.grad

    assert torch.equal(gradient(shared), gradient(lambda tensor: tensor))


def test_jagged_columns_are_guarded_through_the_operations_of_rows():
    offsets = torch.tensor([0, 1, 3, 6])
    data = DataProto(
        {
            "x": guarded(),
            "a": jagged(shared(torch.arange(6.0)), offsets),
            "b": jagged(shared(torch.arange(6.0)), offsets.clone()),
        }
    )
    views = [data, data[1:], *data.partition(2), data.select(["x", "a", "b"])]
    for view in views:
        values = parts(view.batch["a"])[0]
        assert isinstance(view.batch["x"], SharedTensor)
        assert isinstance(values, SharedTensor)
        with pytest.raises(DataError, match="clone"):
            view.batch["a"].mul_(2)
        assert torch.equal((view.batch["a"] * view.batch["b"]).values(), unguarded(values) ** 2)
    for copied in (data.select_idxs([2, 0]), DataProto.concat([data, data]), data.repeat(2), data.clone()):
        copied.batch["x"].zero_()
        parts(copied.batch["a"])[0].zero_()
    assert parts(data.batch["a"])[0].tolist() == [0, 1, 2, 3, 4, 5]


def test_the_memory_lives_as_long_as_a_view():
    class Memory(np.ndarray):  # type: ignore[type-arg]
        pass

    memory = np.arange(6.0).view(Memory)
    memory.flags.writeable = False
    alive = weakref.ref(memory)
    tensor = shared(tensor_over(memory))
    view = tensor.reshape(2, 3)[1].numpy()
    del memory, tensor
    gc.collect()
    assert alive() is not None
    assert view.tolist() == [3, 4, 5]
    del view
    gc.collect()
    assert alive() is None


def test_no_warning_is_given():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(shared(tensor_over(read_only()))) == str(torch.from_numpy(read_only().copy()))
        assert tensor_over(np.empty((0, 3), dtype=np.int64)[:]).shape == (0, 3)


def test_a_collective_that_would_write_is_refused(tmp_path: Any):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        tensor, gathered = guarded(), [torch.zeros(3, 4)]
        for collective in (torch.distributed.all_reduce, lambda t: torch.distributed.broadcast(t, 0)):
            with pytest.raises(DataError, match="clone"):
                collective(tensor)
        torch.distributed.all_gather(gathered, tensor)
        assert gathered[0].tolist() == read_only().tolist()
    finally:
        torch.distributed.destroy_process_group()

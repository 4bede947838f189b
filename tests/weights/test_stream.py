"""Streams of weights: complete, without aliasing, ties kept, and every way to be wrong named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from podium.errors import RolloutError
from podium.weights import copy_weights, named_weights


class Tied(nn.Module):
    """An embedding tied to a head, a saved buffer, a buffer that state_dict leaves out, and an integer buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("scale", torch.randn(3), persistent=False)
        self.register_buffer("count", torch.tensor(seed))


def stream_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in named_weights(module)}


def test_stream_has_parameters_and_all_buffers_with_ties_once() -> None:
    assert list(stream_of(Tied(0))) == ["embed.weight", "mean", "scale", "count"]
    assert not any(tensor.requires_grad for _, tensor in named_weights(Tied(0)))


def test_stream_of_a_llama_has_its_rotary_frequencies() -> None:
    config = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    assert "model.rotary_emb.inv_freq" in stream_of(LlamaForCausalLM(config))


def test_copy_makes_equal_keeps_ties_and_storage_and_shares_nothing() -> None:
    source, target = Tied(1), Tied(2)
    before = {name: tensor.data_ptr() for name, tensor in named_weights(target)}
    copy_weights(target, named_weights(source))
    assert {name: tensor.data_ptr() for name, tensor in named_weights(target)} == before
    assert target.head.weight is target.embed.weight
    wanted = stream_of(source)
    for tensor in (*source.parameters(), *source.buffers()):
        tensor.data.zero_()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in named_weights(target))


def test_strided_tensors_arrive_whole() -> None:
    target, wanted = Tied(2), torch.arange(12.0).reshape(4, 3)
    for strided in (wanted.t().contiguous().t(), wanted.repeat_interleave(2, dim=1)[:, ::2]):
        assert not strided.is_contiguous()
        copy_weights(target, (stream_of(Tied(1)) | {"embed.weight": strided}).items())
        assert torch.equal(target.head.weight, wanted)


def test_floats_are_rounded_to_the_modules_dtype() -> None:
    target = Tied(2).to(torch.bfloat16)
    source = stream_of(Tied(1))
    copy_weights(target, source.items())
    assert torch.equal(target.embed.weight, source["embed.weight"].to(torch.bfloat16))


def test_a_stream_may_name_both_ends_of_a_tie_if_they_agree() -> None:
    source = stream_of(Tied(1))
    copy_weights(Tied(2), (source | {"head.weight": source["embed.weight"].clone()}).items())
    with pytest.raises(RolloutError, match=r"'embed.weight' and 'head.weight' are tied here, but came with different values"):
        copy_weights(Tied(2), (source | {"head.weight": source["embed.weight"] + 1}).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stream: stream | {"emned.weight": torch.ones(1)}, r"'emned.weight'.*does not have; did you mean 'embed.weight'"),
        (lambda stream: stream | {"mean": torch.ones(4)}, r"'mean' came with shape \(4,\), the module's is \(3,\)"),
        (lambda stream: stream | {"count": torch.tensor(1.5)}, r"'count' came as torch.float32, the module's is torch.int64"),
        (lambda stream: {"mean": stream["mean"]}, r"ended without 3 of 4 tensors: embed.weight, scale, count"),
    ],
)
def test_a_wrong_stream_names_what_is_wrong(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        copy_weights(Tied(2), change(stream_of(Tied(1))).items())


def test_a_name_that_comes_twice_is_refused() -> None:
    entries = list(stream_of(Tied(1)).items())
    with pytest.raises(RolloutError, match=r"'embed.weight' came twice"):
        copy_weights(Tied(2), [*entries, entries[0]])


def test_a_copy_can_be_trained_and_copied_into_again() -> None:
    target = Tied(2)
    copy_weights(target, named_weights(Tied(1)))
    target.head(target.embed.weight).sum().backward()
    copy_weights(target, named_weights(Tied(3)))
    assert target.embed.weight.requires_grad
    assert torch.equal(target.embed.weight, Tied(3).embed.weight)

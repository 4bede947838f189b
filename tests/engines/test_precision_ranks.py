"""Mixed precision over ranks: what FSDP2 computes is what a rank alone computes with low-precision copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from podium.algorithms import SFTLoss
from podium.checkpoint import load_state
from podium.config import FSDP2Config, ModelConfig, OptimConfig
from podium.engines.fsdp2 import FSDP2Engine
from podium.protocol import DataProto
from podium.protocol.jagged import interleave, jagged, offsets_of, parts
from podium.single_controller import Dispatch, Init, ResourcePool, WorkerGroup, register
from podium.workers import TrainingSpec, TrainingWorker
from tests.engines.seen import Seen

pytestmark = pytest.mark.usefixtures("ray_cluster")

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
MODEL = ModelConfig(path="char_llama", override_config=SIZES)
OPTIM = OptimConfig(lr=1e-6, clip_grad=1e9)
ONE_ROW_EACH = 14
"""Tokens of a micro-batch, so that every micro-batch is one row on any number of ranks, and is rounded alike."""


class Watched(TrainingWorker):
    """Notes the dtypes of its layers while it trains."""

    def __init__(self, spec: TrainingSpec) -> None:
        super().__init__(spec)
        assert isinstance(self.engine, FSDP2Engine)
        self._seen = Seen(self.engine.model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def seen(self) -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype]]:
        return self._seen.parameters, self._seen.outputs, self._seen.gradients


def group(num_workers: int, **engine) -> WorkerGroup[Watched]:
    spec = TrainingSpec(MODEL, FSDP2Config(**engine), OPTIM, total_steps=10, seed=0)
    runtime = "inline" if num_workers == 1 else "ray"
    return WorkerGroup(ResourcePool([num_workers]), Init(Watched, spec), runtime=runtime, threads_per_rank=1)


def batch(num_rows: int) -> DataProto:
    """Rows of three prompt and eleven response tokens."""
    generator = torch.Generator().manual_seed(0)

    def ids(length):
        tokens = torch.randint(3, 99, (num_rows * length,), generator=generator)
        return jagged(tokens, offsets_of(torch.full((num_rows,), length)))

    prompts, responses = ids(3), ids(11)
    mask = jagged(torch.ones(num_rows * 11, dtype=torch.int64), parts(responses)[1])
    return DataProto({"input_ids": interleave(prompts, responses), "responses": responses, "response_mask": mask})


def trained(workers, folder: Path, *batches: DataProto) -> dict[str, Tensor]:
    """The engine's state after a step on each batch."""
    workers.set_loss_fn(SFTLoss())
    for rows in batches:
        workers.train_batch(rows)
    folder.mkdir()
    workers.save_checkpoint(str(folder))
    return load_state(folder / "train")[0]


def joined(state: dict[str, Tensor], kind: str) -> Tensor:
    return torch.cat([tensor.double().flatten() for name, tensor in sorted(state.items()) if name.endswith(kind)])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.slow
def test_two_ranks_compute_what_one_does_and_both_nearly_what_float32_does(tmp_path):
    """Gradients after one step, with uneven ranks: rows are rounded alike, so that only float32's order of sums differs."""
    mixed = {"compute_dtype": "bfloat16", "layout": "bucketed", "max_tokens_per_micro_batch": ONE_ROW_EACH}
    found = {}
    for name, ranks, engine in (("float32", 1, {}), ("one", 1, mixed), ("two", 2, mixed)):
        with group(ranks, **engine) as workers:
            state = trained(workers.call, tmp_path / name, batch(7))
            assert {tensor.dtype for tensor in state.values()} == {torch.float32}
            used = torch.bfloat16 if engine else torch.float32
            assert workers.call.seen() == [({used}, {used}, {used})] * ranks
        found[name] = joined(state, ".exp_avg")
    assert relative(found["two"], found["one"]) < 1e-6
    assert 1e-3 < relative(found["one"], found["float32"]) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_masters_pass_to_another_number_of_ranks_to_the_last_bit(tmp_path, before, after):
    """Updates of 1e-6 that bfloat16 would lose are in them; a rank without rows takes part."""
    with group(before, compute_dtype="bfloat16") as source:
        saved = trained(source.call, tmp_path / "saved", batch(7), batch(1))
    weights = joined(saved, ".weight")
    assert float((weights != weights.bfloat16().double()).double().mean()) > 0.9
    with group(after, compute_dtype="bfloat16") as target:
        target.call.load_checkpoint(str(tmp_path / "saved"))
        loaded = trained(target.call, tmp_path / "loaded")
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())

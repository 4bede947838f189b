"""The engine sharded over the processes of a Ray group equals the engine alone, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from podium.algorithms import SFTLoss
from podium.config import FSDP2Config, ModelConfig, OptimConfig
from podium.engines.fsdp2 import FSDP2Engine
from podium.errors import WorkerError
from podium.models import load_model
from podium.observability import Metrics
from podium.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from podium.protocol.jagged import interleave, jagged, offsets_of, parts
from podium.single_controller import Init, ResourcePool, Worker, WorkerGroup
from podium.workers import TrainingSpec, TrainingWorker
from tests.algorithms.builders import clipped
from tests.engines.builders import fsdp2
from tests.engines.test_policy_terms import AGGREGATIONS, TERMS

pytestmark = pytest.mark.usefixtures("ray_cluster")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
MODEL = ModelConfig(path="char_llama", override_config=SIZES, dtype="float64")
OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, warmup_steps=2)


def spec(**engine) -> TrainingSpec:
    return TrainingSpec(MODEL, FSDP2Config(**engine), OPTIM, total_steps=10, seed=0)


def group(num_workers: int, **engine):
    runtime = "inline" if num_workers == 1 else "ray"
    return WorkerGroup(ResourcePool([num_workers]), Init(TrainingWorker, spec(**engine)), runtime=runtime, threads_per_rank=1)


def batch(response_lengths: list[int]) -> DataProto:
    """Random rows with prompts of two to four tokens."""
    generator = torch.Generator().manual_seed(len(response_lengths))

    def ids(lengths):
        return jagged(torch.randint(3, 99, (sum(lengths),), generator=generator), offsets_of(torch.tensor(lengths)))

    prompts, responses = ids([2 + row % 3 for row in range(len(response_lengths))]), ids(response_lengths)
    mask = jagged(torch.ones(sum(response_lengths), dtype=torch.int64), parts(responses)[1])
    return DataProto({"input_ids": interleave(prompts, responses), "responses": responses, "response_mask": mask})


LONG_AND_SHORT = batch([9, 9, 9, 9, 1, 1, 2, 1])
ONE_ROW = batch([4])


@pytest.fixture
def group_of_one() -> Iterator[None]:
    Worker().init_process_group()
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("compute_dtype", [None, "bfloat16"])
def test_a_process_group_of_one_is_sharded_and_equals_the_engine_alone(compute_dtype, group_of_one):
    alone, sharded = (engine_in(is_grouped, compute_dtype) for is_grouped in (False, True))
    assert not has_shards(alone)
    assert has_shards(sharded)
    for rows in (LONG_AND_SHORT, ONE_ROW):
        mine, theirs = (engine.train_batch(rows, SFTLoss()).to_floats() for engine in (sharded, alone))
        assert mine == pytest.approx(theirs, rel=1e-12)
    tensors, numbers = sharded.state()
    alone_tensors, alone_numbers = alone.state()
    assert numbers == alone_numbers
    torch.testing.assert_close(tensors, alone_tensors, rtol=1e-12, atol=1e-12)


def engine_in(is_grouped: bool, compute_dtype) -> FSDP2Engine:
    model, settings = load_model(MODEL, seed=0), FSDP2Config(compute_dtype=compute_dtype)
    with nullcontext() if is_grouped else no_group():
        return fsdp2(model, settings, OPTIM, total_steps=10, seed=0)


@contextmanager
def no_group() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: False)
        yield


def has_shards(engine: FSDP2Engine) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in engine.model.parameters())


def train(workers, batches) -> list[dict[str, float]]:
    workers.set_loss_fn(SFTLoss())
    metrics: list[Metrics] = [workers.train_batch(rows).meta_info["metrics"] for rows in batches]
    return [step.to_floats() for step in metrics]


def exported(workers, folder: Path) -> dict[str, torch.Tensor]:
    folder.mkdir()
    workers.save_hf(str(folder))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).state_dict()


@pytest.mark.parametrize(
    "engine", [pytest.param({}, marks=pytest.mark.slow), {"layout": "packed", "max_tokens_per_micro_batch": 30}]
)
def test_losses_gradients_and_weights_equal_one_workers(tmp_path, engine):
    """Ranks with other lengths, and even without rows, make the same number of passes."""
    batches = [LONG_AND_SHORT, ONE_ROW, LONG_AND_SHORT]
    with group(1) as alone, group(2, **engine) as pair:
        expected, found = train(alone.call, batches), train(pair.call, batches)
        for step, (one, two) in enumerate(zip(expected, found, strict=True)):
            assert two == pytest.approx(one, rel=1e-10), step
        log_probs = [parts(workers.call.infer_batch(LONG_AND_SHORT).batch["log_probs"])[0] for workers in (alone, pair)]
        assert torch.allclose(*log_probs, rtol=0, atol=1e-10)
        weights = exported(alone.call, tmp_path / "one"), exported(pair.call, tmp_path / "two")
    fresh = load_model(MODEL, seed=0).state_dict()
    for name, one in weights[0].items():
        assert torch.allclose(one, weights[1][name], rtol=0, atol=1e-10), name
        assert not torch.equal(one, fresh[name]), name


def policy_batch(num_rows: int) -> DataProto:
    """Rows of one token and more, with all that a policy loss reads; an advantage a row."""
    rows = batch([1 + row for row in range(num_rows)])
    values, offsets = parts(rows.batch["responses"])
    columns = {"old_log_probs": -4.6 + torch.arange(len(values)).double() % 3 / 8}
    columns["ref_log_prob"] = columns["old_log_probs"] + 0.1
    advantages = {"advantages": (torch.arange(num_rows) % 3 - 1).double()}
    return rows.union(DataProto({name: jagged(column, offsets) for name, column in columns.items()} | advantages))


def test_padding_rows_change_no_number_on_two_ranks():
    """Losses of every aggregation; five rows padded by the call, or to eight by the driver; one row, so none on rank 1."""
    losses = [SFTLoss()]
    for aggregation in AGGREGATIONS.values():
        losses += [clipped(0.1, 0.1, aggregation), clipped(0.1, 0.1, aggregation, **TERMS["all"])]
    five, one = policy_batch(5), policy_batch(1)
    with group(1) as alone, group(2) as pair:
        for loss in losses:
            for workers in (alone, pair):
                workers.call.set_loss_fn(loss)
            for rows, padded in (
                (five, DataProto(five.batch, auto_padding=True)),
                (five, pad_dataproto_to_divisor(five, 4)[0]),
                (one, pad_dataproto_to_divisor(one, 4)[0]),
            ):
                expected, found = (
                    workers.call.train_batch(given).meta_info["metrics"].to_floats()
                    for workers, given in ((alone, rows), (pair, padded))
                )
                assert found == pytest.approx(expected, rel=1e-8, abs=1e-12), loss
        expected = alone.call.infer_batch(five)
        trimmed = pair.call.infer_batch(DataProto(five.batch, auto_padding=True))
        filled = pair.call.infer_batch(pad_dataproto_to_divisor(five, 8)[0])
        assert filled.padding_mask.tolist() == [False] * 5 + [True] * 3
        for rows in (trimmed, unpad_dataproto(filled, 3)):
            assert not rows.padding_mask.any()
            assert torch.allclose(*(parts(part.batch["log_probs"])[0] for part in (rows, expected)), rtol=0, atol=1e-9)


class TrialFailsOnRankOne(TrainingWorker):
    """Rank 1 takes part in each pass of a trial, and fails after it."""

    def __init__(self, training_spec: TrainingSpec) -> None:
        super().__init__(training_spec)
        log_probs = self.engine._log_probs

        def fail(rows, micro):
            log_probs(rows, micro)
            raise RuntimeError("the mask has another shape")

        if self.rank == 1:
            self.engine._log_probs = fail


def test_a_trial_of_a_layout_that_fails_on_one_rank_is_answered_alike_by_all():
    """Ranks that plan unlike each other make unlike collectives, and wait for each other until the group's timeout."""
    init = Init(TrialFailsOnRankOne, spec(layout="packed"))
    with WorkerGroup(ResourcePool([2]), init, runtime="ray", threads_per_rank=1) as pair:
        for _ in range(2):
            with pytest.raises(WorkerError, match="mixes rows in the layout packed") as caught:
                pair.call.infer_batch(LONG_AND_SHORT)
            assert len(caught.value.consequences) == 1, "the other rank refuses the layout too"
            assert "mixes rows in the layout packed" in caught.value.consequences[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_continues_on_another_number_of_workers(tmp_path, before, after):
    """Field report J7: saved with 2 ranks, loaded with 1, and the other way round."""
    with group(before) as source:
        train(source.call, [LONG_AND_SHORT, ONE_ROW])
        source.call.save_checkpoint(str(tmp_path))
        expected = train(source.call, [LONG_AND_SHORT])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.json", "train.safetensors"]
    with group(after) as target:
        target.call.load_checkpoint(str(tmp_path))
        found = train(target.call, [LONG_AND_SHORT])
    if before == after:
        assert found == expected
    assert found[0] == pytest.approx(expected[0], rel=1e-10)

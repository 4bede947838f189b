"""The dataflow of the trainers: what each step declares is what it reads and writes, and gaps are found before the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from podium.config import ModelConfig, RunConfig, WarmupConfig
from podium.errors import ConfigError, DataError, DispatchError, PodiumError, RegistrationError
from podium.models import load_tokenizer
from podium.observability import Spans
from podium.protocol import DataProto, Field, check_fields, column_names, pad_dataproto_to_divisor
from podium.single_controller import DataProtoFuture, Dispatch, Init, ResourcePool, Traffic, Worker, WorkerGroup, register
from podium.tasks import Scorer
from podium.trainers import PPOTrainer, SFTTrainer, TrainerContext, report
from podium.trainers.dataflow import Step, check_dataflow, roles_of, row_step, with_providers, worker_step
from podium.trainers.preflight import prepare
from podium.trainers.roles import Groups
from podium.workers import FIELDS, TrainingSpec, TrainingWorker
from tests.trainers.builders import small_config

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
RECOMPUTED, AS_DRAWN = "actor.recompute_old_log_probs=true", "actor.recompute_old_log_probs=false"
KL_LOSS, KL_REWARD = "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"
OF_TOKENS = f"algorithm.adv_estimator={Path(__file__).parent / 'own_parts.py'}:RewardToGo"
VARIANTS = {
    "plain": (RECOMPUTED,),
    "as drawn": (AS_DRAWN,),
    "kl in reward": (AS_DRAWN, KL_REWARD),
    "every term in float64": (RECOMPUTED, KL_LOSS, KL_REWARD, "model.dtype=float64", "actor.epochs=2"),
    "estimator of tokens": (RECOMPUTED, KL_REWARD, OF_TOKENS),
}
PAGE = Path(__file__).parents[2] / "docs" / "data.md"
HEAD = ["| column | is | made by | read by | holds |", "|---|---|---|---|---|"]


def config_of(root: Any, variant: str) -> RunConfig:
    config = small_config(root, "warmup.steps=0", "trainer.prompts_per_step=4", "rollout.sampling.n=2", *VARIANTS[variant])
    return config.model_copy(update={"model": ModelConfig(path="char_llama", dtype=config.model.dtype, override_config=TINY)})


# -- a real step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["as drawn", "every term in float64", "estimator of tokens"])
def test_a_real_step_makes_the_columns_that_the_dataflow_declares(variant, tmp_path):
    """The steps of the driver are given only the columns that they declare, and the workers check theirs: see below."""
    config = config_of(tmp_path, variant)
    [plan], session = PPOTrainer.plans(config, config.model), SimpleNamespace(spans=Spans(), updating=lambda: None)
    task, logged = prepare(config), []
    session.end_step = lambda step, metrics, **others: logged.append(metrics)
    with (
        Scorer(task, config.reward) as scorer,
        WorkerGroup(ResourcePool([1]), plan.init, runtime="inline", threads_per_rank=1) as group,
    ):
        context: Any = (config, Groups(dict.fromkeys(plan.roles, group)), task, scorer, load_tokenizer(config.model), session)
        trainer = PPOTrainer(TrainerContext(*context))
        trainer.sync()
        batch = trainer.advantages(trainer.log_probs(trainer.score(trainer.rollout(1)), 1), 1)
        metrics = trainer.update(batch)
        trainer.log(1, batch, metrics, Traffic())
        rows = batch.get()
        update = trainer.steps["update_actor"]
        for column in update.reads:
            sent = DataProtoFuture.of(rows).select([name for name in update.reads if name != column], [], [])
            with pytest.raises(PodiumError, match=f"'{column}'"):
                group.call.update_actor(sent.union(DataProto(meta_info={"num_mini_batches": 1})).as_argument())
    assert column_names(rows) == {name for step in trainer.steps.values() for name in step.writes or ()}
    is_of_tokens = variant == "estimator of tokens"
    check_fields(rows, [FIELDS[name] for name in column_names(rows) if not (is_of_tokens and name in ("advantages", "returns"))])
    assert rows.batch["advantages"].is_nested == is_of_tokens
    assert "actor/pg_loss" in logged[0]


def test_the_warm_ups_step_reads_what_it_declares(tmp_path):
    config = config_of(tmp_path, "plain").model_copy(update={"warmup": WarmupConfig(steps=1, batch_rows=4)})
    task, tokenizer = prepare(config), load_tokenizer(config.model)
    batch_step, update_step = SFTTrainer.dataflow()
    spec = TrainingSpec(config.model, config.actor.engine, config.warmup.optim, config.warmup.steps, config.seed)
    session: Any = SimpleNamespace(spans=Spans(), updating=lambda: None)
    with WorkerGroup(ResourcePool([1]), Init(TrainingWorker, spec), runtime="inline", threads_per_rank=1) as group:
        trainer = SFTTrainer(config, Groups({"actor": group}), task, tokenizer, session)
        group.call.set_loss_fn(trainer.loss)
        batch = trainer.batch(1)
        assert column_names(batch) == set(batch_step.writes or ()) == set(update_step.reads)
        assert "loss" in trainer.update(batch)
        for column in update_step.reads:
            with pytest.raises((PodiumError, KeyError)):
                trainer.update(batch.select([name for name in update_step.reads if name != column]))


# -- steps of the driver -----------------------------------------------------------------------------------------------


@row_step(reads=["x", "name"], writes=["y"])
def doubled(rows: DataProto, *, by: int = 2) -> DataProto:
    return DataProto({"y": rows.batch["x"] * by})


def batch_of(*names: str) -> DataProtoFuture:
    columns = {name: torch.tensor([1.0, 2.0, 3.0]) for name in names}
    return DataProtoFuture.of(DataProto(columns, {"name": ["a", "b", "c"]}))


def test_a_step_is_given_only_the_columns_that_it_declares():
    seen: list[set[str]] = []
    step = replace(doubled, function=lambda rows: seen.append(column_names(rows)) or DataProto({"y": rows.batch["x"]}))
    step.on(batch_of("x", "z"))
    assert seen == [{"x", "name"}]


def test_a_step_is_a_plain_function_of_rows():
    assert doubled(DataProto({"x": torch.tensor([1.0])}), by=3).batch["y"].tolist() == [3.0]


def test_a_step_does_not_see_padding_rows_and_leaves_them_empty():
    padded = pad_dataproto_to_divisor(batch_of("x").get(), 4)[0]
    found = doubled.on(DataProtoFuture.of(padded)).get()
    assert found.batch["y"].tolist() == [2.0, 4.0, 6.0, 0.0]
    assert found.padding_mask.tolist() == [False, False, False, True]


def test_a_step_may_change_a_column_that_it_reads():
    step = replace(doubled, function=lambda rows: DataProto({"x": rows.batch["x"] + 1}), writes=("x",))
    assert step.on(batch_of("x")).get().batch["x"].tolist() == [2.0, 3.0, 4.0]


def test_a_step_that_lacks_a_column_or_writes_another_is_an_error():
    with pytest.raises(DataError, match="the step 'doubled' reads the column 'x', which the rows do not have"):
        doubled.on(batch_of("z"))
    with pytest.raises(DataError, match="the step 'doubled' must write z, got y"):
        replace(doubled, writes=("z",)).on(batch_of("x"))


# -- the dataflow --------------------------------------------------------------------------------------------------------


def gap(*steps: Step) -> str:
    with pytest.raises(DataError) as caught:
        check_dataflow(steps)
    return str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trainers_own_dataflow_is_complete_and_needs_each_of_its_steps(variant, tmp_path):
    steps = PPOTrainer.dataflow(config_of(tmp_path, variant))
    check_dataflow(steps)
    for number, step in enumerate(steps):
        if step.writes and step.name != "mask_unscored":  # which changes a column that is there
            assert "which no step before makes" in gap(*steps[:number], *steps[number + 1 :])


def test_a_column_that_is_made_too_late_names_its_maker():
    found = gap(Step("first", (), ("a",)), Step("second", ("a", "b"), ("c",)), Step("third", ("c",), ("b",)))
    assert found == (
        "second reads the column 'b', which no step before makes: third makes it, but does not run before; made so far: a"
    )
    assert "own makes it, but does not run before; made so far: none" in gap(Step("own", ("x",), ("x",)))


def test_a_column_of_no_step_is_described_and_an_unknown_one_gets_the_nearest_name():
    assert "no step of this trainer makes it (float32 [B])" in gap(Step("estimate", ("returns",), ()))
    assert "no step makes a column of that name; did you mean 'advantages'?" in gap(Step("update", ("advantage",), ()))


def test_nothing_is_checked_behind_a_step_that_does_not_declare_what_it_writes():
    check_dataflow([Step("first", (), None), Step("second", ("anything",), ())])
    assert "'a'" in gap(Step("first", ("a",), None))


def test_a_provider_is_added_where_a_step_reads_what_it_makes():
    provider = Step("values", ("tokens",), ("values",), "critic")
    first, last = Step("first", (), ("tokens",)), Step("last", ("values",), ())
    assert with_providers([first, last], [provider], after="first") == [first, provider, last]
    assert with_providers([first], [provider], after="first") == [first]
    assert roles_of([first, provider, last]) == ("critic",)


@pytest.mark.parametrize(("settings", "has_reference"), [((), False), ((KL_LOSS,), True), ((KL_REWARD,), True)])
def test_the_reference_is_a_role_where_a_kl_term_reads_its_log_probs(settings, has_reference, tmp_path):
    config = small_config(tmp_path, *settings)
    assert ("ref" in roles_of(PPOTrainer.dataflow(config))) == has_reference
    unused = config.model_copy(update={"ref": config.ref.model_copy(update={"model": "char_llama"})})
    if has_reference:
        prepare(unused)
    else:
        with pytest.raises(ConfigError, match=r"ref\.model=char_llama is not used: set actor\.use_kl_loss=true or"):
            prepare(unused)


def test_a_workers_step_is_what_the_method_declares():
    class Own(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO, reads=["a"], writes=["b"])
        def declared(self, batch: DataProto) -> DataProto:
            return batch

        @register(Dispatch.DP_COMPUTE_PROTO)
        def silent(self, batch: DataProto) -> DataProto:
            return batch

        def plain(self) -> None: ...

    assert worker_step("actor", Own.declared, also_reads=("c",)) == Step("declared", ("a", "c"), ("b",), "actor")
    assert worker_step("actor", Own.silent) == Step("silent", (), None, "actor")
    with pytest.raises(RegistrationError, match="plain must be registered"):
        worker_step("actor", Own.plain)


def test_the_group_refuses_rows_without_a_column_that_a_method_reads():
    class Own(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO, reads=["a"], writes=["b"])
        def declared(self, batch: DataProto) -> DataProto:
            return batch

    with (
        WorkerGroup(ResourcePool([1]), Init(Own), runtime="inline") as group,
        pytest.raises(DispatchError, match=r"\.declared .* reads the column 'a', which no batch of the call has"),
    ):
        group.call.declared(DataProto({"b": torch.ones(1)}))


def test_a_run_with_a_gap_is_refused_before_anything_starts(monkeypatch, tmp_path):
    config, sft = config_of(tmp_path, "plain"), SFTTrainer.dataflow()
    monkeypatch.setattr(SFTTrainer, "dataflow", staticmethod(lambda: sft[1:]))
    assert prepare(config).train  # without a warm-up
    with pytest.raises(ConfigError, match="train_batch reads the column 'input_ids', which no step before makes"):
        prepare(config.model_copy(update={"warmup": WarmupConfig(steps=1, batch_rows=4)}))
    steps = [step for step in PPOTrainer.dataflow(config) if step.name != "score"]
    monkeypatch.setattr(PPOTrainer, "dataflow", staticmethod(lambda config: steps))
    with pytest.raises(ConfigError, match="reads the column 'is_scored', which no step before makes"):
        prepare(config)


def test_an_estimator_that_reads_a_column_of_no_step_is_refused_before_the_start(tmp_path):
    with pytest.raises(ConfigError, match="advantages reads the column 'values', which no step before makes"):
        prepare(small_config(tmp_path, f"algorithm.adv_estimator={Path(__file__).parent / 'own_parts.py'}:NeedsCritic"))


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_an_estimator_that_compares_samples_needs_two_of_each_prompt(name, tmp_path):
    with pytest.raises(
        ConfigError, match=rf"{name} compares the samples of a prompt: rollout\.sampling\.n must be at least 2, got 1"
    ):
        prepare(small_config(tmp_path, f"algorithm.adv_estimator={name}", "rollout.sampling.n=1"))


# -- the page ----------------------------------------------------------------------------------------------------------


def line(field: Field, steps: list[Step]) -> str:
    makers = dict.fromkeys(step.name for step in steps if field.name in (step.writes or ()))
    readers = dict.fromkeys(step.name for step in steps if field.name in step.reads)
    made_by, read_by = (", ".join(f"`{name}`" for name in names) for names in (makers, readers))
    return f"| `{field.name}` | {field.kind} | {made_by} | {read_by} | {field.meaning} |"


def test_the_page_shows_the_table_of_columns_with_their_makers_and_readers(tmp_path):
    steps = [step for variant in VARIANTS for step in PPOTrainer.dataflow(config_of(tmp_path, variant))]
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(HEAD[0])
    stop = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    assert lines[start:stop] == [*HEAD, *(line(field, steps) for field in FIELDS.values())]
    assert set(report.LOGGED_COLUMNS) <= FIELDS.keys()

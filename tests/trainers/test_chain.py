"""The chain of a trainer's steps: gaps are found, and what it says of each step is what a real step reads and makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from podium.algorithms import SFTLoss
from podium.config import ModelConfig, RunConfig, WarmupConfig
from podium.errors import DataError, DispatchError, PodiumError, RegistrationError
from podium.models import load_tokenizer
from podium.observability import Metrics, Spans
from podium.protocol import DataProto, check_fields, column_names
from podium.single_controller import DataProtoFuture, Dispatch, Init, ResourcePool, Traffic, Worker, WorkerGroup, register
from podium.single_controller.routing.registration import registration_of
from podium.tasks import Scorer
from podium.trainers import PPOTrainer, SFTTrainer
from podium.trainers.chain import Link, check_chain, ppo_links, sft_links, worker_link
from podium.trainers.launch import policy_spec
from podium.trainers.preflight import prepare
from podium.workers import FIELDS, ActorRolloutRefWorker, TrainingSpec, TrainingWorker
from tests.trainers.builders import small_config

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
RECOMPUTED, AS_DRAWN = "actor.recompute_old_log_probs=true", "actor.recompute_old_log_probs=false"
KL_LOSS, KL_REWARD = "actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"
VARIANTS = {
    "plain": (RECOMPUTED,),
    "as drawn": (AS_DRAWN,),
    "kl loss": (RECOMPUTED, KL_LOSS, "actor.epochs=2"),
    "kl in reward": (AS_DRAWN, KL_REWARD),
    "both in float64": (RECOMPUTED, KL_LOSS, KL_REWARD, "model.dtype=float64"),
}
MAY_READ = {("rollout_log_probs", "compute_log_prob"), ("reward_kl", "advantages")}
"""Columns that a step makes use of where they are there, and does without."""
OF_LOG_PROBS = ("compute_ref_log_prob", "compute_log_prob", "log_probs")
"""The links that are one step of the trainer."""


def config_of(root: Any, variant: str) -> RunConfig:
    config = small_config(root, "warmup.steps=0", "trainer.prompts_per_step=4", "rollout.sampling.n=2", *VARIANTS[variant])
    return config.model_copy(update={"model": ModelConfig(path="char_llama", dtype=config.model.dtype, override_config=TINY)})


# -- a real step -------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A trainer whose group is alive, and the rows of one step as each part of it left them."""

    trainer: PPOTrainer
    group: WorkerGroup[ActorRolloutRefWorker]
    rows: dict[str, DataProto]
    links: dict[str, Link]

    def before(self, link: str) -> DataProto:
        """What the link was given."""
        if link == "generate_sequences":
            drawn = self.rows["rollout"]
            return drawn[drawn.batch["sample_index"] == 0].select(["prompts"], ["uid", "problem"])
        where = {"score": "rollout", **dict.fromkeys(OF_LOG_PROBS, "score"), "advantages": "log_probs"}
        return self.rows[where.get(link, "advantages")].clone()

    def run(self, link: str, rows: DataProto) -> Any:
        """Do the link's work on other rows; a worker's without the check of its group."""
        trainer, rows = self.trainer, rows.clone()
        own: dict[str, Callable[[DataProtoFuture], Any]] = {
            "score": trainer.score,
            "log_probs": lambda rows: trainer.log_probs(rows, 2),
            "advantages": lambda rows: trainer.advantages(rows, 1),
            "log": lambda rows: trainer.log(1, rows, Metrics(), Traffic()),
        }
        if link in own:
            return own[link](DataProtoFuture.of(rows))
        trainer.sync()
        rows.meta_info |= {"num_mini_batches": 1}
        return self.group.execute_all_sync(link, rows)[0]


@pytest.fixture(scope="module", params=VARIANTS)
def step(request, tmp_path_factory) -> Iterator[Step]:
    config = config_of(tmp_path_factory.mktemp("chain"), request.param)
    task, tokenizer = prepare(config), load_tokenizer(config.model)
    role = "actor_rollout_ref" if config.needs_reference else "actor_rollout"
    init = Init(ActorRolloutRefWorker, policy_spec(config, config.model), role)
    session: Any = SimpleNamespace(spans=Spans(), end_step=lambda *args, **kwargs: None, updating=lambda: None)
    with (
        Scorer(task, config.reward) as scorer,
        WorkerGroup(ResourcePool([1]), init, runtime="inline", threads_per_rank=1) as group,
    ):
        trainer = PPOTrainer(config, group, task, scorer, tokenizer, session)
        trainer.sync()
        batch, rows = trainer.rollout(1), {}
        rows["rollout"] = batch.get()
        batch = trainer.score(batch)
        rows["score"] = batch.get()
        batch = trainer.log_probs(batch, 1)
        rows["log_probs"] = batch.get()
        rows["advantages"] = trainer.advantages(batch, 1).get()
        yield Step(trainer, group, rows, {link.name: link for link in ppo_links(config)})


def only(rows: DataProto, names: set[str]) -> DataProto:
    return rows.select([name for name in rows.batch if name in names], [name for name in rows.non_tensor_batch if name in names])


def test_every_column_of_a_step_is_in_the_table_as_it_really_is(step):
    rows = step.rows["advantages"]
    assert column_names(rows) == {name for link in step.links.values() for name in link.writes or ()}
    check_fields(rows, [FIELDS[name] for name in column_names(rows)])


def test_each_link_writes_what_it_says(step):
    names = {part: column_names(rows) for part, rows in step.rows.items()}
    says = {name: set(link.writes or ()) for name, link in step.links.items()}
    assert names["rollout"] == says["rollout"] | says["generate_sequences"]
    assert names["score"] - names["rollout"] == says["score"]
    assert names["log_probs"] - names["score"] == set().union(*(says.get(link, set()) for link in OF_LOG_PROBS))
    assert names["advantages"] - names["log_probs"] == says["advantages"] - {"response_mask"}  # which it changes
    for link in ("compute_ref_log_prob", "compute_log_prob", "update_actor"):
        if link in step.links:
            assert column_names(step.run(link, step.before(link))) == says[link]


def test_each_link_reads_what_it_says_and_no_more(step):
    for name, link in step.links.items():
        if name == "rollout":
            continue
        rows, reads = step.before(name), set(link.reads)
        if name == "advantages":
            rows.batch["is_scored"][0] = False  # only then is there a mask to be changed
        beside = {"input_ids", "responses"} if name == "log_probs" else set()  # for those that share its step
        step.run(name, only(rows, reads | beside))
        for column in link.reads:
            with pytest.raises((PodiumError, KeyError)):
                step.run(name, only(rows, column_names(rows) - {column}))


def test_the_group_refuses_rows_without_a_column_that_a_method_reads(step):
    workers = [name for name in step.links if registration_of(getattr(ActorRolloutRefWorker, name, None))]
    assert {"generate_sequences", "update_actor"} <= set(workers)
    for name in workers:
        rows, call = step.before(name), getattr(step.group.call, name)
        for column in worker_link(getattr(ActorRolloutRefWorker, name)).reads:
            with pytest.raises(DispatchError, match=rf"\.{name} .* reads the column '{column}', which no batch of the call has"):
                call(only(rows, column_names(rows) - {column}))


def test_the_table_names_all_who_make_and_read_a_column(tmp_path):
    links = [link for variant in VARIANTS for link in ppo_links(config_of(tmp_path, variant))]
    for name, field in FIELDS.items():
        assert set(field.made_by) == {link.name for link in links if name in (link.writes or ())}, name
        may_read = {reader for column, reader in MAY_READ if column == name}
        assert set(field.read_by) == {link.name for link in links if name in link.reads} | may_read, name


# -- the warm-up -------------------------------------------------------------------------------------------------------


def test_the_warm_ups_links_read_and_write_what_they_say(tmp_path):
    config = config_of(tmp_path, "plain").model_copy(update={"warmup": WarmupConfig(steps=1, batch_rows=4)})
    task, tokenizer = prepare(config), load_tokenizer(config.model)
    batch_link, update_link = sft_links()
    spec = TrainingSpec(config.model, config.actor.engine, config.warmup.optim, config.warmup.steps, config.seed)
    session: Any = SimpleNamespace(spans=Spans(), updating=lambda: None)
    with WorkerGroup(ResourcePool([1]), Init(TrainingWorker, spec), runtime="inline", threads_per_rank=1) as group:
        trainer = SFTTrainer(config, group, task, tokenizer, session)
        trainer.model.set_loss_fn(SFTLoss())
        batch = trainer.batch(1)
        assert column_names(batch) == set(batch_link.writes or ())
        assert "loss" in trainer.update(only(batch, set(update_link.reads)))
        for column in update_link.reads:
            with pytest.raises((PodiumError, KeyError)):
                trainer.update(only(batch, column_names(batch) - {column}))
    check_chain([batch_link, update_link])
    assert "nobody made before" in gap(update_link)


def test_a_warm_up_with_a_gap_is_refused_before_anything_starts(monkeypatch, tmp_path):
    config = config_of(tmp_path, "plain")
    monkeypatch.setattr("podium.trainers.preflight.sft_links", lambda: [link for link in sft_links() if link.name != "batch"])
    assert prepare(config).train  # there is no warm-up
    with pytest.raises(DataError, match="train_batch reads the column 'input_ids', which nobody made before"):
        prepare(config.model_copy(update={"warmup": WarmupConfig(steps=1, batch_rows=4)}))


# -- gaps --------------------------------------------------------------------------------------------------------------


def gap(*links: Link) -> str:
    with pytest.raises(DataError) as caught:
        check_chain(links)
    return str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_trainers_own_chain_has_no_gap_and_needs_each_of_its_links(variant, tmp_path):
    links = ppo_links(config_of(tmp_path, variant))
    check_chain(links)
    for number, link in enumerate(links):
        without = [*links[:number], *links[number + 1 :]]
        if link.writes:
            assert "nobody made before" in gap(*without)


def test_a_gap_says_who_reads_and_who_could_make_the_column(tmp_path):
    links = {link.name: link for link in ppo_links(config_of(tmp_path, "kl loss"))}
    del links["compute_ref_log_prob"]
    found = gap(*links.values())
    assert found.startswith(
        "update_actor reads the column 'ref_log_prob', which nobody made before: compute_ref_log_prob could make it "
        "(float32 or float64 [B, *]), and is no step before it; made so far: prompts, uid, problem, responses, "
    )


def test_a_column_that_is_made_too_late_says_by_whom():
    found = gap(Link("first", (), ("a",)), Link("second", ("a", "b"), ("c",)), Link("third", ("c",), ("b",)))
    assert found == ("second reads the column 'b', which nobody made before: third makes it, but only afterwards; made so far: a")
    assert "own makes it, but only afterwards; made so far: none" in gap(Link("own", ("x",), ("x",)))


def test_a_column_that_nobody_knows_is_answered_with_the_nearest():
    assert "nobody is known to make it; did you mean 'advantages'?; made" in gap(Link("update", ("advantage",), ()))


def test_behind_a_link_that_does_not_say_what_it_writes_nothing_is_told():
    check_chain([Link("first", (), None), Link("second", ("anything",), ())])
    assert "'a'" in gap(Link("first", ("a",), None))


def test_a_workers_link_is_what_the_method_declares():
    class Own(Worker):
        @register(Dispatch.DP_COMPUTE_PROTO, reads=["a"], writes=["b"])
        def declared(self, batch: DataProto) -> DataProto:
            return batch

        @register(Dispatch.DP_COMPUTE_PROTO)
        def silent(self, batch: DataProto) -> DataProto:
            return batch

        def plain(self) -> None: ...

    assert worker_link(Own.declared, also_reads=("c",)) == Link("declared", ("a", "c"), ("b",))
    assert worker_link(Own.silent) == Link("silent", (), None)
    with pytest.raises(RegistrationError, match="plain is not registered"):
        worker_link(Own.plain)


def test_a_trainer_is_refused_before_anything_starts(monkeypatch, tmp_path):
    def without_rewards(config: RunConfig) -> Iterator[Link]:
        for link in ppo_links(config):
            yield replace(link, writes=tuple(name for name in link.writes or () if name != "rewards"))

    config = config_of(tmp_path, "plain")
    monkeypatch.setattr("podium.trainers.preflight.ppo_links", lambda config: list(without_rewards(config)))
    with pytest.raises(DataError, match=r"advantages reads the column 'rewards', .*: score could make it"):
        prepare(config)
    assert prepare(config, is_trained=False).train  # a model that is only tried has no such steps

"""`ActorRolloutRefWorker`: the policy that learns, the copy of it that generates, and the reference that it is held to.

A role says which of the three a group builds; they live side by side on each rank.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from podium.algorithms import Aggregation, KLTerm, PolicyLoss
from podium.checkpoint import WrittenFiles
from podium.config import ActorConfig, ModelConfig, ProfilerConfig, RolloutConfig, SamplingConfig
from podium.engines import pick_device
from podium.errors import ConfigError, unknown_name
from podium.models import load_model, load_tokenizer
from podium.observability import LAYOUT_FRAC, LOG_PROB_GAP, Max, Mean, Metrics
from podium.parts import POLICY_LOSSES, ROLLOUTS
from podium.protocol import DataProto, object_column, without_padding
from podium.protocol.jagged import parts
from podium.rollout import BaseRollout, RolloutContext
from podium.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from podium.weights import named_weights
from podium.workers.profiling import DistProfiler, DistProfilerExtension
from podium.workers.training import TrainingSpec, TrainingWorker

ACTOR_MESH = make_nd_compute_dataproto_dispatch_fn("actor")
ROLLOUT_MESH = make_nd_compute_dataproto_dispatch_fn("rollout")
REF_MESH = make_nd_compute_dataproto_dispatch_fn("ref")

Role = Literal["actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref"]
Part = Literal["ref", "actor", "rollout"]

ROLES: dict[str, tuple[Part, ...]] = {
    "actor": ("actor",),
    "rollout": ("rollout",),
    "ref": ("ref",),
    "actor_rollout": ("actor", "rollout"),
    "actor_rollout_ref": ("ref", "actor", "rollout"),
}
"""Which parts each role builds, by verl's names, in the order of building: the rollout last, to see what memory is left."""

P = TypeVar("P")


@dataclass(frozen=True)
class PolicySpec:
    """What the worker is built from; `total_optimizer_steps` ends the learning-rate schedule.

    `ref_model` is the reference model, None for the one that the actor starts from. `profiler` None records nothing.
    """

    model: ModelConfig
    actor: ActorConfig
    rollout: RolloutConfig
    total_optimizer_steps: int
    seed: int
    ref_model: ModelConfig | None = None
    profiler: ProfilerConfig | None = None


class ActorRolloutRefWorker(Worker, DistProfilerExtension):
    """The parts of a role: actor, rollout and reference. A method of a part that the role has not is a ConfigError.

    The rollout owns its weights: `update_weights` copies the actor's into it. Until then, and after each update of the actor,
    generating is refused (`StaleWeightsError`). A rollout without an actor generates with the start model, as version 0. The
    reference has no optimizer, never changes and is in no checkpoint: a resumed run builds it from the same model again.
    """

    def __init__(self, spec: PolicySpec, role: Role = "actor_rollout") -> None:
        if role not in ROLES:
            raise ConfigError(unknown_name("role", role, ROLES))
        DistProfilerExtension.__init__(self, DistProfiler(self.rank, spec.profiler))  # first, since it may be refused
        self.spec, self.role = spec, role
        self._ref: TrainingWorker | None = None
        self._actor: TrainingWorker | None = None
        self._rollout: BaseRollout | None = None
        model = load_model(spec.model, seed=spec.seed)
        # The actor takes the model over, and may spread it over the ranks: copies are taken before.
        own_model = copy.deepcopy(model) if "rollout" in ROLES[role] else None
        if "ref" in ROLES[role]:
            self._ref = _reference(spec, model)
        if "actor" in ROLES[role]:
            self._actor = _actor(spec, model)
        if own_model is not None:
            self._rollout = self._build_rollout(own_model)
        for part, worker in (("actor", self._actor), ("ref", self._ref)):
            # A part that is missing gets the plain mesh, so that its methods are reached and can say so.
            where = (worker.engine.dp_rank, worker.engine.is_collect) if worker else (self.rank, True)
            self._register_dispatch_collect_info(part, *where)
        self._register_dispatch_collect_info("rollout", self.rank, True)

    @property
    def actor(self) -> TrainingWorker:
        return self._built("actor", self._actor)

    @property
    def rollout(self) -> BaseRollout:
        return self._built("rollout", self._rollout)

    @property
    def ref(self) -> TrainingWorker:
        return self._built("ref", self._ref)

    @register(
        dispatch_mode=ROLLOUT_MESH,
        by_reference=True,
        reads=["prompts", "uid"],
        writes=[
            *("responses", "input_ids", "response_mask", "rollout_log_probs"),
            *("response", "sample_index", "weight_version", "finish_reason"),
        ],
    )
    @DistProfiler.annotate()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to `prompts` [B, *], `sampling.n` rows a prompt, interleaved; see `BaseRollout.generate` for the columns.

        And objects `response`, the text of each without special tokens.

        Meta: `step` keys the randomness together with the spec's seed; `sampling` replaces the spec's sampling.
        """
        self.rollout.require_version(self._actor.engine.version if self._actor else None)
        sampling: SamplingConfig = prompts.meta_info.get("sampling", self.spec.rollout.sampling)
        rows = self.rollout.generate(prompts, sampling, seed=self.spec.seed, step=prompts.meta_info["step"])
        rows.non_tensor_batch["response"] = object_column(self._texts(rows))
        rows.meta_info["rollout_metrics"] = Metrics({"rollout/neg_log_prob": _mean(-parts(rows.batch["rollout_log_probs"])[0])})
        return rows

    @register(dispatch_mode=ACTOR_MESH, by_reference=True, reads=["input_ids", "responses"], writes=["old_log_probs"])
    @DistProfiler.annotate()
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """The actor's log-probs of the responses: jagged `old_log_probs` [B, *] float32, or float64 for a model in float64.

        Where the batch has `rollout_log_probs`, the meta says in `log_prob_metrics` how far they are from these.
        """
        rows = self.actor.infer_batch(batch).rename("log_probs", "old_log_probs")
        if "rollout_log_probs" in batch.batch:
            drawn, computed = _real(batch, "rollout_log_probs"), _real(rows, "old_log_probs")
            gap_N, layouts = (drawn - computed).abs(), self.actor.engine.layouts
            metrics = {LOG_PROB_GAP: Max(float(gap_N.max()) if len(gap_N) else 0.0)}
            shares = {LAYOUT_FRAC + name: Mean(count, sum(layouts.values())) for name, count in layouts.items()}
            rows.meta_info["log_prob_metrics"] = Metrics({**metrics, **shares})
        return rows

    @register(dispatch_mode=REF_MESH, by_reference=True, reads=["input_ids", "responses"], writes=["ref_log_prob"])
    @DistProfiler.annotate()
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """The reference's log-probs of the responses: jagged `ref_log_prob` [B, *] float32, or float64 for a model in float64."""
        return self.ref.infer_batch(batch).rename("log_probs", "ref_log_prob")

    @register(
        dispatch_mode=ACTOR_MESH,
        reads=["input_ids", "responses", "mini_batch"],
        writes=[],
    )
    @DistProfiler.annotate()
    def update_actor(self, batch: DataProto) -> DataProto:
        """Epochs times mini-batches of policy updates; see `TrainingWorker.train_mini_batch`.

        It reads the columns of the policy's loss too: `policy_loss(actor).reads`.
        """
        return self.actor.train_mini_batch(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self) -> int:
        """Copy the actor's weights and buffers into the rollout; returns their version."""
        version = self.actor.engine.version
        self.rollout.update_weights(self.actor.engine.named_weights(), version=version)
        return version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> WrittenFiles:
        """Write what a resumed run needs of the actor; the rollout is filled again by `update_weights`."""
        return self.actor.save_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Take back what `save_checkpoint` wrote."""
        self.actor.load_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, local_path: str) -> WrittenFiles:
        """Write the actor and its tokenizer as a folder that `from_pretrained` loads."""
        return self.actor.save_hf(local_path)

    def _build_rollout(self, model: PreTrainedModel) -> BaseRollout:
        settings, self._tokenizer = self.spec.rollout, load_tokenizer(self.spec.model)
        context = RolloutContext(
            model=self.spec.model,
            settings=settings,
            tokenizer=self._tokenizer,
            seed=self.spec.seed,
            rank=self.rank,
            world_size=self.world_size,
            device=pick_device(),
            loader=lambda: model,
        )
        rollout: BaseRollout = ROLLOUTS.resolve(settings.name, settings.source)(context)
        if self._actor is None:
            rollout.update_weights(named_weights(model), version=0)
        return rollout

    def _texts(self, rows: DataProto) -> list[str]:
        """The text of each row's `responses`, special tokens left out."""
        values, offsets = parts(rows.batch["responses"])
        tokens, ends = values.tolist(), offsets.tolist()
        texts: list[str] = self._tokenizer.batch_decode(
            [tokens[start:stop] for start, stop in pairwise(ends)], skip_special_tokens=True
        )
        return texts

    def _built(self, name: Part, part: P | None) -> P:
        if part is None:
            able = ", ".join(role for role, parts in ROLES.items() if name in parts)
            raise ConfigError(f"a worker of role {self.role!r} has no {name}; roles that have one: {able}")
        return part


def _real(batch: DataProto, key: str) -> Tensor:
    """[N] values of a jagged column, end to end, without those of padding rows."""
    return parts(without_padding(batch.select([key], [], [])).batch[key])[0]


def _mean(values: Tensor) -> Mean:
    return Mean(float(values.sum(dtype=torch.float64)), float(len(values)))


def _reference(spec: PolicySpec, start: PreTrainedModel) -> TrainingWorker:
    model = copy.deepcopy(start) if spec.ref_model is None else load_model(spec.ref_model, seed=spec.seed)
    mine, theirs = (one.config.get_text_config().vocab_size for one in (start, model))
    if mine != theirs:
        raise ConfigError(f"ref.model has {theirs} tokens, the policy {mine}: their log-probs cannot be compared")
    config = spec.ref_model or spec.model
    return TrainingWorker(TrainingSpec(config, spec.actor.engine, None, total_steps=0, seed=spec.seed), model)


def _actor(spec: PolicySpec, model: PreTrainedModel) -> TrainingWorker:
    actor = spec.actor
    training = TrainingSpec(spec.model, actor.engine, actor.optim, spec.total_optimizer_steps, spec.seed, actor.dropout)
    worker = TrainingWorker(training, model)
    worker.set_loss_fn(policy_loss(actor))
    return worker


def policy_loss(actor: ActorConfig) -> PolicyLoss:
    """The loss that the settings ask for."""
    return PolicyLoss(
        POLICY_LOSSES.resolve(actor.loss.name, actor.loss.source)(actor.loss),
        aggregation=Aggregation(actor.loss_agg_mode, actor.loss_scale_factor),
        drop_zero_advantage=actor.drop_zero_advantage,
        entropy_coeff=actor.entropy_coeff,
        calculate_entropy=actor.calculate_entropy,
        kl=KLTerm(actor.kl_loss_coef, actor.kl_loss_type) if actor.use_kl_loss else None,
    )

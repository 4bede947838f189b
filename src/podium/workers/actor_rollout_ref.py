"""`ActorRolloutRefWorker`: the policy that learns and the copy of it that generates, side by side on each rank."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from podium.algorithms import PolicyLoss
from podium.algorithms.aggregation import Aggregation
from podium.config import ActorConfig, ModelConfig, RolloutConfig, SamplingConfig
from podium.engines import pick_device
from podium.errors import ConfigError
from podium.models import eos_token_ids, load_model, load_tokenizer
from podium.protocol import DataProto
from podium.rollout import build_rollout
from podium.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register
from podium.workers.training import TrainingSpec, TrainingWorker

ACTOR_MESH = make_nd_compute_dataproto_dispatch_fn("actor")
ROLLOUT_MESH = make_nd_compute_dataproto_dispatch_fn("rollout")
Role = Literal["actor_rollout_ref"]


@dataclass(frozen=True)
class PolicySpec:
    """What the worker is built from; `total_optimizer_steps` ends the learning-rate schedule."""

    model: ModelConfig
    actor: ActorConfig
    rollout: RolloutConfig
    total_optimizer_steps: int
    seed: int


class ActorRolloutRefWorker(Worker):
    """Actor and rollout of one model. The rollout owns its weights: `update_weights` copies the actor's into it.

    Until then, and after each update of the actor, generating is refused (`StaleWeightsError`). Of the roles, the combined
    one is built so far, and its reference model is not.
    """

    def __init__(self, spec: PolicySpec, role: Role = "actor_rollout_ref") -> None:
        if role not in get_args(Role):
            raise ConfigError(f"role must be one of {', '.join(get_args(Role))}, got {role!r}")
        self.spec, self.role = spec, role
        model = load_model(spec.model, seed=spec.seed)
        tokenizer = load_tokenizer(spec.model)
        own_model: nn.Module = copy.deepcopy(model)
        own_model.to(pick_device(self.local_rank))
        self.actor = TrainingWorker(
            TrainingSpec(spec.model, spec.actor.engine, spec.actor.optim, spec.total_optimizer_steps, spec.seed), model
        )
        self.actor.set_loss_fn(_policy_loss(spec.actor))
        self.rollout = build_rollout(
            spec.rollout.name,
            own_model,
            eos_token_ids=eos_token_ids(model, tokenizer),
            pad_token_id=int(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id),
            detokenize=lambda tokens: str(tokenizer.decode(list(tokens))),
            max_rows=spec.rollout.max_rows,
        )
        self._register_dispatch_collect_info("actor", self.actor.engine.dp_rank, self.actor.engine.is_collect)
        self._register_dispatch_collect_info("rollout", self.rank, True)

    @register(dispatch_mode=ROLLOUT_MESH)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Responses to `prompts` [B, *], `sampling.n` rows a prompt, interleaved; see `BaseRollout.generate` for the columns.

        Meta: `step` keys the randomness together with the spec's seed; `sampling` replaces the spec's sampling.
        """
        self.rollout.require_version(self.actor.engine.version)
        sampling: SamplingConfig = prompts.meta_info.get("sampling", self.spec.rollout.sampling)
        return self.rollout.generate(prompts, sampling, seed=self.spec.seed, step=prompts.meta_info["step"])

    @register(dispatch_mode=ACTOR_MESH)
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """The actor's log-probs of the responses: jagged `old_log_probs` [B, *] float32."""
        return self.actor.infer_batch(batch).rename("log_probs", "old_log_probs")

    @register(dispatch_mode=ACTOR_MESH)
    def update_actor(self, batch: DataProto) -> DataProto:
        """Epochs times mini-batches of policy updates; see `TrainingWorker.train_mini_batch`."""
        return self.actor.train_mini_batch(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self) -> int:
        """Copy the actor's weights and buffers into the rollout; returns their version."""
        version = self.actor.engine.version
        self.rollout.update_weights(self.actor.engine.named_weights(), version=version)
        return version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        """Write what a resumed run needs of the actor; the rollout is filled again by `update_weights`."""
        self.actor.save_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, local_path: str) -> None:
        """Take back what `save_checkpoint` wrote."""
        self.actor.load_checkpoint(local_path)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_hf(self, local_path: str) -> None:
        """Write the actor and its tokenizer as a folder that `from_pretrained` loads."""
        self.actor.save_hf(local_path)


def _policy_loss(actor: ActorConfig) -> PolicyLoss:
    return PolicyLoss(
        clip_low=actor.clip_ratio_low,
        clip_high=actor.clip_ratio_high,
        aggregation=Aggregation(actor.loss_agg_mode),
        drop_zero_advantage=actor.drop_zero_advantage,
    )

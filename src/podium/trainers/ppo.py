"""The driver's loop of RL: GRPO over a group of workers, written as one ordinary program.

Read `PPOTrainer.fit` first. Files, display, timing and checkpoints stand around the steps in `Session`; the mathematics is
in `podium.algorithms`, the models are in the workers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from podium.algorithms import group_ids, grpo_advantages, kl_of_rows
from podium.config import RunConfig, SamplingConfig
from podium.datasets import StepSampler, prompt_batch
from podium.errors import DataError
from podium.observability import VALIDATION_SCORE, Mean, Metrics
from podium.protocol import DataProto, interleave_groups, with_padding, without_padding
from podium.protocol.jagged import jagged, offsets_of, parts, row_ids
from podium.single_controller import DataProtoFuture, Traffic, WorkerGroup, recorded_traffic
from podium.tasks import Problem, Scorer, Task
from podium.trainers import report
from podium.trainers.evaluation import Evaluation, evaluate, greedy
from podium.trainers.session import Session, timed
from podium.workers import ActorRolloutRefWorker

logger = logging.getLogger(__name__)

UPDATE_COLUMNS = ["input_ids", "responses", "response_mask", "old_log_probs", "advantages", "mini_batch"]


class PPOTrainer:
    """Improves a policy by its own verified responses."""

    def __init__(
        self,
        config: RunConfig,
        group: WorkerGroup[ActorRolloutRefWorker],
        task: Task,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        session: Session,
    ) -> None:
        self.config, self.task, self.scorer, self.tokenizer, self.session = config, task, scorer, tokenizer, session
        self.group, self.policy = group, group.call
        self.sampler = StepSampler(num_problems=len(task.train), batch_size=config.trainer.prompts_per_step, seed=config.seed)

    def fit(self) -> None:
        """From the newest checkpoint, or from the start, through `trainer.total_steps` steps."""
        done = self.begin()
        with self.session.saved_when_interrupted(self.policy.save_checkpoint, self.group):
            for step in range(done + 1, self.config.trainer.total_steps + 1):
                with self.session.step() as traffic:
                    batch = self.rollout(step)
                    batch = self.score(batch)
                    batch = self.log_probs(batch, step)
                    batch = self.advantages(batch, step)
                    metrics = self.update(batch)
                    self.sync()
                self.log(step, batch, metrics, traffic)

    # -- the steps ----------------------------------------------------------------------------------------------------

    @timed
    def rollout(self, step: int) -> DataProtoFuture:
        """The policy's responses to the prompts of a step, `rollout.sampling.n` rows a prompt; tokens stay where they are."""
        problems = [self.task.train[row] for row in self.sampler.rows(step - 1)]
        texts, uids = [problem.prompt for problem in problems], [problem.uid for problem in problems]
        prompts = prompt_batch(texts, uids, self.tokenizer, chat_template=self.config.task.chat_template)
        prompts.meta_info["step"] = step
        batch = self.policy.generate_sequences(prompts)
        of_uid = dict(zip(uids, problems, strict=True))
        return batch.union(DataProto(non_tensor_batch={"problem": [of_uid[uid] for uid in _uids(batch)]}))

    @timed
    def score(self, batch: DataProtoFuture) -> DataProtoFuture:
        """Adds `rewards` [B] float32. A row whose reward failed, and that the policy leaves out, has NaN there and False in
        `is_scored` [B] bool. Padding rows are not scored: 0 and False."""
        rows = without_padding(batch).get(keys=["problem", "response"]).non_tensor_batch
        rewards = self.scorer(rows["problem"].tolist(), rows["response"].tolist())
        columns = {"rewards": torch.tensor(rewards.values), "is_scored": torch.tensor(rewards.is_scored)}
        scores = DataProto(columns, meta_info={"reward_metrics": rewards.metrics})
        return batch.union(with_padding(scores, batch.padding_mask))

    @timed
    def log_probs(self, batch: DataProtoFuture, step: int) -> DataProtoFuture:
        """Adds `old_log_probs` [B, *], by the trainer's forward pass or as drawn, and the reference's `ref_log_prob`.

        The first step compares rollout and trainer also where the update takes the rollout's.
        """
        columns = self._at_temperature(batch.select(["input_ids", "responses", "rollout_log_probs"], [], []))
        if self.config.needs_reference:
            batch = batch.union(
                self.policy.compute_ref_log_prob(columns.drop(["rollout_log_probs"]).as_argument()).select(meta_info_keys=[])
            )
        if self.config.actor.recompute_old_log_probs:
            return batch.union(self.policy.compute_log_prob(columns.as_argument()).select(meta_info_keys=["log_prob_metrics"]))
        if step == 1:
            batch = batch.union(self.policy.compute_log_prob(columns.as_argument()).select([], [], ["log_prob_metrics"]))
        return batch.union(batch.select(["rollout_log_probs"], [], []).rename("rollout_log_probs", "old_log_probs"))

    @timed
    def advantages(self, batch: DataProtoFuture, step: int) -> DataProtoFuture:
        """Adds `advantages` [B], the same for every token of a response, and each row's `mini_batch` per epoch.

        Rows whose `is_scored` is False are in no baseline and no loss: their `response_mask` becomes zero. Nor is a row in a
        baseline whose mask is zero already, or that is padding. With a KL penalty, `reward_kl` [B] is what it takes from each
        reward, before its coefficient.
        """
        groups_B, algorithm = group_ids(_uids(batch)), self.config.algorithm
        known = batch.get(keys=["rewards", "is_scored"]).batch
        is_scored_B, scores_B = known["is_scored"], known["rewards"].double()
        if not is_scored_B.all():
            offsets = offsets_of(batch.lengths("responses"))
            mask_N = parts(batch.get(keys=["response_mask"]).batch["response_mask"])[0] * is_scored_B[row_ids(offsets)]
            batch = batch.drop(["response_mask"]).union(DataProto({"response_mask": jagged(mask_N, offsets)}))
        if algorithm.use_kl_in_reward:
            batch = batch.union(self._kl_of_rewards(batch))
            scores_B = scores_B - algorithm.kl_coef * batch.get(keys=["reward_kl"]).batch["reward_kl"]
        is_compared_B = is_scored_B & _has_tokens(batch) & ~batch.padding_mask
        advantages_B = grpo_advantages(scores_B, groups_B, is_compared_B, norm_by_std=algorithm.norm_adv_by_std_in_grpo)
        return batch.union(DataProto({"advantages": advantages_B, "mini_batch": self._mini_batches(groups_B, step)}))

    @timed
    def update(self, batch: DataProtoFuture) -> Metrics:
        """Epochs times mini-batches of optimizer steps."""
        columns = batch.select([*UPDATE_COLUMNS, *(["ref_log_prob"] if self.config.actor.use_kl_loss else [])], [], [])
        mini_batches = batch.get(keys=["mini_batch"]).batch["mini_batch"]
        columns = columns[interleave_groups(mini_batches[:, 0])]  # so that each rank has its part of each
        number = self.config.trainer.prompts_per_step // self.config.mini_batch_prompts
        columns = self._at_temperature(columns, num_mini_batches=number)
        self.session.updating()
        metrics: Metrics = self.policy.update_actor(columns.as_argument()).meta_info["metrics"]
        return metrics.prefixed("actor")

    @timed
    def sync(self) -> None:
        """The rollout takes the new weights."""
        self.policy.update_weights()

    # -- around them --------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Take up the run: the step that is done. A fresh run is validated and saved as step 0."""
        done = self.session.begin("rl", self.policy.load_checkpoint, saves_step_zero=True)
        self.policy.update_weights()
        if done is not None and "before" not in self.session.run.read_report():
            logger.warning("%s has no scores from before the run any more: it goes on without them", self.session.run.report)
        if done is None:
            self.report_held_out("before", step=0)
            self.session.end_step(0, self.validation(0), self.policy.save_checkpoint)
        return done or 0

    def log(self, step: int, batch: DataProtoFuture, metrics: Metrics, traffic: Traffic) -> None:
        """Write and show what the step did, and validate and save where they are due; what is read of the step is added to
        `traffic`."""
        batch = without_padding(batch)
        with recorded_traffic(traffic):
            logged, tokens = batch.get(keys=report.LOGGED_COLUMNS), int(batch.lengths("input_ids").sum())
        metrics = metrics.merge([report.batch_metrics(logged, batch.lengths("responses")), self.validation(step)])
        samples = report.samples(logged, self.config.trainer.samples_per_step)
        save = self.policy.save_checkpoint
        self.session.end_step(step, metrics, save, tokens=tokens, samples=samples, traffic=traffic)

    def validation(self, step: int) -> Metrics:
        """The greedy score on the validation split, on the steps that ask for it."""
        every, last = self.config.trainer.val_freq, self.config.trainer.total_steps
        if not every or (step % every and step != last):
            return Metrics()
        with self.session.spans("validation"):
            result = self._evaluate(self.task.validation, greedy(self.config.rollout.sampling), step)
        return Metrics({VALIDATION_SCORE: Mean.of(result.rewards.scored), **result.rewards.metrics.prefixed("val")})

    def report_held_out(self, when: str, *, step: int) -> None:
        """Greedy and sampled scores on the held-out split into `report.json`; nothing else ever reads that split."""
        sampling = self.config.rollout.sampling
        self.session.announce(f"held-out evaluation, {when}: {len(self.task.held_out)} problems, greedy and sampled")
        with self.session.spans("held_out"):
            likeliest = self._evaluate(self.task.held_out, greedy(sampling), step)
            sampled = self._evaluate(self.task.held_out, sampling, step)
        self.session.run.write_report({when: report.held_out(self.task.held_out, likeliest, sampled)})

    def _evaluate(self, problems: Sequence[Problem], sampling: SamplingConfig, step: int) -> Evaluation:
        generate, chat_template = self.policy.generate_sequences, self.config.task.chat_template
        return evaluate(generate, self.scorer, problems, self.tokenizer, sampling, step=step, chat_template=chat_template)

    def _at_temperature(self, batch: DataProtoFuture, **meta: int) -> DataProtoFuture:
        return batch.union(DataProto(meta_info={"temperature": self.config.rollout.sampling.temperature, **meta}))

    def _kl_of_rewards(self, batch: DataProtoFuture) -> DataProto:
        rows = without_padding(batch).get(keys=["old_log_probs", "ref_log_prob", "response_mask"])
        kl_B = kl_of_rows(self.config.algorithm.kl_penalty, rows)
        penalty = Mean(float(kl_B.sum()), float(parts(rows.batch["response_mask"])[0].sum()))
        found = DataProto({"reward_kl": kl_B}, meta_info={"kl_metrics": Metrics({"actor/reward_kl_penalty": penalty})})
        return with_padding(found, batch.padding_mask)

    def _mini_batches(self, groups_B: Tensor, step: int) -> Tensor:
        """[B, epochs] int64: whole prompts go to a mini-batch, in the sampler's order first, shuffled in later epochs."""
        num_prompts, size = self.config.trainer.prompts_per_step, self.config.mini_batch_prompts
        places = [torch.arange(num_prompts)]
        for epoch in range(1, self.config.actor.epochs):
            places.append(torch.from_numpy(np.random.default_rng([self.config.seed, step, epoch]).permutation(num_prompts)))
        return torch.stack([place // size for place in places], dim=1)[groups_B]


def _has_tokens(batch: DataProtoFuture) -> Tensor:
    """[B] bool: whether the mask keeps a token of the row.

    Only a mask of this process is read. One that lies elsewhere is the rollout's own, which keeps every token.
    """
    if not batch.is_here("response_mask"):
        return batch.lengths("response_mask") > 0
    mask_N, offsets = parts(batch.get(keys=["response_mask"]).batch["response_mask"])
    return torch.zeros(len(batch), dtype=torch.int64).index_add_(0, row_ids(offsets), mask_N.bool().long()) > 0


def _uids(batch: DataProtoFuture) -> list[str]:
    if "uid" not in batch.column_names():
        raise DataError(f"the rows have no column 'uid', which says whose samples they are; there are: {batch!r}")
    uids: list[str] = batch.get(keys=["uid"]).non_tensor_batch["uid"].tolist()
    return uids

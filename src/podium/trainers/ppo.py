"""The driver's loop of RL over groups of workers, written as one ordinary program.

Read `PPOTrainer.fit` first. Its steps are functions of rows in `steps`, and methods of workers; the mathematics is in
`podium.algorithms`. Files, display, timing and checkpoints stand around the steps in `Session`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from podium.config import ModelConfig, RunConfig, SamplingConfig, total_optimizer_steps
from podium.datasets import StepSampler
from podium.observability import VALIDATION_SCORE, Mean, Metrics
from podium.protocol import DataProto, interleave_groups, without_padding
from podium.single_controller import DataProtoFuture, Init, Traffic, recorded_traffic
from podium.tasks import Problem
from podium.trainers import report, steps
from podium.trainers.base import Trainer, TrainerContext
from podium.trainers.dataflow import Step, roles_of, with_providers, worker_step
from podium.trainers.evaluation import Evaluation, evaluate, greedy
from podium.trainers.roles import GroupPlan
from podium.trainers.session import publish_model, timed
from podium.trainers.steps import advantage_estimator
from podium.workers import ActorRolloutRefWorker, PolicySpec, Role, policy_loss

logger = logging.getLogger(__name__)

COMPUTE_LOG_PROB = worker_step("actor", ActorRolloutRefWorker.compute_log_prob, also_reads=["rollout_log_probs"])
PROVIDERS = (worker_step("ref", ActorRolloutRefWorker.compute_ref_log_prob),)
"""Steps that are done where another step reads what they make; each brings its role into the run."""


class PPOTrainer(Trainer):
    """Improves a policy by its own scored responses."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context)
        config, groups = context.config, context.groups
        self.config, self.task, self.session = config, context.task, context.session
        self.scorer, self.tokenizer = context.scorer, context.tokenizer
        self.actor = groups.of("actor", ActorRolloutRefWorker).call
        self.generator = groups.of("rollout", ActorRolloutRefWorker).call
        self.reference = groups.of("ref", ActorRolloutRefWorker).call if "ref" in groups else None
        self.estimator, self.steps = advantage_estimator(config.algorithm), {step.name: step for step in self.dataflow(config)}
        self.sampler = StepSampler(
            num_problems=len(self.task.train), batch_size=config.trainer.prompts_per_step, seed=config.seed
        )

    def fit(self) -> None:
        """From the newest checkpoint, or from the start, through `trainer.total_steps` steps."""
        done = self.begin()
        with self.session.saved_when_interrupted():
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
        prompts = steps.prompts(problems, self.tokenizer, step=step, chat_template=self.config.task.chat_template)
        batch = self.generator.generate_sequences(prompts)
        return steps.problems.on(batch, {problem.uid: problem for problem in problems})

    @timed
    def score(self, batch: DataProtoFuture) -> DataProtoFuture:
        """Adds `rewards` and `is_scored`, both [B]."""
        return steps.score.on(batch, self.scorer)

    @timed
    def log_probs(self, batch: DataProtoFuture, step: int) -> DataProtoFuture:
        """Adds `old_log_probs` [B, *], by the trainer's forward pass or as drawn, and the reference's `ref_log_prob`.

        The first step compares rollout and trainer also where the update takes the rollout's.
        """
        if self.reference is not None:
            columns = self._at_temperature(self.steps["compute_ref_log_prob"].columns_of(batch))
            batch = batch.union(self.reference.compute_ref_log_prob(columns.as_argument()).select(meta_info_keys=[]))
        columns = self._at_temperature(COMPUTE_LOG_PROB.columns_of(batch))
        if self.config.actor.recompute_old_log_probs:
            return batch.union(self.actor.compute_log_prob(columns.as_argument()).select(meta_info_keys=["log_prob_metrics"]))
        if step == 1:
            batch = batch.union(self.actor.compute_log_prob(columns.as_argument()).select([], [], ["log_prob_metrics"]))
        return batch.union(batch.select(["rollout_log_probs"], [], []).rename("rollout_log_probs", "old_log_probs"))

    @timed
    def advantages(self, batch: DataProtoFuture, step: int) -> DataProtoFuture:
        """Adds `advantages`, and each row's `mini_batch` per epoch; with a KL penalty what it takes from each reward, too.

        Rows whose `is_scored` is False are in no baseline and no loss: their `response_mask` becomes zero.
        """
        config = self.config
        batch = steps.with_advantages(batch, config.algorithm, self.estimator)
        num_prompts, size, epochs = config.trainer.prompts_per_step, config.mini_batch_prompts, config.actor.epochs
        return steps.mini_batches.on(batch, num_prompts=num_prompts, size=size, epochs=epochs, seed=config.seed, step=step)

    @timed
    def update(self, batch: DataProtoFuture) -> Metrics:
        """Epochs times mini-batches of optimizer steps."""
        columns = self.steps["update_actor"].columns_of(batch)
        mini_batches = batch.get(keys=["mini_batch"]).batch["mini_batch"]
        columns = columns[interleave_groups(mini_batches[:, 0])]  # so that each rank has its part of each
        number = self.config.trainer.prompts_per_step // self.config.mini_batch_prompts
        columns = self._at_temperature(columns, num_mini_batches=number)
        self.session.updating()
        metrics: Metrics = self.actor.update_actor(columns.as_argument()).meta_info["metrics"]
        return metrics.prefixed("actor")

    @timed
    def sync(self) -> None:
        """The rollout takes the new weights."""
        self.generator.update_weights()

    # -- around them --------------------------------------------------------------------------------------------------

    @staticmethod
    def dataflow(config: RunConfig) -> list[Step]:
        flow = [
            steps.PROMPTS,
            worker_step("rollout", ActorRolloutRefWorker.generate_sequences),
            steps.problems.step,
            steps.score.step,
            COMPUTE_LOG_PROB if config.actor.recompute_old_log_probs else steps.OLD_LOG_PROBS_AS_DRAWN,
            *steps.advantage_steps(config.algorithm, advantage_estimator(config.algorithm)),
            steps.mini_batches.step,
            worker_step("actor", ActorRolloutRefWorker.update_actor, also_reads=policy_loss(config.actor).reads),
            Step("log", ("responses", "input_ids", *report.LOGGED_COLUMNS), ()),
        ]
        return with_providers(flow, PROVIDERS, after="score")

    @staticmethod
    def plans(config: RunConfig, model: ModelConfig) -> list[GroupPlan]:
        """One group: actor, rollout and reference share the processes of the ranks."""
        roles = roles_of(PPOTrainer.dataflow(config))
        kind: Role = "actor_rollout_ref" if "ref" in roles else "actor_rollout"
        spec = policy_spec(config, model)
        models = {"model.path": spec.model, **({"ref.model": spec.ref_model} if spec.ref_model else {})}
        return [GroupPlan("policy", roles, Init(ActorRolloutRefWorker, spec, kind), models)]

    def begin(self) -> int:
        """Take up the run: the step that is done. A fresh run is validated and saved as step 0."""
        done = self.session.begin("rl", self.context.groups, saves_step_zero=True)
        self.generator.update_weights()
        if done is not None and "before" not in self.session.run.read_report():
            logger.warning("%s has no scores from before the run any more: it goes on without them", self.session.run.report)
        if done is None:
            self.report_held_out("before", step=0)
            self.session.end_step(0, self.validation(0))
        return done or 0

    def finish(self) -> None:
        last = self.config.trainer.total_steps
        self.report_held_out("after", step=last)
        self.session.announce("saving the model")
        publish_model(self.session.run.hf, self.actor.save_hf, step=last)

    def log(self, step: int, batch: DataProtoFuture, metrics: Metrics, traffic: Traffic) -> None:
        """Write and show what the step did, and validate and save where they are due; what is read of the step is added to
        `traffic`."""
        batch = without_padding(batch)
        with recorded_traffic(traffic):
            logged, tokens = batch.get(keys=report.LOGGED_COLUMNS), int(batch.lengths("input_ids").sum())
        metrics = metrics.merge([report.batch_metrics(logged, batch.lengths("responses")), self.validation(step)])
        samples = report.samples(logged, self.config.trainer.samples_per_step)
        self.session.end_step(step, metrics, tokens=tokens, samples=samples, traffic=traffic)

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
        generate, chat_template = self.generator.generate_sequences, self.config.task.chat_template
        return evaluate(generate, self.scorer, problems, self.tokenizer, sampling, step=step, chat_template=chat_template)

    def _at_temperature(self, batch: DataProtoFuture, **meta: int) -> DataProtoFuture:
        return batch.union(DataProto(meta_info={"temperature": self.config.rollout.sampling.temperature, **meta}))


def policy_spec(config: RunConfig, model: ModelConfig) -> PolicySpec:
    """The policy worker's part of a config, when it starts from `model`."""
    ref_model = None if config.ref.model is None else config.model.moved_to(config.ref.model)
    return PolicySpec(
        model,
        config.actor,
        config.rollout,
        total_optimizer_steps(config),
        config.seed,
        ref_model=ref_model,
        profiler=config.profiler,
    )

"""Supervised fine-tuning: the warm-up that turns a fresh or pretrained model into the base model that RL starts from."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from podium.algorithms import SFTLoss
from podium.config import RunConfig
from podium.datasets import StepSampler, supervised_batch
from podium.observability import Metrics
from podium.protocol import DataProto
from podium.tasks import Task, draw_targets
from podium.trainers.dataflow import Step, worker_step
from podium.trainers.roles import Groups
from podium.trainers.session import Session, publish_model, timed
from podium.workers import TrainingWorker


class SFTTrainer:
    """Trains on a task's training problems with targets drawn from a mixture (`warmup.targets`)."""

    loss = SFTLoss()

    def __init__(
        self,
        config: RunConfig,
        groups: Groups,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        session: Session,
    ) -> None:
        self.config, self.task, self.tokenizer, self.session = config, task, tokenizer, session
        self.groups, self.model = groups, groups.of("actor", TrainingWorker).call
        self.sampler = StepSampler(num_problems=len(task.train), batch_size=config.warmup.batch_rows, seed=config.seed)

    @staticmethod
    def dataflow() -> list[Step]:
        """The steps of `fit` in order."""
        made = ("input_ids", "responses", "response_mask")
        return [Step("batch", (), made), worker_step("actor", TrainingWorker.train_batch, also_reads=SFTTrainer.loss.reads)]

    def fit(self) -> None:
        """From the newest checkpoint, or from the start, to a model folder at `hf/` of the session's run directory."""
        self.model.set_loss_fn(self.loss)
        done = self.session.begin("warm-up", self.groups) or 0
        with self.session.saved_when_interrupted():
            for step in range(done + 1, self.config.warmup.steps + 1):
                with self.session.step():
                    batch = self.batch(step)
                    metrics = self.update(batch)
                self.session.end_step(step, metrics.prefixed("warmup"))
        self.session.announce("saving the warmed-up model")
        publish_model(self.session.run.hf, self.model.save_hf, step=self.config.warmup.steps)

    @timed
    def batch(self, step: int) -> DataProto:
        """The prompts of a step, each followed by a target of the mixture."""
        problems = [self.task.train[row] for row in self.sampler.rows(step - 1)]
        targets = draw_targets(problems, self.config.warmup.targets, seed=self.config.seed, step=step)
        prompts = [problem.prompt for problem in problems]
        return supervised_batch(prompts, targets, self.tokenizer, chat_template=self.config.task.chat_template)

    @timed
    def update(self, batch: DataProto) -> Metrics:
        """One optimizer step."""
        self.session.updating()
        metrics: Metrics = self.model.train_batch(batch).meta_info["metrics"]
        return metrics

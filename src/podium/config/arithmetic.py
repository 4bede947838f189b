"""The arithmetic of a run: how prompts become rows, mini-batches and optimizer steps.

`explain` says it in words; `check` refuses what cannot work, with the arithmetic shown, before anything starts.
"""

from __future__ import annotations

from podium.config.schema import RunConfig
from podium.errors import ConfigError


def rows_per_step(config: RunConfig) -> int:
    """Responses that one step generates and learns from."""
    return config.trainer.prompts_per_step * config.rollout.sampling.n


def optimizer_steps_per_step(config: RunConfig) -> int:
    """Optimizer steps in one step of the trainer: mini-batches times epochs."""
    return config.trainer.prompts_per_step // config.actor.mini_batch_prompts * config.actor.epochs


def total_optimizer_steps(config: RunConfig) -> int:
    """Optimizer steps of the whole RL phase; the learning-rate schedule ends there."""
    return config.trainer.total_steps * optimizer_steps_per_step(config)


def explain(config: RunConfig) -> list[str]:
    """The arithmetic, a line each."""
    trainer, actor, sampling = config.trainer, config.actor, config.rollout.sampling
    mini_rows = actor.mini_batch_prompts * sampling.n
    steps_each = optimizer_steps_per_step(config)
    prompts = trainer.total_steps * trainer.prompts_per_step
    lines = [
        f"{config.num_workers} worker(s) on runtime {config.runtime_name}",
        f"{trainer.prompts_per_step} prompts x {sampling.n} samples = {rows_per_step(config)} rows per step",
        f"{trainer.prompts_per_step} prompts / {actor.mini_batch_prompts} prompts per mini-batch x {actor.epochs} epoch(s) = "
        f"{steps_each} optimizer steps per step",
        f"{actor.mini_batch_prompts} prompts x {sampling.n} samples = {mini_rows} rows per optimizer step, "
        f"{-(-mini_rows // config.num_workers)} per rank",
        f"micro-batches of at most {actor.engine.max_tokens_per_micro_batch} tokens per rank, as many as the rows need",
        f"{trainer.total_steps} steps x {steps_each} = {total_optimizer_steps(config)} optimizer steps in all",
        f"{trainer.total_steps} steps x {trainer.prompts_per_step} prompts = {prompts} prompts{_epochs(config, prompts)}",
    ]
    lines += _terms(config)
    if config.warmup.steps:
        lines.insert(0, f"warm-up: {config.warmup.steps} optimizer steps x {config.warmup.batch_rows} rows")
    return lines


def _epochs(config: RunConfig, prompts: int) -> str:
    """How often each training problem is seen; how many rows files hold is not known without reading them."""
    num_train = config.task.num_train
    return f", {prompts / num_train:.2f} epochs of {num_train} training problems" if num_train is not None else ""


def _terms(config: RunConfig) -> list[str]:
    """What the loss and the reward hold beside the surrogate and the verifier's number."""
    actor, algorithm, lines = config.actor, config.algorithm, []
    if actor.use_kl_loss:
        lines.append(f"loss + {actor.kl_loss_coef} x KL from the reference ({actor.kl_loss_type})")
    if actor.entropy_coeff:
        lines.append(f"loss - {actor.entropy_coeff} x entropy")
    if algorithm.use_kl_in_reward:
        lines.append(f"reward - {algorithm.kl_coef} x KL from the reference, summed over the response ({algorithm.kl_penalty})")
    if actor.drop_zero_advantage and (actor.use_kl_loss or actor.entropy_coeff):
        lines.append("rows of zero advantage are computed in spite of actor.drop_zero_advantage: KL or entropy concern them")
    return lines


def _unfit_terms(config: RunConfig) -> list[str]:
    """Why the terms of the loss and the reward cannot be as asked for."""
    actor, reasons = config.actor, []
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        longest = config.rollout.sampling.max_new_tokens
        reasons.append(
            "actor.loss_agg_mode=seq-mean-token-sum-norm divides by actor.loss_scale_factor, which is not set; Dr.GRPO takes "
            f"the longest response: actor.loss_scale_factor={longest}"
        )
    if actor.loss_agg_mode != "seq-mean-token-sum-norm" and actor.loss_scale_factor is not None:
        reasons.append(
            f"actor.loss_scale_factor={actor.loss_scale_factor} is for actor.loss_agg_mode=seq-mean-token-sum-norm and means "
            f"nothing in {actor.loss_agg_mode}; use actor.loss_scale_factor=null"
        )
    if config.ref.model is not None and not config.needs_reference:
        reasons.append(
            f"ref.model={config.ref.model} is used by nothing: set actor.use_kl_loss=true or algorithm.use_kl_in_reward=true, "
            "or ref.model=null"
        )
    return reasons


def check(config: RunConfig) -> None:
    """ConfigError when the sizes cannot work together; every reason is told, with its arithmetic."""
    trainer, actor, sampling = config.trainer, config.actor, config.rollout.sampling
    reasons = []
    if trainer.prompts_per_step % actor.mini_batch_prompts:
        reasons.append(
            f"trainer.prompts_per_step must be a multiple of actor.mini_batch_prompts: {trainer.prompts_per_step} / "
            f"{actor.mini_batch_prompts} leaves {trainer.prompts_per_step % actor.mini_batch_prompts} prompts over"
        )
    if config.task.num_train is not None and trainer.prompts_per_step > config.task.num_train:
        reasons.append(
            f"trainer.prompts_per_step ({trainer.prompts_per_step}) is more than task.num_train ({config.task.num_train}): "
            "a step would hold a prompt twice"
        )
    if config.algorithm.adv_estimator == "grpo" and sampling.n < 2:
        reasons.append(f"grpo compares the samples of a prompt: rollout.sampling.n must be at least 2, got {sampling.n}")
    if sampling.max_new_tokens >= actor.engine.max_tokens_per_micro_batch:
        reasons.append(
            f"a response of rollout.sampling.max_new_tokens ({sampling.max_new_tokens}) tokens and its prompt do not fit into "
            f"actor.engine.max_tokens_per_micro_batch ({actor.engine.max_tokens_per_micro_batch})"
        )
    if sampling.temperature == 0:
        reasons.append("rollout.sampling.temperature is 0: greedy samples of a prompt are all equal and teach nothing; use 1.0")
    if config.num_workers > 1 and config.runtime_name == "inline":
        reasons.append(f"runtime=inline has one process, num_workers={config.num_workers} needs collectives: use runtime=ray")
    reasons += _unfit_terms(config)
    if reasons:
        raise ConfigError("\n".join(reasons))

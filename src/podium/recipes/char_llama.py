"""What the recipes on the built-in character model share: warm-up to a mixture, then GRPO with an exact 0/1 reward."""

from __future__ import annotations

from podium.config import (
    ActorConfig,
    FSDP2Config,
    HFRolloutConfig,
    ModelConfig,
    OptimConfig,
    PPOClipConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    WarmupConfig,
)


def char_llama_run(
    name: str,
    description: str,
    task: TaskConfig,
    *,
    warmup_steps: int,
    answer_share: float,
    max_new_tokens: int,
    total_steps: int,
) -> RunConfig:
    """A run on one thread, so that a seed gives the same bits whenever it runs on one machine with the same library builds.

    `answer_share` of the warm-up's targets are right answers, the others copies of the prompt: a base model that has the
    skill and seldom shows it.
    """
    return RunConfig(
        name=name,
        description=description,
        threads_per_rank=1,
        model=ModelConfig(path="char_llama"),
        task=task,
        warmup=WarmupConfig(
            steps=warmup_steps,
            batch_rows=64,
            targets={"answer": answer_share, "copy": 1 - answer_share},
            optim=OptimConfig(lr=1e-3, betas=(0.9, 0.95), warmup_steps=20, schedule="linear", min_lr_ratio=0.05),
        ),
        actor=ActorConfig(
            optim=OptimConfig(lr=4e-4, betas=(0.9, 0.99), warmup_steps=5, schedule="linear", min_lr_ratio=0.1),
            engine=FSDP2Config(max_tokens_per_micro_batch=4096),
            mini_batch_prompts=32,
            loss=PPOClipConfig(clip_low=0.2, clip_high=0.28),
            drop_zero_advantage=True,
            recompute_old_log_probs=False,
        ),
        rollout=HFRolloutConfig(sampling=SamplingConfig(max_new_tokens=max_new_tokens, n=16)),
        trainer=TrainerConfig(total_steps=total_steps, prompts_per_step=64, val_freq=10, save_freq=10),
    )

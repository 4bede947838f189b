"""A first light: a character-level Llama learns to spell words backward, on a laptop's CPU."""

from __future__ import annotations

from podium.config import (
    ActorConfig,
    EngineConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    TaskConfig,
    TrainerConfig,
    WarmupConfig,
)


def spell_backward() -> RunConfig:
    """Warm-up to a base model that has the skill in a mixture, then GRPO with an exact 0/1 reward."""
    return RunConfig(
        name="spell_backward",
        description="GRPO lifts a 0.25 M character Llama from 10-30 % to over 90 % of words spelled backward; 2 minutes",
        threads_per_rank=1,
        model=ModelConfig(path="char_llama"),
        task=TaskConfig(
            name="spell_backward",
            params={"min_word_len": 3, "max_word_len": 7},
            prompt="after_colon",
            num_train=8192,
            num_validation=128,
            num_held_out=256,
        ),
        warmup=WarmupConfig(
            steps=900,
            batch_rows=64,
            targets={"answer": 0.4, "copy": 0.6},
            optim=OptimConfig(lr=1e-3, betas=(0.9, 0.95), warmup_steps=20, schedule="linear", min_lr_ratio=0.05),
        ),
        actor=ActorConfig(
            optim=OptimConfig(lr=4e-4, betas=(0.9, 0.99), warmup_steps=5, schedule="linear", min_lr_ratio=0.1),
            engine=EngineConfig(max_tokens_per_micro_batch=4096),
            mini_batch_prompts=32,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            drop_zero_advantage=True,
            recompute_old_log_probs=False,
        ),
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=10, n=16)),
        trainer=TrainerConfig(total_steps=80, prompts_per_step=64, val_freq=10, save_freq=10),
    )

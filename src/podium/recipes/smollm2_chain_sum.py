"""A real pretrained model: a few steps of GRPO on sums, to show that checkpoints, chat templates and tokenizers go through."""

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
)


def smollm2_chain_sum() -> RunConfig:
    """SmolLM2-135M-Instruct, unpacked by `make smollm2`, with four solved sums before each question."""
    return RunConfig(
        name="smollm2_chain_sum",
        description="a few GRPO steps of the real SmolLM2-135M-Instruct on small sums (make smollm2); slow",
        model=ModelConfig(path="build/smollm2"),
        task=TaskConfig(
            name="chain_sum",
            params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
            prompt_pattern=r": (.+ =)$",
            few_shot=4,
            chat_template="never",
            num_train=100,
            num_validation=16,
            num_held_out=32,
        ),
        actor=ActorConfig(
            optim=OptimConfig(lr=2e-6, betas=(0.9, 0.99), warmup_steps=1),
            engine=FSDP2Config(max_tokens_per_micro_batch=1024),
            mini_batch_prompts=8,
            loss=PPOClipConfig(clip_high=0.28),
        ),
        rollout=HFRolloutConfig(sampling=SamplingConfig(max_new_tokens=6, n=8, stop=("\n",)), max_rows=64),
        trainer=TrainerConfig(total_steps=6, prompts_per_step=8, val_freq=3, save_freq=0),
    )

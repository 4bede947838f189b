"""Peer's side of the GRPO step benchmark: TRL's GRPOTrainer on the demo task, one JSON line out.

    python trl_grpo.py --model DIR [--steps 8] [--threads 1]

DIR: a causal LM and its tokenizer as saved by `save_pretrained` (the warmed-up model of the demo). Work per step: 64 prompts x 16
samples, 2 mini-batches of 512 rows, 1 epoch, at most 10 new tokens. Needs: torch, transformers, trl, datasets, reasoning-gym.
Run both sides in one go and compare CPU-seconds: they hold still when wall time does not.
"""

import argparse
import json
import os
import resource
import time
from typing import ClassVar

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import reasoning_gym
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

arg = argparse.ArgumentParser()
arg.add_argument("--model", required=True)
arg.add_argument("--steps", type=int, default=8)
arg.add_argument("--prompts", type=int, default=64)
arg.add_argument("--samples", type=int, default=16)
arg.add_argument("--mini", type=int, default=512, help="rows per mini-batch")
arg.add_argument("--lr", type=float, default=3e-4)
arg.add_argument("--new-tokens", type=int, default=10)
arg.add_argument("--threads", type=int, default=1)
arg.add_argument("--bos", default="", help="text put before each prompt when the tokenizer adds no BOS itself")
a = arg.parse_args()
torch.set_num_threads(a.threads)

task = reasoning_gym.create_dataset(
    "spell_backward", min_word_len=3, max_word_len=7, size=a.prompts * (a.steps + 2), seed=1_000_000
)
entries = list(task)
rows = [{"prompt": a.bos + e["question"].split(": ")[-1] + "\n", "idx": i} for i, e in enumerate(entries)]


def reward(completions, idx, **_):
    return [float(task.score_answer(c.strip(), entries[i]) >= 0.999) for c, i in zip(completions, idx, strict=False)]


rows_per_step = a.prompts * a.samples
config = GRPOConfig(
    output_dir="trl_out",
    per_device_train_batch_size=a.mini,
    gradient_accumulation_steps=1,
    generation_batch_size=rows_per_step,
    num_generations=a.samples,
    max_completion_length=a.new_tokens,
    temperature=1.0,
    top_k=0,
    beta=0.0,
    learning_rate=a.lr,
    lr_scheduler_type="constant",
    adam_beta2=0.95,
    max_grad_norm=1.0,
    epsilon_high=0.28,
    max_steps=a.steps * (rows_per_step // a.mini),
    logging_steps=rows_per_step // a.mini,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    bf16=False,
    fp16=False,
    gradient_checkpointing=False,
    disable_tqdm=True,
    shuffle_dataset=False,
)


class Clock(TrainerCallback):
    """CPU and wall seconds between the first logged step and the last, so that start-up is not counted."""

    marks: ClassVar[list] = []

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in (logs or {}):
            self.marks.append((time.process_time(), time.time(), logs["reward"]))


trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(a.model),
    processing_class=AutoTokenizer.from_pretrained(a.model),
    reward_funcs=reward,
    args=config,
    train_dataset=Dataset.from_list(rows),
    callbacks=[Clock()],
)
trainer.train()
marks = Clock.marks
steps = len(marks) - 1
print(
    json.dumps(
        {
            "peer": f"trl {trl.__version__}",
            "steps": steps,
            "threads": a.threads,
            "cpu_s_per_step": round((marks[-1][0] - marks[0][0]) / steps, 4),
            "wall_s_per_step": round((marks[-1][1] - marks[0][1]) / steps, 4),
            "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 3),
            "reward": [round(float(m[2]), 4) for m in marks],
        }
    )
)

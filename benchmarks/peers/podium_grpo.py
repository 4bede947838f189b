"""Podium's side of the GRPO step benchmark: `PPOTrainer` on the demo task, one JSON line out.

    python podium_grpo.py --model DIR [--steps 8] [--threads 1]

The work of `trl_grpo.py`: 64 prompts x 16 samples a step, 2 mini-batches of 512 rows, 1 epoch, at most 10 new tokens, old
log-probs recomputed, no rows dropped. Needs Podium with the extra `tasks`.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console

from podium.config import resolve
from podium.observability import Progress, read_rows
from podium.recipes import recipe
from podium.trainers import RunDirectory, run
from podium.trainers.preflight import prepare

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--threads", type=int, default=1)
arguments = parser.parse_args()

with tempfile.TemporaryDirectory() as folder:
    config = resolve(
        recipe("spell_backward"),
        [
            f"model={Path(arguments.model).resolve()}",
            "warmup.steps=0",
            f"run_root={folder}",
            f"threads_per_rank={arguments.threads}",
            f"trainer.total_steps={arguments.steps + 1}",
            "trainer.val_freq=0",
            "trainer.save_freq=0",
            "trainer.samples_per_step=0",
            "trainer.trackers=[]",
            "trainer.curve=false",
            "actor.recompute_old_log_probs=true",
            "actor.drop_zero_advantage=false",
            "actor.optim.lr=3e-4",
            "actor.optim.schedule=constant",
            "actor.optim.warmup_steps=0",
        ],
    )
    directory = RunDirectory.create(config)
    with Progress(Console(file=io.StringIO())) as progress:
        run(config, directory, prepare(config), progress)
    rows = [row for row in read_rows(directory.path / "metrics.jsonl") if row["step"] > 1]  # the first step warms caches

phases = ("rollout", "score", "log_probs", "advantages", "update", "sync")
print(
    json.dumps(
        {
            "peer": "podium",
            "steps": len(rows),
            "threads": arguments.threads,
            "cpu_s_per_step": round(sum(row["perf/cpu_s"] for row in rows) / len(rows), 4),
            "wall_s_per_step": round(sum(row["timing_s/step"] for row in rows) / len(rows), 4),
            "wall_s_per_phase": {phase: round(median(row[f"timing_s/{phase}"] for row in rows), 4) for phase in phases},
            "tokens_per_s": round(sum(row["perf/total_num_tokens"] for row in rows) / sum(row["timing_s/step"] for row in rows)),
            "peak_rss_gb": round(max(row["perf/peak_rss_gb"] for row in rows), 3),
            "reward": [round(row["critic/rewards/mean"], 4) for row in rows],
        }
    )
)

"""A step of GRPO, Podium beside TRL, on the demo's model and task, in one run: CPU-seconds, wall-seconds, memory.

    python benchmarks/grpo_step.py [--quick] [--model DIR] [--rounds 3] [--steps 8] [--threads 1] [--peer-python PYTHON]

Both sides do the same work (64 prompts x 16 samples, 2 mini-batches, old log-probs recomputed, no rows dropped), each in a
process of its own, in turns; the medians are compared. Without --model the demo's warm-up makes it (a minute; `--quick`
makes a rougher one). Needs an environment with TRL for the peer, by default .venv-bench: `make venv-bench` makes it. The last
line is one JSON object with the ratios; under 1 is in Podium's favour.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent


def run(python: str, *command: str, threads: int) -> str:
    """Standard output of a Python program with that many threads; its errors are shown."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([python, *command], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def warmed_up(folder: str, *, quick: bool) -> str:
    """A model folder: the demo's warm-up and nothing more."""
    steps = "300" if quick else "900"
    overrides = ["trainer.total_steps=1", "trainer.trackers=[]", "trainer.curve=false", f"warmup.steps={steps}"]
    run(sys.executable, "-m", "podium.cli.main", "train", "spell_backward", f"run_root={folder}", *overrides, threads=1)
    return f"{folder}/latest/warmup/hf"


def main() -> None:
    """Measure both sides in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-python", default=str(HERE.parent / ".venv-bench" / "bin" / "python"))
    arguments = parser.parse_args()
    if not Path(arguments.peer_python).exists():
        print(f"skipped: no {arguments.peer_python}; `make venv-bench` makes an environment with TRL, or give --peer-python")
        print(json.dumps({"benchmark": "grpo_step", "skipped": "no environment with TRL"}))
        return
    rounds, steps = arguments.rounds or (1 if arguments.quick else 3), arguments.steps or (3 if arguments.quick else 8)
    found: dict[str, list[dict[str, Any]]] = {"podium": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or warmed_up(folder, quick=arguments.quick)
        sides = {
            "podium": (sys.executable, str(HERE / "peers" / "podium_grpo.py")),
            "trl": (arguments.peer_python, str(HERE / "peers" / "trl_grpo.py")),
        }
        for _ in range(rounds):
            for name, (python, *command) in sides.items():
                common = ("--model", model, "--steps", str(steps), "--threads", str(arguments.threads))
                output = run(python, *command, *common, threads=arguments.threads)
                found[name].append(json.loads(output.strip().splitlines()[-1]))
                print(json.dumps(found[name][-1]), flush=True)

    def ratio(key: str) -> float:
        return round(median(row[key] for row in found["podium"]) / median(row[key] for row in found["trl"]), 3)

    ratios = {"cpu_ratio": ratio("cpu_s_per_step"), "wall_ratio": ratio("wall_s_per_step"), "rss_ratio": ratio("peak_rss_gb")}
    print(json.dumps({"benchmark": "grpo_step", "peer": found["trl"][0]["peer"], "threads": arguments.threads, **ratios}))


if __name__ == "__main__":
    main()

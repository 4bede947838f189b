"""What a group call costs: Podium's single controller beside bare Ray actors and, where it installs, verl's, in one run.

    python benchmarks/controller.py [--quick] [--workers 1,2,4,8] [--rounds 3] [--verl-python PYTHON]

Measured, as ratios to `ray.get([actor.empty.remote() for actor in actors])` on actors of the same kind: the empty call of a
sync and of an async class; calls that echo 8 rows, of a DataProto and of a TensorDict by DP_COMPUTE_PROTO, and of a DataProto by
a mesh. Then the start of a group, the empty call on `inline`, and what 256 and 1,024 ranks cost the driver when the transport
answers at once. Each side runs in a process and a Ray cluster of its own, in turns, one thread per worker; the medians over the
rounds are printed.

Needs Podium with the extra `ray`, and for the peer an environment with verl, by default .venv-verl (without one the peer is
skipped; `make venv-verl` makes it). About 3 minutes a round and side, 8 GB; `--quick` is one round on 4 workers in less
than one. The last line is one JSON object; keys of the peer begin with `verl_`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's own advice, else it warns for each actor without a GPU
}
GOALS = {
    "one_to_all_ratio": 1.1,
    "async_ratio": 1.1,
    "dp_ratio": 1.8,
    "tensordict_ratio": 2.2,
    "mesh_ratio": 1.8,
    "start_ratio": 1.3,
    "inline_us": 30,
    "driver_us_per_rank": 20,
    "driver_dp_us_per_rank": 20,
}
"""At most this, for any number of ranks."""


def run_side(python: str, script: str, options: list[str]) -> dict[str, float]:
    """One round of one side; what it found, without the name of the peer, which is shown."""
    command = [python, str(HERE / "peers" / script), *options]
    output = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, check=True).stdout
    line = next(line for line in reversed(output.splitlines()) if line.startswith("{"))  # Ray may have the last word
    print(line, flush=True)
    found = json.loads(line)
    return {key: value for key, value in found.items() if key != "peer"}


def medians(rounds: list[dict[str, float]], prefix: str) -> dict[str, float]:
    """Each figure's median over the rounds."""
    return {f"{prefix}{key}": round(median(found[key] for found in rounds), 3) for key in (rounds[0] if rounds else ())}


def goal_of(key: str) -> float | None:
    """The goal of a figure, whose name may end in a number of ranks."""
    name, _, ranks = key.rpartition("_")
    return GOALS.get(name if ranks.isdigit() else key)


def print_table(podium: dict[str, float], verl: dict[str, float]) -> None:
    """The figures for a reader."""
    print(f"\n{'':32}{'podium':>10}{'verl':>10}{'goal':>10}")
    for key, value in podium.items():
        peer, goal = verl.get(f"verl_{key}"), goal_of(key)
        above = "  above" if goal is not None and value > goal else ""
        print(f"{key:32}{value:10g}{'-' if peer is None else f'{peer:g}':>10}{'-' if goal is None else f'{goal:g}':>10}{above}")


def main() -> None:
    """Measure both sides in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--workers", help="numbers of Ray workers, default 1,2,4,8; with --quick 4")
    parser.add_argument("--rounds", type=int, help="default 3; with --quick 1")
    parser.add_argument("--verl-python", default=str(HERE.parent / ".venv-verl" / "bin" / "python"))
    arguments = parser.parse_args()
    print(__doc__.partition("\n\nNeeds ")[2].join(("Needs ", "")), flush=True)
    quick = arguments.quick
    options = ["--workers", arguments.workers or ("4" if quick else "1,2,4,8")]
    options += ["--blocks", "5" if quick else "10", "--starts", "1" if quick else "2"]
    sides = {"verl": (arguments.verl_python, "verl_controller.py"), "podium": (sys.executable, "podium_controller.py")}
    if not Path(arguments.verl_python).exists():
        del sides["verl"]
        print(f"verl is skipped: no {arguments.verl_python}. To have it, `make venv-verl`, or give --verl-python")
    found: dict[str, list[dict[str, float]]] = {"verl": [], "podium": []}
    for _ in range(arguments.rounds or (1 if quick else 3)):
        for name, (python, script) in sides.items():
            found[name].append(run_side(python, script, options))
    podium, verl = medians(found["podium"], ""), medians(found["verl"], "verl_")
    print_table(podium, verl)
    print(json.dumps({"benchmark": "controller", **podium, **verl}))


if __name__ == "__main__":
    main()

"""What payloads cost: Podium's batches beside raw numpy through bare Ray actors and, where it installs, verl's, in one run.

    python benchmarks/data.py [--quick] [--only calls,chain,ops] [--sizes 1,16,128,512] [--workers 2,4] [--rounds 3]
                              [--verl-python PYTHON]

calls: send and echo of 1 to 512 MB (dense, jagged, dense with strings) as ratios to the raw call that copies as often:
       `raw_copy` copies once in the worker, as Podium does. An echo is joined in the driver. Also the driver's own
       memory (RssAnon) at its peak, in payloads.
chain: produce -> transform -> consume of 256 MB over 4 ranks by reference, beside Ray's own references; what the driver holds
       and maps of it, and the bytes stored per hop.
ops:   partition, concat, select, repeat, reorder of 128 MB beside the fastest way with torch alone (no Ray is started).

Each side runs in a process and a Ray cluster of its own, in turns, one thread per worker; medians over the rounds are printed.

Needs Podium with the extra `ray`; for the peer an environment with verl, by default .venv-verl (without one the peer is
skipped; `make venv-verl` makes it); Linux; for 512 MB, 6 GB of memory and 2.3 GB of /dev/shm (what does not fit is skipped, and
reported). About 3 minutes a round and side; `--quick` is one round of 16 MB on 2 workers and smaller chains and operations, in
less than one. The last line is one JSON object; keys of the peer begin with `verl_`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from controller import HERE, medians, run_side

PARTS = ("calls", "chain", "ops")
ABOVE_US = 50
"""An operation is good enough, too, at so many microseconds above its floor."""


@dataclass(frozen=True)
class Goal:
    """For figures whose name, without sizes and ranks, ends so."""

    name: str
    bound: float
    is_least: bool = False
    from_mb: int = 0

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.is_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:g}"


GOALS = (
    Goal("reference_echo_anon", 0.05),
    Goal("chain_anon", 0.05),
    Goal("chain_shared", 0.05),
    Goal("chain_stored_per_hop", 1.05),
    Goal("_echo_anon", 1.1),
    Goal("_faster_than_verl", 5, is_least=True, from_mb=128),
    Goal("_faster_than_verl_numpy", 2, is_least=True, from_mb=128),
    Goal("_ratio", 1.5),
)
OPS_GOAL = Goal("_ratio", 1.2)


def goal_of(key: str) -> Goal | None:
    """The goal of a figure; none for sizes that it does not speak of."""
    if key.startswith("ops_"):
        return OPS_GOAL if key.endswith("_ratio") else None
    name, _, size = re.fullmatch(r"(.+?)(_(\d+)mb_x\d+)?", key).groups()  # type: ignore[union-attr]
    goal = next((goal for goal in GOALS if name.endswith(goal.name)), None)
    return goal if goal is not None and int(size or 0) >= goal.from_mb else None


def is_met(key: str, goal: Goal, found: dict[str, float]) -> bool:
    """Whether a figure meets its goal; an operation may do so by its microseconds."""
    above = found.get(f"{key.removesuffix('_ratio')}_above_us")
    return goal.is_met(found[key]) or (above is not None and above <= ABOVE_US)


def faster_than(podium: dict[str, float], verl: dict[str, float]) -> dict[str, float]:
    """How many times as fast Podium's calls are as verl's, each as a ratio to the raw copying call of its own run.

    verl's method `numpy` hands the worker views of read-only memory, and so saves a copy.
    """
    found = {}
    for key, value in podium.items():
        match = re.fullmatch(r"dense_(echo|send)_ratio_(\d+mb_x\d+)", key)
        for prefix, name in (("", "verl"), ("numpy_", "verl_numpy")):
            slow = match and verl.get(f"verl_dense_{prefix}{match[1]}_ratio_{match[2]}")
            if match and slow:
                found[f"dense_{match[1]}_faster_than_{name}_{match[2]}"] = round(slow / value, 2)
    return found


def in_every_round(rounds: list[dict[str, float]]) -> list[dict[str, float]]:
    """The figures that no round lacks: memory that was free in one may be short in the next."""
    return [{key: found[key] for key in found if all(key in other for other in rounds)} for found in rounds]


def print_table(found: dict[str, float], verl: dict[str, float]) -> None:
    """The figures for a reader."""
    print(f"\n{'':48}{'podium':>10}{'verl':>10}{'goal':>10}")
    for key, value in found.items():
        peer, goal = verl.get(f"verl_{key}"), goal_of(key)
        missed = "  missed" if goal is not None and not is_met(key, goal, found) else ""
        print(f"{key:48}{value:10g}{'-' if peer is None else f'{peer:g}':>10}{'-' if goal is None else goal!s:>10}{missed}")
    for key in sorted(verl.keys() - {f"verl_{key}" for key in found}):
        print(f"{key:48}{'':10}{verl[key]:10g}")


def sides(arguments: argparse.Namespace) -> dict[str, tuple[str, str, list[str]]]:
    """The scripts to run in a round: whose Python, which script, its options."""
    parts, quick = arguments.only.split(","), arguments.quick
    sizes = ["--sizes", arguments.sizes or ("16" if quick else "1,16,128,512")]
    sizes += ["--workers", arguments.workers or ("2" if quick else "2,4"), *(["--quick"] if quick else [])]
    found = {}
    if "calls" in parts and Path(arguments.verl_python).exists():
        found["verl"] = (arguments.verl_python, "verl_data.py", sizes)
    elif "calls" in parts:
        print(f"verl is skipped: no {arguments.verl_python}. To have it, `make venv-verl`, or give --verl-python")
    only = [part for part in ("calls", "chain") if part in parts]
    if only:
        found["podium"] = (sys.executable, "podium_data.py", [*sizes, *(["--only", *only] if len(only) == 1 else [])])
    if "ops" in parts:
        found["ops"] = (sys.executable, "podium_ops.py", ["--size", "32" if quick else "128", "--repeats", "3" if quick else "7"])
    return found


def part_names(text: str) -> str:
    """Parts with commas between them."""
    unknown = set(text.split(",")) - set(PARTS)
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    return text


def main() -> None:
    """Measure all sides in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", type=part_names, default=",".join(PARTS), help="of calls, chain, ops; default all")
    parser.add_argument("--sizes", help="MB of the calls, default 1,16,128,512; with --quick 16")
    parser.add_argument("--workers", help="numbers of Ray workers, default 2,4; with --quick 2")
    parser.add_argument("--rounds", type=int, help="default 3; with --quick 1")
    parser.add_argument("--verl-python", default=str(HERE.parent / ".venv-verl" / "bin" / "python"))
    arguments = parser.parse_args()
    print(__doc__.partition("\n\nNeeds ")[2].join(("Needs ", "")), flush=True)
    scripts = sides(arguments)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ("verl", "podium", "ops")}
    for _ in range(arguments.rounds or (1 if arguments.quick else 3)):
        for name, script in scripts.items():
            rounds[name].append(run_side(*script))
    complete = {name: in_every_round(found) for name, found in rounds.items()}
    verl = medians(complete["verl"], "verl_")
    podium = medians(complete["podium"], "") | medians(complete["ops"], "")
    podium |= faster_than(podium, verl)
    print_table(podium, verl)
    print(json.dumps({"benchmark": "data", **podium, **verl}))


if __name__ == "__main__":
    main()

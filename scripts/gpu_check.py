"""What Podium does on this machine's GPU, in twelve stages, the most telling first. docs/gpu.md says what each one proves.

    python scripts/gpu_check.py [--device auto|cpu|cuda] [--stages 1,3-5] [--quick] [--budget-s 600]

On standard output one JSON line a stage and a last one with the summary; all else is on standard error. Each stage is a process
of its own with a time limit, and what it measured before it failed or was killed is in its line. The exit code is 0 when no
stage failed, 1 when one did, 2 for bad arguments. Without a GPU, and with --quick, models are small.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu_stages import STAGES, Options, Stage, run_in_child

QUICK_LIMIT_S = 120.0
START_S = 60.0
"""What a limit adds for the start of a process and its imports."""

END_S = 2.0
"""How long a process may take to end once it is done."""


@dataclass
class Outcome:
    """What a stage came to: `status` is ok, failed or skipped, and `reason` says why for the latter two."""

    status: str = "ok"
    reason: str | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def take(self, kind: str, value: Any) -> None:
        """Add one message of the stage's process."""
        if kind == "figures":
            self.figures |= value
        elif kind == "failed":
            self.status, self.reason = "failed", "; ".join(filter(None, [self.reason, value]))
        elif kind == "skipped":
            self.status, self.reason = "skipped", value


def run_stage(number: int, options: Options, limit_s: float) -> Outcome:
    """Run a stage in a process of its own; one that takes longer than the limit is killed with all its children."""
    # A fork of a process that has asked for GPUs cannot use them, so those start anew; the CPU's save the imports.
    context = multiprocessing.get_context("forkserver" if options.device == "cpu" else "spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=run_in_child, args=(number, options, writer))
    process.start()
    writer.close()
    outcome = Outcome()
    for kind, value in messages(reader, limit_s):
        if kind == "crashed":
            process.join()
            kind, value = "failed", f"its process ended with exit code {process.exitcode}"
        outcome.take(kind, value)
    process.join(END_S)
    end(process.pid)
    process.join()
    return outcome


def messages(reader: Connection, limit_s: float) -> Iterator[tuple[str, Any]]:
    """What the stage's process sends until it is done; the last is "failed" where its time is over, "crashed" where it ends."""
    give_up = time.monotonic() + limit_s
    while reader.poll(max(0.0, give_up - time.monotonic())):
        try:
            kind, value = reader.recv()
        except EOFError:
            yield "crashed", None
            return
        if kind == "done":
            return
        yield kind, value
    yield "failed", f"killed after {limit_s:.3g} s, its time limit"


def end(pid: int | None) -> None:
    """Kill what is left of a stage: its process leads a group, in which are all that it started."""
    with suppress(ProcessLookupError):
        if pid is not None:
            os.killpg(pid, signal.SIGKILL)


def numbers_of(text: str) -> list[int]:
    """The stages that a text such as "1,3-5" names, in order.

    >>> numbers_of("7,1-3")
    [1, 2, 3, 7]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    unknown = found - set(STAGES)
    if unknown or not found:
        raise argparse.ArgumentTypeError(f"stages are 1 to {len(STAGES)}, got {text!r}")
    return sorted(found)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--stages", type=numbers_of, default=sorted(STAGES), help='such as "1,3-5"; all without it')
    parser.add_argument("--quick", action="store_true", help="small models, also on a GPU")
    parser.add_argument("--budget-s", type=float, default=600.0, help="seconds for the whole run; later stages are skipped")
    return parser.parse_args(arguments)


def report(number: int, stage: Stage, outcome: Outcome, seconds: float) -> None:
    """The stage's line."""
    line = {"stage": number, "name": stage.name, "status": outcome.status, "seconds": round(seconds, 2)}
    print(json.dumps({**line, "reason": outcome.reason, "figures": outcome.figures}), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages that are asked for; the exit code."""
    asked = parsed(arguments)
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))  # of the fork server
    multiprocessing.set_forkserver_preload(["gpu_stages"])
    options = Options(asked.device, asked.quick)
    began, by_status = time.monotonic(), dict[str, list[int]](ok=[], failed=[], skipped=[])
    for number in asked.stages:
        stage, start = STAGES[number], time.monotonic()
        left_s = asked.budget_s - (start - began)
        limit_s = min(left_s, START_S + (QUICK_LIMIT_S if asked.quick else stage.limit_s))
        if left_s > 0:
            outcome = run_stage(number, options, limit_s)
        else:
            outcome = Outcome("skipped", f"the budget of {asked.budget_s:g} s is spent")
        report(number, stage, outcome, time.monotonic() - start)
        by_status[outcome.status].append(number)
    total_s = round(time.monotonic() - began, 2)
    print(json.dumps({"summary": by_status, "device": asked.device, "quick": asked.quick, "seconds": total_s}), flush=True)
    return 1 if by_status["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Fail unless a run lifted a metric: `check_lift.py RUN_DIR MIN_LIFT KEY`.

Reads RUN_DIR/metrics.jsonl (one object a step) and compares the first and the last value of KEY. Standard library only.
Exit codes: 0 lifted, 1 not lifted, 2 the run has no such numbers.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path


def values_of(metrics: Path, key: str) -> list[tuple[int, float]]:
    """(step, value) of every line that has the key, in the file's order."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines() if line.strip()]
    found = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None]
    if len(found) < 2:
        known = sorted({name for row in rows for name in row if name.startswith("val")})
        raise LookupError(
            f"{metrics}: {key!r} has {len(found)} values in {len(rows)} lines, and a lift needs two; "
            f"validation keys there: {', '.join(known) or 'none'}"
        )
    for step, value in found:
        if not math.isfinite(value):
            raise LookupError(f"{metrics}: {key!r} is {value} at step {step}")
    return found


def main(run_dir: str, min_lift: str, key: str) -> int:
    """Print the verdict and return the exit code."""
    try:
        found = values_of(Path(run_dir) / "metrics.jsonl", key)
    except (OSError, LookupError, ValueError) as exc:
        print(f"check_lift: {exc}", file=sys.stderr)
        return 2
    (first_step, first), (last_step, last) = found[0], found[-1]
    verdict = f"{key}: {first:.3f} at step {first_step} -> {last:.3f} at step {last_step}, lift {last - first:+.3f}"
    if last - first < float(min_lift):
        print(f"check_lift: FAILED, {verdict}, wanted at least +{float(min_lift):.3f} ({run_dir})", file=sys.stderr)
        return 1
    print(f"check_lift: ok, {verdict} (wanted at least +{float(min_lift):.3f})")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} RUN_DIR MIN_LIFT KEY")
    sys.exit(main(*sys.argv[1:]))

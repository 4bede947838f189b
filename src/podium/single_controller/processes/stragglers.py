"""Stragglers of a call: which ranks are slow, and what their threads are doing. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from podium.single_controller.rank.naming import ranks_named

SLOW_AFTER_S = 30.0
"""A rank is not slow before this: a first step compiles, loads and waits for others."""
SLOW_FACTOR = 3.0
"""A rank is slow when it takes this many times as long as the slowest that has answered, or as the call took before."""

_FOLDED_THREADS = re.compile(r"\nand \d+ threads? of the runtime\s*\Z")  # `process_probe.folded_threads`


def fold_stacks(by_rank: Mapping[int, str]) -> str:
    """The stacks of some ranks, equal ones once, those of the fewest ranks first: the odd one out is the likely cause.

    Stacks that differ only in their number of idle threads are equal.
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(by_rank):
        groups.setdefault(_FOLDED_THREADS.sub("", by_rank[rank].rstrip()), []).append(rank)
    fewest_first = sorted(groups.values(), key=lambda ranks: (len(ranks), ranks))
    return "\n".join(f"{ranks_named(ranks)}:\n{_indented(by_rank[ranks[0]])}" for ranks in fewest_first)


def straggler_line(
    method: str,
    answered_s: Mapping[int, float],
    silent: Iterable[int],
    age_s: float,
    *,
    limit_s: float,
    usual_s: float | None = None,
    slow_after_s: float = SLOW_AFTER_S,
) -> str | None:
    """The ranks that the call waits for, as a line of the log; None if none of them is late.

    answered_s: how long each rank that has answered took. age_s: how long ago the call was sent. usual_s: how long the method
    took the last time. A silent rank is late after `slow_after_s` and `SLOW_FACTOR` times the slowest answer of this call.
    Without an answer, `usual_s` takes its place; without that too, a call is late after half of its limit `limit_s`.
    """
    waiting = sorted(set(silent))
    if answered_s:
        late_after_s = SLOW_FACTOR * max(answered_s.values())
    else:
        late_after_s = limit_s / 2 if usual_s is None else SLOW_FACTOR * usual_s
    if not waiting or age_s <= max(slow_after_s, late_after_s):
        return None
    line = f"method {method!r}: no answer from {ranks_named(waiting)} after {age_s:.3g} s"
    if answered_s:
        return f"{line}; the other {len(answered_s)} took at most {max(answered_s.values()):.3g} s"
    if usual_s is None:
        return f"{line}; half of its limit of {limit_s:g} s has passed"
    return f"{line}; the last call took {usual_s:.3g} s"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.rstrip().split("\n"))

"""How ranks are named in messages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks in order, runs of them shortened.

    >>> rank_list((0, 1, 2, 5))
    '0-2, 5'
    """
    in_order = sorted(set(ranks))
    runs = groupby(enumerate(in_order), key=lambda pair: pair[1] - pair[0])
    return ", ".join(_run([rank for _, rank in run]) for _, run in runs)


def ranks_named(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    distinct = set(ranks)
    return f"rank{'s' * (len(distinct) != 1)} {rank_list(distinct)}"


def _run(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"

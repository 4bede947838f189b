"""The outcome of scoring a response: a `Score`, or `Failed` with a reason. A failure is never a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

RESULT = "a reward is a finite number, or a dict that holds one under 'score'"
LARGEST = (2 - 2.0**-23) * 2.0**127
"""The largest finite float32, in which rewards are kept: about 3.4e38."""


@dataclass(frozen=True)
class Score:
    """A reward, and further numbers of the same response by name."""

    value: float
    extra: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """Why there is no reward; `traceback` is the reward function's own, or what its process wrote last, or empty."""

    reason: str
    traceback: str = ""


Outcome: TypeAlias = Score | Failed


def outcome_of(result: object) -> Outcome:
    """What a reward function returned, read as verl reads it.

    A number (bool counts as 0 or 1; numpy and torch scalars too) is the score. A dict holds it under `score`; its other
    numeric entries are extra, entries that are not numbers are left out. None, text and anything else failed, and so did a score
    or an extra that is NaN, infinite, or too large for float32.

    >>> outcome_of({"score": True, "length": 3, "parsed": "7"})
    Score(value=1.0, extra={'length': 3.0})
    >>> outcome_of("1").reason
    "returned '1' (str); a reward is a finite number, or a dict that holds one under 'score'"
    """
    if not isinstance(result, Mapping):
        value = _number(result)
        return _nonsense(result) if value is None or _unfit(value) else Score(value)
    if "score" not in result:
        return Failed(f"returned a dict without 'score': {_shown(dict(result))}; {RESULT}")
    value = _number(result["score"])
    if value is None or _unfit(value):
        return _nonsense(result["score"], "'score' is")
    extra = dict[str, float]()
    for name, entry in result.items():
        number = _number(entry)
        if number is not None and _unfit(number):
            why = f"returned {str(name)!r} as {_shown(entry)} ({type(entry).__name__}), {_unfit(number)}"
            return Failed(f"{why}; the numbers beside 'score' are averaged: give a finite one, or none")
        if number is not None and name != "score":
            extra[str(name)] = number
    return Score(value, extra)


def _number(value: object) -> float | None:
    item = getattr(value, "item", None)  # numpy and torch scalars, without importing either
    if callable(item):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # more than one element
            return None
    if not isinstance(value, bool | int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an int of more than 308 digits
        return math.inf if value > 0 else -math.inf


def _unfit(number: float) -> str:
    """Why a number is neither a reward nor a metric; empty for one that is."""
    if not math.isfinite(number):
        return "which is not finite"
    return "" if abs(number) <= LARGEST else f"which is infinite in float32 (largest: {LARGEST:.3g})"


def _nonsense(value: object, verb: str = "returned") -> Failed:
    number = _number(value)
    reason = f", {_unfit(number)}" if number is not None and math.isfinite(number) else ""
    return Failed(f"{verb} {_shown(value)} ({type(value).__name__}){reason}; {RESULT}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception as exc:  # a value of the user's own; or an int too long for Python to write out
        text = f"what cannot be shown ({type(exc).__name__}: {exc})"
    return text if len(text) <= 200 else f"{text[:197]}..."

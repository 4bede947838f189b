"""What scoring a response comes to: a `Score`, or `Failed` with a reason. A failure is never a number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

RESULT = "a reward is a finite number, or a dict that holds one under 'score'"


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
    numeric entries are extra, entries that are no number are left out. None, NaN, an infinity, text and anything else failed.

    >>> outcome_of({"score": True, "length": 3, "parsed": "7"})
    Score(value=1.0, extra={'length': 3.0})
    >>> outcome_of("1").reason
    "returned '1' (str); a reward is a finite number, or a dict that holds one under 'score'"
    """
    if not isinstance(result, Mapping):
        value = _number(result)
        return Score(value) if value is not None and math.isfinite(value) else _nonsense(result)
    if "score" not in result:
        return Failed(f"returned a dict without 'score': {_shown(dict(result))}; {RESULT}")
    value = _number(result["score"])
    if value is None or not math.isfinite(value):
        return _nonsense(result["score"], "'score' is")
    numbers = {str(name): _number(entry) for name, entry in result.items() if name != "score"}
    return Score(value, {name: number for name, number in numbers.items() if number is not None})


def _number(value: object) -> float | None:
    item = getattr(value, "item", None)  # numpy and torch scalars, without importing either
    if callable(item):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # more than one element
            return None
    return float(value) if isinstance(value, bool | int | float) else None


def _nonsense(value: object, verb: str = "returned") -> Failed:
    return Failed(f"{verb} {_shown(value)} ({type(value).__name__}); {RESULT}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."

"""`Settings`, the base class of every section, and the types of settings that several sections share."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, PlainSerializer

LARGEST_INT: Final = 10**4000
"""Python refuses to read integers of more than 4,300 digits."""


class Settings(BaseModel):
    """Base of all sections: frozen, strict, no unknown keys, each field documented by the string under it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def as_tuple(value: Any) -> Any:
    """A list, as YAML gives it, as a tuple; anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _paths(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


def _finite(value: Any) -> Any:
    """Of a setting of any type: JSON has neither NaN nor infinities, and Python limits the digits of an integer."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"JSON does not have {value}: use a finite number, or a text")
    if isinstance(value, int) and abs(value) >= LARGEST_INT:
        raise ValueError("is an integer of more than 4,000 digits: use a text")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _finite(item)
    return value


def _infinity(value: Any) -> Any:
    return math.inf if value == "inf" else value


def _written_infinity(value: float) -> float | str:
    return "inf" if value == math.inf else value


Positive = Annotated[int, Field(gt=0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Scalar = Annotated[bool | int | float | str, AfterValidator(_finite)]
Json = Annotated[JsonValue, AfterValidator(_finite)]
Unbounded = Annotated[float, BeforeValidator(_infinity), PlainSerializer(_written_infinity, when_used="json")]
"""A limit that `inf` switches off."""
Paths = Annotated[tuple[str, ...], BeforeValidator(_paths)]
KLKind = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]  # fmt: skip
"""Names of the KL estimators, as in `podium.algorithms.KL_ESTIMATORS` and docs/algorithms.md."""

"""One response that is worth keeping, as it is written to `samples.jsonl` and handed to trackers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One response worth keeping: enough to trace it to its prompt, its weights and its step."""

    uid: str
    """The prompt's id; all samples of a prompt share it."""
    sample_index: int
    """Which of the prompt's samples."""
    weight_version: int
    """Version of the weights that wrote the response."""
    prompt: str
    response: str
    answer: str | None = None
    """The right answer, where that is known."""
    reward: float | None = None
    """None when scoring failed."""
    split: str = "train"
    """`train`, `validation` or `held_out`."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the row; numpy and torch scalars become plain numbers. The names above win."""

    @property
    def named(self) -> dict[str, object]:
        """The fields above without `extra`."""
        return {name: value for name, value in vars(self).items() if name != "extra"}

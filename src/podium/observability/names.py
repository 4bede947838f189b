"""Names of the metrics that the display and the curve read: written here once, used by whoever reports them."""

from __future__ import annotations

from typing import Final

REWARD: Final = "critic/rewards/mean"
"""Mean reward of the step's training responses."""
VALIDATION_SCORE: Final = "val/score/mean"
"""Mean score on the validation split; only on steps that validate."""
RESPONSE_LENGTH: Final = "response_length/mean"
"""Mean tokens of a response."""
THROUGHPUT: Final = "perf/throughput"
"""Tokens (prompts and responses) per second of the whole step and per rank, as in verl."""
TOKENS_PER_S: Final = "perf/tokens_per_s"
"""Tokens (prompts and responses) per second of the whole step, of all ranks together."""
DRIVER_MB: Final = "perf/driver_mb"
"""Megabytes of columns that passed through the driver in a step, one way or the other, without validating and logging."""
WARMUP_LOSS: Final = "warmup/loss"
"""Mean negative log-likelihood per token of the supervised warm-up."""
TIMING_PREFIX: Final = "timing_s"
"""Seconds of each phase of a step are `timing_s/<phase>`."""

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
"""Tokens (prompts and responses) per second of `STEP_S` and per rank. verl's includes validation and saving."""
TOKENS_PER_S: Final = "perf/tokens_per_s"
"""Tokens (prompts and responses) per second of `STEP_S`, of all ranks together."""
DRIVER_MB: Final = "perf/driver_mb"
"""Megabytes of columns that passed through the driver in a step, one way or the other, without validating and logging."""
LOG_PROB_GAP: Final = "rollout/log_prob_gap_max"
"""Largest difference between the rollout's and the trainer's log-prob of a token; on the first step at least."""
LAYOUT_FRAC: Final = "perf/layout/"
"""Before a layout's name: the share of rows whose trainer log-probs, compared in `LOG_PROB_GAP`, were computed in it."""
WARMUP_LOSS: Final = "warmup/loss"
"""Mean negative log-likelihood per token of the supervised warm-up."""
TIMING_PREFIX: Final = "timing_s"
"""Seconds of each phase of a step are `timing_s/<phase>`. `validation`, `held_out` and `save_checkpoint` are timed too, outside
of the step."""
STEP_S: Final = "timing_s/step"
"""Seconds of the step's own phases together, from the rollout to the new weights in it."""
CPU_S: Final = "perf/cpu_s"
"""CPU seconds of the driver's process in the same time, with all its threads: with `runtime=inline` the ranks are among them."""

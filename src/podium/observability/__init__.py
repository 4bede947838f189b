"""What happened in a run: typed metrics, timings, the files of the run directory, the display and the curve.

Nothing is configured on import; warnings go to the standard loggers under `podium.observability`.
"""

from podium.observability.curve import draw_curve
from podium.observability.isolation import Trackers
from podium.observability.jsonl import read_rows
from podium.observability.metrics import Last, Max, Mean, Metric, Metrics, Min, Sum
from podium.observability.names import (
    CPU_S,
    DRIVER_MB,
    LAYOUT_FRAC,
    LOG_PROB_GAP,
    RESPONSE_LENGTH,
    REWARD,
    STEP_S,
    THROUGHPUT,
    TIMING_PREFIX,
    TOKENS_PER_S,
    VALIDATION_SCORE,
    WARMUP_LOSS,
)
from podium.observability.progress import Progress
from podium.observability.recorder import METRICS_FILE, SAMPLES_FILE, Recorder
from podium.observability.sample import Sample
from podium.observability.spans import SpanListener, Spans
from podium.observability.tracker import Phase, RunInfo, Status, Tracker

__all__ = [
    "CPU_S",
    "DRIVER_MB",
    "LAYOUT_FRAC",
    "LOG_PROB_GAP",
    "METRICS_FILE",
    "RESPONSE_LENGTH",
    "REWARD",
    "SAMPLES_FILE",
    "STEP_S",
    "THROUGHPUT",
    "TIMING_PREFIX",
    "TOKENS_PER_S",
    "VALIDATION_SCORE",
    "WARMUP_LOSS",
    "Last",
    "Max",
    "Mean",
    "Metric",
    "Metrics",
    "Min",
    "Phase",
    "Progress",
    "Recorder",
    "RunInfo",
    "Sample",
    "SpanListener",
    "Spans",
    "Status",
    "Sum",
    "Tracker",
    "Trackers",
    "draw_curve",
    "read_rows",
]

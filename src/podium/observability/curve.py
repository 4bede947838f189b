"""The picture of a run: reward and validation score over steps, and how long the responses are."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final, TypeAlias

from podium.errors import DataError, MissingExtraError
from podium.observability.jsonl import Row, read_rows
from podium.observability.names import RESPONSE_LENGTH, REWARD, VALIDATION_SCORE
from podium.observability.recorder import METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Series: TypeAlias = Sequence[tuple[int, float]]

CURVE_FILE: Final = "curve.png"
BLUE, ORANGE, GREEN, INK, GRID = "#4C78A8", "#F58518", "#54A24B", "#333333", "#E3E3E3"
SMOOTHING_FRAC: Final = 0.05
"""Width of the trend's moving average, as a fraction of the steps."""


def draw_curve(run_dir: Path) -> Path:
    """Draw `curve.png` from the run's metrics and return its path.

    Raises DataError when the metrics hold nothing to draw, MissingExtraError without matplotlib.
    """
    rows = list(read_rows(run_dir / METRICS_FILE))
    reward, validation, length = (_series(rows, name) for name in (REWARD, VALIDATION_SCORE, RESPONSE_LENGTH))
    if not (reward or validation or length):
        raise DataError(f"{run_dir / METRICS_FILE} has no {REWARD}, {VALIDATION_SCORE} or {RESPONSE_LENGTH} to draw")
    figure = _figure()
    score_axes, length_axes = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    _draw_scores(score_axes, reward, validation)
    _draw_smoothed(length_axes, length, GREEN, "response length")
    _dress(score_axes, "score")
    _dress(length_axes, "tokens")
    length_axes.set_xlabel("step", color=INK)
    figure.suptitle(run_dir.resolve().name, x=0.02, ha="left", fontsize=13, fontweight="bold", color=INK)
    path = run_dir / CURVE_FILE
    figure.savefig(path, dpi=150)
    return path


def _series(rows: Sequence[Row], name: str) -> Series:
    points = [(row["step"], row.get(name)) for row in rows]
    return [(step, float(value)) for step, value in points if isinstance(step, int) and isinstance(value, int | float)]


def _figure() -> Figure:
    """A figure of its own, drawn by Agg, outside pyplot's global state."""
    try:
        module = importlib.import_module("matplotlib.figure")
    except ImportError as exc:
        raise MissingExtraError("matplotlib", "plot", "drawing curve.png (trainer.curve)") from exc
    figure: Figure = module.Figure(figsize=(8, 5.5), layout="constrained")
    return figure


def _draw_scores(axes: Axes, reward: Series, validation: Series) -> None:
    _draw_smoothed(axes, reward, BLUE, "training reward")
    if validation:
        steps, scores = zip(*validation, strict=True)
        label = f"validation score ({scores[0]:.3f} to {scores[-1]:.3f})"
        axes.plot(steps, scores, color=ORANGE, marker="o", markersize=5, linewidth=1.8, label=label, zorder=3)


def _draw_smoothed(axes: Axes, series: Series, color: str, label: str) -> None:
    """Each step faintly, and over it the trend."""
    if series:
        steps, values = zip(*series, strict=True)
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
        axes.plot(steps, _smoothed(values), color=color, linewidth=2, label=label)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Moving average centred on each step, so that the trend does not lag behind the validation score."""
    half = int(len(values) * SMOOTHING_FRAC / 2)
    return [fmean(values[max(0, at - half) : at + half + 1]) for at in range(len(values))]


def _dress(axes: Axes, ylabel: str) -> None:
    axes.set_ylabel(ylabel, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.locator_params(axis="x", integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")

"""The curve is a picture, from whatever the metrics hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from podium.errors import DataError, MissingExtraError
from podium.observability import RESPONSE_LENGTH, REWARD, VALIDATION_SCORE, Recorder, draw_curve


def record(run_dir: Path, rows: dict[int, dict[str, float]]) -> None:
    with Recorder(run_dir) as rec:
        for step, metrics in rows.items():
            rec.log_step(step, metrics)


def is_png(path: Path) -> bool:
    content = path.read_bytes()
    return content.startswith(b"\x89PNG\r\n\x1a\n") and len(content) > 5000


def test_draws_all_series_without_pyplot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows: dict[int, dict[str, float]] = {step: {REWARD: step / 40, RESPONSE_LENGTH: 9.0 - step / 40} for step in range(1, 41)}
    record(tmp_path, {0: {VALIDATION_SCORE: 0.1}, **rows, 41: {VALIDATION_SCORE: 0.9, REWARD: float("nan")}})
    had_pyplot = "matplotlib.pyplot" in sys.modules  # reasoning-gym imports it, where another test has used that
    path = draw_curve(tmp_path)
    assert path == tmp_path / "curve.png"
    assert is_png(path)
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


@pytest.mark.parametrize("name", [REWARD, VALIDATION_SCORE, RESPONSE_LENGTH])
def test_draws_one_series_of_one_point(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    record(tmp_path, {1: {name: 0.5}})
    assert is_png(draw_curve(tmp_path))


def test_nothing_to_draw_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=REWARD):
        draw_curve(tmp_path)


def test_missing_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path, {1: {REWARD: 0.5}})
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"\[plot\]"):
        draw_curve(tmp_path)

"""Trackers never stop training: those that raise, hang or fall behind cost a warning each, and lost rows are counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.config import TrackerConfig
from podium.errors import ConfigError, MissingExtraError
from podium.observability import METRICS_FILE, Recorder, RunInfo, Sample, Tracker, Trackers, isolation, read_rows
from podium.observability.isolation import IsolatedTracker
from podium.parts import TRACKERS


def run_info(folder: Path) -> RunInfo:
    return RunInfo(run_id="0123456789abcdef", name="a-warmup", group="a", phase="warm-up", folder=folder, config={"seed": 1})


def sample(text: str = "4") -> Sample:
    return Sample(uid="u1", sample_index=0, weight_version=3, prompt="2+2", response=text, reward=1.0)


class Listing(Tracker):
    """Keeps every call, with the thread that made it."""

    def __init__(self, settings: TrackerConfig | None = None) -> None:
        super().__init__(settings or TrackerConfig(name="listing"))
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def _keep(self, *call: object) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def start(self, run: RunInfo) -> None:
        self._keep("start", run.resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._keep(step, dict(metrics))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._keep(step, [each.response for each in samples])

    def finish(self, status: str) -> None:
        self._keep("finish", status)


class Raising(Listing):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step != 2:
            raise ConnectionError("no network")

    def finish(self, status: str) -> None:
        raise ConnectionError("still no network")


class NotStarting(Listing):
    def start(self, run: RunInfo) -> None:
        raise SystemExit("login first")


class Hanging(Listing):
    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.release.wait(30)


def raise_in_constructor() -> Tracker:
    raise ImportError("libfoo.so is missing")


def trackers(folder: Path, makers: Mapping[str, Callable[[], Tracker]]) -> Trackers:
    """Trackers that are made by functions rather than named by settings."""
    found = Trackers(run_info(folder))
    found._all = [IsolatedTracker(name, make) for name, make in makers.items()]
    return found


def test_a_tracker_gets_every_call_in_order_on_a_thread_of_its_own(tmp_path: Path) -> None:
    listing = Listing()
    with Recorder(tmp_path, trackers=trackers(tmp_path, {"listing": lambda: listing})) as rec:
        rec.begin(None)
        rec.log_step(0, {"a": 1})
        rec.log_samples(1, [sample("4"), sample("5")])
        rec.log_samples(1, [])
        rec.log_step(1, {"a": 2})
    assert listing.calls == [("start", None), (0, {"a": 1.0}), (1, ["4", "5"]), (1, {"a": 2.0}), ("finish", "finished")]
    assert len(listing.threads) == 1
    assert listing.threads != {threading.get_ident()}


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")])
def test_the_status_is_how_the_phase_ended(tmp_path: Path, error: type[BaseException], status: str) -> None:
    listing = Listing()
    rec = Recorder(tmp_path, trackers=trackers(tmp_path, {"listing": lambda: listing}))
    rec.begin(7)
    rec.__exit__(error, error(), None)
    assert listing.calls == [("start", 7), ("finish", status)]


def test_bad_trackers_cost_a_warning_each_and_the_count_of_lost_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "FINISH_TIMEOUT_S", 0.3)
    hanging, listing = Hanging(), Listing()
    makers = {
        "raising": Raising,
        "hanging": lambda: hanging,
        "listing": lambda: listing,
        "broken": raise_in_constructor,
        "no-login": NotStarting,
    }
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING), Recorder(tmp_path, trackers=trackers(tmp_path, makers)) as rec:
        rec.begin(None)
        for step in range(1, 6):
            rec.log_step(step, {"odd name//": step})
    assert time.monotonic() - started_s < 5
    hanging.release.set()
    assert len(list(read_rows(tmp_path / METRICS_FILE))) == 5
    assert listing.calls[1:-1] == [(step, {"odd name//": float(step)}) for step in range(1, 6)]
    warned = sorted(record.getMessage() for record in caplog.records)
    assert [text.partition(". Training goes on")[0] for text in warned] == [
        "tracker 'broken' could not be constructed: ImportError: libfoo.so is missing; nothing is logged there",
        "tracker 'hanging' did not finish within 0.3 s and is left behind",
        "tracker 'hanging' did not take 5 of 5 rows; metrics.jsonl has them all",
        "tracker 'no-login' could not start: SystemExit: login first; nothing is logged there",
        "tracker 'no-login' did not take 5 of 5 rows; metrics.jsonl has them all",
        "tracker 'raising' could not log step 1: ConnectionError: no network",
        "tracker 'raising' did not take 4 of 5 rows; metrics.jsonl has them all",
    ]


def test_a_slow_tracker_drops_rows_rather_than_wait(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hanging = Hanging()
    isolated = IsolatedTracker("slow", lambda: hanging, max_waiting=2)
    isolated.start(run_info(tmp_path))
    for step in range(10):
        isolated.log(step, {})
    isolated.ask_to_finish("finished")
    hanging.release.set()
    isolated.wait(time.monotonic() + 10)
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("tracker 'slow' is 2 calls behind: it could not log step ")
    assert last.startswith("tracker 'slow' did not take ")
    assert hanging.calls[-1] == ("finish", "finished")


def test_names_resolve_to_their_settings_and_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted(TRACKERS.rows) == ["mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
    for name in TRACKERS.rows:
        assert issubclass(TRACKERS.settings_of(name) or object, TrackerConfig)
    monkeypatch.setattr("podium.parts.table.find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=r"wandb, for the tracker 'wandb'.*\[wandb\]"):
        TRACKERS.resolve("wandb")
    with pytest.raises(ConfigError, match="unknown tracker 'wanbd'; did you mean 'wandb'"):
        TRACKERS.resolve("wanbd")
    with pytest.raises(ConfigError, match="must be a subclass of"):
        TRACKERS.resolve("json:JSONDecoder")

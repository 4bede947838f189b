"""MLflow, by its client: a tracking server, or a database file of this machine."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from podium.config import TrackerConfig
from podium.observability.jsonl import plain
from podium.observability.sample import Sample
from podium.observability.tracker import RunInfo, Status, Tracker

RUN_ID_TAG: Final = "podium.run_id"
"""MLflow makes ids itself; a resumed phase finds its run by this tag."""
MAX_METRICS: Final = 1000
MAX_PARAMS: Final = 100
MAX_PARAM_CHARS: Final = 6000
"""What MLflow takes in one request, and as one parameter."""
STATUSES: Final[Mapping[Status, str]] = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLflowSettings(TrackerConfig):
    """The settings of the tracker `mlflow`."""

    experiment: str = "podium"
    """Experiment of the runs; it is made where it does not exist."""
    tracking_uri: str | None = None
    """A server's URL, or e.g. `sqlite:////data/mlflow.db`; null: as MLFLOW_TRACKING_URI says, or else MLflow's default."""


class MLflowTracker(Tracker):
    """A run of MLflow for each phase; the settings are its parameters, samples are files `samples/step-N.jsonl`."""

    Settings = MLflowSettings

    def __init__(self, settings: MLflowSettings) -> None:
        super().__init__(settings)
        self._own = settings
        self._entities = importlib.import_module("mlflow.entities")
        self._module = importlib.import_module("mlflow")

    def start(self, run: RunInfo) -> None:
        self._client: Any = self._module.MlflowClient(tracking_uri=self._own.tracking_uri)
        experiment = self._client.get_experiment_by_name(self._own.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(self._own.experiment)
        if found := self._client.search_runs([number], f"tags.`{RUN_ID_TAG}` = '{run.run_id}'"):
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {RUN_ID_TAG: run.run_id, "podium.phase": run.phase, "podium.group": run.group}
            self._id = self._client.create_run(number, run_name=run.name, tags=tags).info.run_id
            self._log_settings(run.config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        rows = [self._entities.Metric(name, value, now_ms, step) for name, value in metrics.items()]
        for first in range(0, len(rows), MAX_METRICS):
            self._client.log_batch(self._id, metrics=rows[first : first + MAX_METRICS])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        lines = [json.dumps(plain(sample.named), ensure_ascii=False) for sample in samples]
        self._client.log_text(self._id, "\n".join(lines) + "\n", f"samples/step-{step}.jsonl")

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._id, STATUSES[status])

    def _log_settings(self, config: Mapping[str, Any]) -> None:
        params = [self._entities.Param(key, str(value)[:MAX_PARAM_CHARS]) for key, value in _leaves(config)]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value

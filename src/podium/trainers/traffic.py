"""`traffic.json` of a run directory: how many bytes of each column went which way in its last step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from podium.errors import ConfigError
from podium.single_controller.calls.traffic import DRIVER, THROUGH_DRIVER, WAYS, Traffic, Way
from podium.trainers.json_files import read_json, write_json

REMEDY = "remove it; the run's next step writes it anew"
LABELS: dict[Way, str] = {
    "sent": "driver -> {}",
    "read": "ranks read for {}",
    "returned": "{} -> driver",
    "stayed": "{} -> stays",
    "fetched": "driver fetched",
}
"""Each way in words, with the call's name."""


class Moved(BaseModel):
    """How much of one column went one way for one call; the call is `driver` where the driver read rows by itself."""

    model_config = ConfigDict(strict=True, extra="forbid")

    call: str
    way: Way
    column: str
    bytes: NonNegativeInt


@dataclass(frozen=True)
class Edge:
    """Where bytes went from and to, and how many of each column."""

    call: str
    way: Way
    columns: Mapping[str, int]

    @property
    def label(self) -> str:
        """The edge in words."""
        return LABELS[self.way].format(self.call)


class StepTraffic(BaseModel):
    """What one step moved, in the order of its calls."""

    model_config = ConfigDict(strict=True, extra="forbid")

    step: int
    rows: list[Moved]

    @classmethod
    def of(cls, step: int, traffic: Traffic) -> StepTraffic:
        rows = [Moved(call=call, way=way, column=column, bytes=count) for (call, way, column), count in traffic.counted().items()]
        return cls(step=step, rows=rows)

    def edges(self) -> list[Edge]:
        """The rows by call and way; what the driver fetched between two calls is an edge of its own."""
        found: dict[tuple[str, Way, str], dict[str, int]] = {}
        last = ""
        for row in self.rows:
            last = last if row.call == DRIVER else row.call
            columns = found.setdefault((row.call, row.way, last if row.call == DRIVER else ""), {})
            columns[row.column] = columns.get(row.column, 0) + row.bytes
        return [Edge(call, way, columns) for (call, way, _), columns in found.items()]

    def by_way(self) -> dict[Way, int]:
        """Bytes of each way, none left out."""
        return {way: sum(row.bytes for row in self.rows if row.way == way) for way in WAYS}

    @property
    def through_driver(self) -> int:
        """Bytes that were in the driver's hands."""
        return sum(count for way, count in self.by_way().items() if way in THROUGH_DRIVER)

    @property
    def moved(self) -> int:
        """Bytes that went anywhere: all but those that stayed."""
        return sum(count for way, count in self.by_way().items() if way != "stayed")


def write_traffic(path: Path, traffic: StepTraffic) -> None:
    """Atomically, in place of an earlier step's."""
    write_json(path, traffic.model_dump())


def read_traffic(path: Path) -> StepTraffic | None:
    """The last step's; None when there is no file. ConfigError when it is damaged."""
    content = read_json(path, remedy=REMEDY)
    if content is None:
        return None
    try:
        return StepTraffic.model_validate(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        raise ConfigError(f"{path} is damaged ({'.'.join(map(str, first['loc']))}: {first['msg']}): {REMEDY}") from exc

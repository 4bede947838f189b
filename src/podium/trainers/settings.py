"""The settings that a run was last started with, and what was changed since: which key, what it was, what it is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.config import RunConfig, resolve, write_value
from podium.errors import ConfigError
from podium.parts import Sources
from podium.trainers.json_files import read_json, write_json

FREE_SECTION = "profiler."
FREE = frozenset(
    {
        *("name", "description", "run_root", "runtime", "nodes", "call_timeout_s", "start_timeout_s", "reward.num_workers"),
        *(f"trainer.{key}" for key in ("val_freq", "save_freq", "keep_checkpoints", "samples_per_step", "trackers", "curve")),
    }
)
"""Settings that decide neither what is learned nor a score, as do those of the section: `config.yaml` may be edited in them while
a run rests."""

REMEDY = "put it back, or remove it to trust config.yaml as it is"
"""What to do about a damaged record."""


class _Absent:
    def __repr__(self) -> str:
        return "not set"


ABSENT = _Absent()


@dataclass(frozen=True)
class Change:
    """One setting of a run that differs; a key that one side does not have is `ABSENT` there."""

    key: str
    was: object
    now: object

    def __str__(self) -> str:
        return f"{self.key}: was {_shown(self.was)}, is {_shown(self.now)}"

    @property
    def override(self) -> str | None:
        """The change as an argument of `podium train --resume`, quoted for a shell; None for a key that was removed."""
        return None if self.now is ABSENT else shlex.quote(f"{self.key}={_shown(self.now)}")


def changes(was: RunConfig, now: RunConfig) -> list[Change]:
    """Every setting that differs, by its dotted key, in the order of the schema."""
    old, new = (dict(_leaves(config.model_dump(mode="json"))) for config in (was, now))
    keys = [*new, *(key for key in old if key not in new)]
    found = (Change(key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys)
    return [change for change in found if change.was != change.now]


@dataclass(frozen=True)
class SettingsRecord:
    """`settings.json` of a run: the settings it was last started with, and a list of what was changed on the way."""

    path: Path
    sources: Sources
    """The files of parts that the run has stored."""

    def read(self) -> RunConfig | None:
        """The settings; None without a file. ConfigError when it is damaged."""
        content = self._content()
        try:
            return None if content is None else resolve(content["settings"], sources=self.sources)
        except ConfigError as exc:
            raise ConfigError(f"{self.path} does not hold settings of this version: {exc}\n{REMEDY}") from exc

    def write(self, config: RunConfig, *, after_step: int | None = None) -> list[Change]:
        """Record the settings from here on; returns, and lists in the file, what changed. `after_step` was the last one saved."""
        content, known = self._content(), self.read()
        found = changes(known, config) if known else []
        if content is None or found:
            entries = [{"after_step": after_step, **_entry(change)} for change in found]
            history = [*(content["changed"] if content else []), *entries]
            write_json(self.path, {"settings": config.model_dump(mode="json"), "changed": history})
        return found

    def check_edits(self, written: RunConfig, said: RunConfig, run: Path) -> None:
        """ConfigError when `config.yaml`, as `written`, was edited in what matters, and the command line has not said so: `said`
        are the recorded settings with its overrides."""
        known = self.read()
        values = dict(_leaves(said.model_dump(mode="json")))
        edits = changes(known, written) if known else []
        unsaid = [edit for edit in edits if not _is_free(edit.key) and values.get(edit.key, ABSENT) != edit.now]
        if unsaid:
            listed = "".join(f"\n  {edit}" for edit in unsaid)
            overrides = " ".join(edit.override for edit in unsaid if edit.override)
            raise ConfigError(
                f"{run / 'config.yaml'} was edited since the run was last started:{listed}\nput it back, or to go on with other "
                f"settings say so: podium train --resume {run} {overrides}".rstrip()
            )

    def _content(self) -> dict[str, Any] | None:
        content = read_json(self.path, remedy=REMEDY)
        if content is not None and not (isinstance(content.get("settings"), dict) and isinstance(content.get("changed"), list)):
            raise ConfigError(f"{self.path} is damaged (it has no settings): {REMEDY}")
        return content


def _entry(change: Change) -> dict[str, Any]:
    return {"key": change.key} | {name: value for name, value in (("was", change.was), ("is", change.now)) if value is not ABSENT}


def _leaves(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_free(key: str) -> bool:
    return key in FREE or key.startswith(FREE_SECTION)


def _shown(value: object) -> str:
    return repr(value) if value is ABSENT else write_value(value)

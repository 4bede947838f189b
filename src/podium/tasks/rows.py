"""A user's files to rows: JSONL or parquet, in verl's columns or plain `prompt` and `answer`.

Nothing is dropped here: each row of a file becomes a `Row`, or a `BadRow` that says where it stands and what is wrong. Files are
data only: no code of theirs runs and nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import JsonValue

from podium.errors import ConfigError, DataError, TaskError
from podium.tasks.base import Message, Prompt
from podium.tasks.parquet import column_names, parquet_entries, parquet_library

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
MESSAGE_KEYS = {"role", "content"}
GROUND_TRUTH = ("reward_model", "answer")
COLUMNS = ("prompt", *GROUND_TRUTH, "data_source", "extra_info")
"""The columns that are read."""
DECIMAL_FRACTION = re.compile(r"-?\d+\.\d*[1-9]")
"""A number that is written in one way only: not 7.0, which may be 7, and not 1e-07."""
IGNORED = frozenset({"images", "image", "videos", "video", "audios", "audio", "tools", "tool_calls", "messages", "system_prompt"})
"""Columns that would change what the policy sees, but are not read."""


@dataclass(frozen=True)
class Row:
    """A row that fits. `number` is its line in a JSONL file, its place in a parquet file, counted from 1."""

    path: str
    number: int
    prompt: Prompt
    data_source: str
    ground_truth: JsonValue
    extra_info: dict[str, JsonValue]
    ignored: frozenset[str] = frozenset()
    """The columns of `IGNORED` in which this row has something."""

    @property
    def answer(self) -> str:
        """The ground truth as text: itself, or its JSON."""
        return answer_text(self.ground_truth)


@dataclass(frozen=True)
class BadRow:
    """A row that does not fit, and why."""

    path: str
    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path} row {self.number}: {self.reason}"


Entry: TypeAlias = Callable[[], object]
"""Gives what a file holds for a row. DataError where that cannot be decoded."""
Rows: TypeAlias = Iterator[Row | BadRow]


def check_file(path: str, setting: str) -> None:
    """ConfigError when a path is not a file, or not of a kind that is read; MissingExtraError for parquet without pyarrow."""
    suffix = Path(path).suffix.lower()
    if Path(path).is_dir():
        raise ConfigError(f"{setting}: {path} is a folder; list the files in it")
    if suffix not in (*JSON_LINES, PARQUET):
        raise ConfigError(f"{setting}: {path}: a file of rows is named .jsonl (one JSON object a line) or .parquet, uncompressed")
    if not Path(path).is_file():
        raise ConfigError(f"{setting}: no such file: {path}{_nearby(path)}")
    if suffix == PARQUET:
        parquet_library(path)


def read_rows(path: str, *, needs_text_answer: bool) -> Rows:
    """Every row of a file, in order. TaskError when the file as a whole cannot be read.

    `needs_text_answer`: a ground truth must be text or a number that has one text only, since exact match compares text.
    """
    if Path(path).suffix.lower() == PARQUET:
        entries = _parquet_entries(path, needs_text_answer=needs_text_answer)
    else:
        entries = _json_entries(path)
    for number, entry in entries:
        try:
            yield _row(path, number, entry(), needs_text_answer=needs_text_answer)
        except DataError as exc:
            yield BadRow(path, number, str(exc))


def answer_text(ground_truth: JsonValue) -> str:
    """A ground truth as text: a string is itself, anything else its JSON.

    >>> answer_text(7), answer_text("7 "), answer_text([1, "a"])
    ('7', '7 ', '[1, "a"]')
    """
    return ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, ensure_ascii=False, default=str)


def _row(path: str, number: int, entry: object, *, needs_text_answer: bool) -> Row:
    if not isinstance(entry, dict):
        raise DataError(f"a row must be a JSON object, got {_shown(entry)}")
    values = {key: value for key, value in entry.items() if value is not None}
    _check_text({key: values[key] for key in COLUMNS if key in values})
    ground_truth = _ground_truth(values)
    if needs_text_answer:
        _check_comparable(ground_truth)
    data_source = values.get("data_source", Path(path).stem)
    if not isinstance(data_source, str):
        raise DataError(f"data_source must be text, got {_shown(data_source)}")
    extra_info = _object_of(values.get("extra_info", {}))
    if not isinstance(extra_info, dict):
        raise DataError(f"extra_info must be an object, got {_shown(extra_info)}")
    ignored = frozenset(key for key in IGNORED & values.keys() if values[key] not in ([], {}, ""))
    return Row(path, number, _prompt(values), data_source, ground_truth, extra_info, ignored)


def _check_comparable(ground_truth: JsonValue) -> None:
    if isinstance(ground_truth, dict | list):
        raise DataError(
            f"the ground truth {_shown(ground_truth)} is not text or a number, so exact match cannot compare it: "
            "set reward.function"
        )
    if isinstance(ground_truth, float) and not DECIMAL_FRACTION.fullmatch(answer_text(ground_truth)):
        raise DataError(
            f"the ground truth {ground_truth} is a float that can be written in several ways, so exact match cannot compare it: "
            "store it as text or as an integer, or set reward.function"
        )


def _object_of(value: object) -> object:
    """What a text of a JSON object or list says; anything else as it is."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        parsed: object = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed


def _check_text(values: dict[str, Any]) -> None:
    """JSON can spell half of a surrogate pair, which is not text: tokenizers and files refuse it."""
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as exc:
        raise DataError(
            f"the row holds half of a surrogate pair, {exc.object[exc.start : exc.end]!r}, which is not text"
        ) from None


def _ground_truth(values: dict[str, Any]) -> JsonValue:
    if "reward_model" in values:
        reward_model = _object_of(values["reward_model"])
        if not isinstance(reward_model, dict):
            raise DataError(f"reward_model must be an object with ground_truth, got {_shown(reward_model)}")
        ground_truth, name = reward_model.get("ground_truth"), "reward_model.ground_truth"
    elif "answer" in values:
        ground_truth, name = values["answer"], "answer"
    else:
        raise DataError(f"no ground truth: a row needs answer, or reward_model.ground_truth; it has {_keys(values)}")
    if ground_truth is None or (isinstance(ground_truth, str) and not ground_truth.strip()):
        raise DataError(f"the ground truth ({name}) is missing or empty")
    if isinstance(ground_truth, float) and not math.isfinite(ground_truth):
        raise DataError(f"the ground truth ({name}) is {ground_truth}")
    answer: JsonValue = ground_truth
    return answer


def _prompt(values: dict[str, Any]) -> Prompt:
    if "prompt" not in values:
        raise DataError(f"no prompt; the row has {_keys(values)}")
    prompt = _messages_of(values["prompt"])
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError("the prompt is empty")
        return prompt
    if not isinstance(prompt, list):
        raise DataError(f"prompt must be text or a list of messages, got {_shown(prompt)}")
    if not prompt:
        raise DataError("the prompt has no messages")
    messages = tuple(_message(number, message) for number, message in enumerate(prompt, start=1))
    if messages[-1].role == "assistant":
        raise DataError("the last message is the assistant's, so there is nothing to answer")
    return messages


def _messages_of(prompt: object) -> object:
    """The messages that a text of JSON spells: a list of objects that all have a role. Anything else as it is."""
    parsed = _object_of(prompt)
    is_conversation = isinstance(parsed, list) and parsed and all(isinstance(item, dict) and "role" in item for item in parsed)
    return parsed if is_conversation else prompt


def _message(number: int, message: object) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"message {number} must be an object with role and content, got {_shown(message)}")
    found = {key: value for key, value in message.items() if value is not None}
    for key in ("role", "content"):
        if key not in found:
            raise DataError(f"message {number} has no {key}")
        if not isinstance(found[key], str):
            raise DataError(f"{key} of message {number} must be text, got {_shown(found[key])}")
        if not found[key].strip():
            raise DataError(f"{key} of message {number} is empty")
    if unknown := {key for key in found.keys() - MESSAGE_KEYS if found[key] not in ([], {}, "")}:
        raise DataError(f"message {number} has {_keys(unknown)}, only role and content are understood")
    return Message(found["role"], found["content"])


# -- files --------------------------------------------------------------------------------------------------------------


def _json_entries(path: str) -> Iterator[tuple[int, Entry]]:
    """Line number and how to parse it, for every line that is not blank."""
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, partial(_parsed, line)
    except OSError as exc:
        raise TaskError(f"{path} cannot be read: {exc}") from exc


def _parsed(line: bytes) -> object:
    try:
        entry: object = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        raise DataError(f"not JSON: {exc}") from exc
    return entry


def _parquet_entries(path: str, *, needs_text_answer: bool) -> Iterator[tuple[int, Entry]]:
    """Number and how to decode it, for every row. TaskError for a file without a prompt or a ground truth column."""
    names = column_names(path)
    if "prompt" not in names:
        raise TaskError(f"{path} has no column prompt; it has {_keys(names)}")
    if not set(GROUND_TRUTH) & set(names):
        raise TaskError(f"{path} has no ground truth: it needs a column answer, or reward_model; it has {_keys(names)}")
    text_only = ("answer", "reward_model.ground_truth") if needs_text_answer else ()
    return enumerate(parquet_entries(path, COLUMNS, unread=IGNORED, text_only=text_only), start=1)


def _nearby(path: str) -> str:
    """What to look at when a relative path leads nowhere."""
    return "" if Path(path).is_absolute() else f" (relative to {Path.cwd()})"


def _keys(values: Any) -> str:
    return ", ".join(sorted(map(str, values))) or "no columns"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

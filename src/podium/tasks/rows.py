"""A user's files to rows: JSONL or parquet, in verl's columns or plain `prompt` and `answer`.

Nothing is dropped here: each row of a file becomes a `Row`, or a `BadRow` that says where it stands and what is wrong. Files are
data only: no code of theirs runs and nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import JsonValue

from podium.errors import ConfigError, DataError, MissingExtraError, TaskError
from podium.tasks.base import Message, Prompt

JSON_LINES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
MESSAGE_KEYS = {"role", "content"}


@dataclass(frozen=True)
class Row:
    """A row that fits. `number` is its line in a JSONL file, its place in a parquet file, counted from 1."""

    path: str
    number: int
    prompt: Prompt
    data_source: str
    ground_truth: JsonValue
    extra_info: dict[str, JsonValue]

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


Rows: TypeAlias = Iterator[Row | BadRow]


def check_file(path: str, setting: str) -> None:
    """ConfigError when a path is no file, or of a kind that is not read; MissingExtraError for parquet without pyarrow."""
    suffix = Path(path).suffix.lower()
    if suffix not in (*JSON_LINES, PARQUET):
        raise ConfigError(f"{setting}: {path}: a file of rows is named .jsonl (one JSON object a line) or .parquet")
    if not Path(path).is_file():
        raise ConfigError(f"{setting}: no such file: {path}{_nearby(path)}")
    if suffix == PARQUET:
        _parquet_library(path)


def read_rows(path: str, *, needs_text_answer: bool) -> Rows:
    """Every row of a file, in order. TaskError when the file as a whole cannot be read.

    `needs_text_answer`: a ground truth that is a list or an object does not fit, since nothing but text is compared with it.
    """
    entries = _parquet_entries(path) if Path(path).suffix.lower() == PARQUET else _json_entries(path)
    for number, entry in entries:
        try:
            yield _row(path, number, entry() if callable(entry) else entry, needs_text_answer=needs_text_answer)
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
        raise DataError(f"a row is a JSON object, got {_shown(entry)}")
    values = {key: value for key, value in entry.items() if value is not None}
    _check_text(values)
    ground_truth = _ground_truth(values)
    if needs_text_answer and isinstance(ground_truth, dict | list):
        raise DataError(
            f"the ground truth {_shown(ground_truth)} is no text or number, so exact match cannot compare it: set reward.function"
        )
    data_source = values.get("data_source", Path(path).stem)
    if not isinstance(data_source, str):
        raise DataError(f"data_source must be text, got {_shown(data_source)}")
    extra_info = values.get("extra_info", {})
    if not isinstance(extra_info, dict):
        raise DataError(f"extra_info must be an object, got {_shown(extra_info)}")
    return Row(path, number, _prompt(values), data_source, ground_truth, extra_info)


def _check_text(values: dict[str, Any]) -> None:
    """JSON can spell half of a surrogate pair, which is no text: no tokenizer and no file would take it."""
    try:
        json.dumps(values, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as exc:
        raise DataError(
            f"the row holds half of a surrogate pair, {exc.object[exc.start : exc.end]!r}, which is no text"
        ) from None


def _ground_truth(values: dict[str, Any]) -> JsonValue:
    if "reward_model" in values:
        reward_model = values["reward_model"]
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
    prompt = values["prompt"]
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
    if unknown := found.keys() - MESSAGE_KEYS:
        raise DataError(f"message {number} has {_keys(unknown)}, only role and content are understood")
    return Message(found["role"], found["content"])


# -- files --------------------------------------------------------------------------------------------------------------


def _json_entries(path: str) -> Iterator[tuple[int, Any]]:
    """Line number and how to parse it, for every line that is not blank."""
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, lambda line=line: _parsed(line)
    except OSError as exc:
        raise TaskError(f"{path} cannot be read: {exc}") from exc


def _parsed(line: bytes) -> object:
    try:
        entry: object = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as exc:
        raise DataError(f"not JSON: {exc}") from exc
    return entry


def _parquet_entries(path: str) -> Iterator[tuple[int, Any]]:
    parquet = _parquet_library(path)
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            for entry in batch.to_pylist():
                number += 1
                yield number, entry
    except (OSError, ValueError) as exc:  # pyarrow's ArrowInvalid is a ValueError
        raise TaskError(f"{path} cannot be read as parquet: {exc}") from exc


def _parquet_library(path: str) -> Any:
    try:
        import pyarrow.parquet as parquet
    except ImportError as exc:
        raise MissingExtraError("pyarrow", "parquet", f"the parquet file {path}") from exc
    return parquet


def _nearby(path: str) -> str:
    """What to look at when a relative path leads nowhere."""
    return "" if Path(path).is_absolute() else f" (relative to {Path.cwd()})"


def _keys(values: Any) -> str:
    return ", ".join(sorted(map(str, values))) or "no columns"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

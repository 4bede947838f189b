"""Drawing the problems of a reasoning-gym dataset: no question twice, and no answer in two splits where there are enough answers.

Several datasets iterate over sets of text, so that their problems depend on Python's hash seed, which differs in every process.
`draw_in_a_process` fixes that seed, so a resumed run asks what the run began with. It also keeps the library's prints away.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import random
import re
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from podium.config import TaskConfig
from podium.errors import MissingExtraError, PodiumError, TaskError, nearest
from podium.tasks.base import Problem, Split, normalised

logger = logging.getLogger(__name__)

BLOCK = 4096
"""Problems drawn at a time."""
SEED_STRIDE = 100_000_000
"""reasoning-gym makes problem i of seed s from s + i: seeds of the splits stand further apart than any split is long."""
MAX_DRAWS_PER_PROBLEM = 200
"""Draws for each problem found so far and one more, after which the dataset is taken to be exhausted."""
SOLVED = 1.0
"""The score of a right answer, compared exactly: partial credit adds up to 0.9999999999999998 for some wrong ones."""
EXAMPLES = ("example_correct_answer", "possible_answer", "example_answer")
"""Where a dataset whose questions have many right answers keeps one of them in an entry's metadata."""
MIXTURE = "composite"
"""The library's dataset of datasets, whose options are Python objects."""
NONSENSE = "no such answer"
"""A response that does not solve any problem."""
SLOW_S = 30.0
"""Seconds of drawing after which the driver says why nothing happens yet."""
BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from podium.tasks.library_problems import main; main()"

SIZES: dict[Split, int] = {"train": 4096, "validation": 128, "held_out": 256}
"""Problems of the splits unless the config says how many."""
NUMBERS: dict[Split | Literal["few_shot"], int] = {"few_shot": 3, "held_out": 0, "validation": 1, "train": 2}
"""Which block of seeds a split draws from; in the order of drawing."""

Entry: TypeAlias = dict[str, Any]
"""A problem as the library makes it: question, answer (or None), metadata."""


@dataclass(frozen=True)
class Drawn:
    """Problems of the three splits; `entries[problem.key]` is the library's own."""

    splits: dict[Split, tuple[Problem, ...]]
    entries: list[Entry]
    disjoint_by: Literal["answer", "prompt"]
    accepts_nonsense: bool
    """Whether the library's verifier scores `NONSENSE` as right."""


def draw(config: TaskConfig) -> Drawn:
    """The problems that a config names. Splits differ in their answers, or where there are too few answers, in their prompts.

    TaskError for an unknown dataset, unfit params, and too few distinct questions; MissingExtraError without the library.
    """
    try:
        return _Drawing(config, by="answer").run()
    except _TooFewAnswersError:
        return _Drawing(config, by="prompt").run()


def draw_in_a_process(config: TaskConfig) -> Drawn:
    """As `draw`, in a process with a fixed hash seed, which discards what the library prints. A warning says so if it is slow."""
    command = [sys.executable, "-P", "-c", BOOTSTRAP, json.dumps(sys.path)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    warning = threading.Timer(SLOW_S, logger.warning, (f"{config.name} takes long: {_wanted(config)}; draw fewer if this lasts",))
    warning.daemon = True
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        warning.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it ended at once; the empty reply says so
                process.stdin.write(config.model_dump_json().encode() + b"\n")
                process.stdin.flush()
            reply = process.stdout.read()
        finally:
            warning.cancel()
            process.kill()
    if not reply:
        raise TaskError(f"the process that draws the problems of {config.name} ended without a reply (see above for its error)")
    drawn: Drawn | PodiumError = pickle.loads(reply)
    if isinstance(drawn, PodiumError):
        raise drawn
    return drawn


def main() -> None:
    """Entry point of the process: reads a config from stdin, writes the pickled `Drawn` or error to stdout."""
    reply = os.fdopen(os.dup(1), "wb")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    config = TaskConfig.model_validate_json(sys.stdin.buffer.readline())
    random.seed(0)  # a dataset (list_functions) also draws from the generator that all share
    threading.Thread(target=_end_with_the_driver, daemon=True).start()
    drawn: Drawn | PodiumError
    try:
        drawn = draw(config)
    except PodiumError as exc:
        drawn = exc
    with reply:
        pickle.dump(drawn, reply)


def _end_with_the_driver() -> None:
    os.read(0, 1)  # the driver keeps the other end open as long as it waits
    os._exit(1)


def create_dataset(config: TaskConfig, *, seed: int, size: int) -> Any:
    """The library's dataset. TaskError for an unknown name or params that do not fit."""
    if config.name == MIXTURE:
        raise TaskError(f"{MIXTURE} mixes datasets by options that are Python objects; task.name must be one of those datasets")
    try:
        return _library().create_dataset(config.name, seed=seed, size=size, **config.params)
    except ValueError as exc:
        raise TaskError(f"{exc}{nearest(str(config.name), known_names())}") from exc
    except (TypeError, AssertionError) as exc:
        raise TaskError(f"task.params {config.params} do not fit {config.name}: {exc}") from exc


def right_answer(entry: Entry) -> str:
    """The library's answer as text; where many are right and it gives none, its example; "" where it has no example either.

    >>> right_answer({"answer": None, "metadata": {"possible_answer": {0: 2, 1: 1}}})
    '{"0": 2, "1": 1}'
    """
    if entry["answer"] is not None:
        return str(entry["answer"])
    found = next((entry["metadata"][key] for key in EXAMPLES if entry["metadata"].get(key)), "")
    return found if isinstance(found, str) else json.dumps(found)


def is_solved(dataset: Any, response: str, entry: Entry) -> float:
    """1.0 when the dataset scores the stripped response as a full solution of the entry, else 0.0.

    Some of the library's verifiers raise on text that they cannot read, such as words where numbers belong. The answer is wrong
    then, if the verifier scores the right one without an error. Where it raises there too, the fault is its own: it is raised.
    """
    try:
        return float(dataset.score_answer(answer=response.strip(), entry=entry) == SOLVED)
    except Exception:  # whatever a verifier makes of a policy's text
        dataset.score_answer(answer=right_answer(entry), entry=entry)
        return 0.0


def known_names() -> Collection[str]:
    """Names of the library's datasets."""
    from reasoning_gym.factory import DATASETS

    names: Collection[str] = DATASETS.keys()
    return names


class _TooFewAnswersError(TaskError):
    """Too few distinct problems for a split, and some were refused because an earlier split has their answer."""


class _Drawing:
    """The problems drawn so far. A question is new if it differs in more than letters' case and white space."""

    def __init__(self, config: TaskConfig, *, by: Literal["answer", "prompt"]) -> None:
        self._config, self._by = config, by
        self._dataset = create_dataset(config, seed=0, size=1)
        self._entries: list[Entry] = []
        self._questions: set[str] = set()
        self._answers: dict[str, str] = {}
        self._is_answer_refused = False
        self._examples = ""

    def run(self) -> Drawn:
        if self._config.few_shot:
            shown = self._split("few_shot", self._config.few_shot)
            if not all(problem.answer for problem in shown):
                raise TaskError(f"task.few_shot shows answers, but {self._config.name} does not give any: set task.few_shot=0")
            self._examples = "".join(f"{problem.prompt} {problem.answer}\n" for problem in shown)
        sizes = _sizes(self._config)
        splits = {split: self._split(split, sizes[split]) for split in NUMBERS if split != "few_shot"}
        return Drawn(splits, self._entries, self._by, bool(is_solved(self._dataset, NONSENSE, self._entries[-1])))

    def _split(self, split: Split | Literal["few_shot"], wanted: int) -> tuple[Problem, ...]:
        """`wanted` new questions, by answer none with an answer of an earlier split."""
        problems: list[Problem] = []
        first_seed = (self._config.seed * 4 + NUMBERS[split]) * SEED_STRIDE
        for count, entry in enumerate(self._stream(first_seed), start=1):
            if self._is_new(entry, split):
                problem = Problem(
                    f"{split}-{len(problems)}", self._prompt(entry["question"]), right_answer(entry), len(self._entries)
                )
                problems.append(problem)
                self._entries.append(entry)
            if len(problems) == wanted:
                return tuple(problems)
            if count >= MAX_DRAWS_PER_PROBLEM * (len(problems) + 1):
                break
        raise (_TooFewAnswersError if self._is_answer_refused else TaskError)(
            f"{self._config.name} gave only {len(problems)} new {split} questions in {count} draws, but task."
            f"{'few_shot' if split == 'few_shot' else f'num_{split}'} asks for {wanted}: lower it or widen task.params"
        )

    def _is_new(self, entry: Entry, split: str) -> bool:
        """Whether the entry belongs into this split; remembers its question and answer then."""
        question = normalised(" ".join(self._prompt(entry["question"]).split()))
        if question in self._questions or (entry["answer"] is None and not self._is_known(entry)):
            return False
        if self._by == "answer" and self._answers.setdefault(normalised(right_answer(entry)), split) != split:
            self._is_answer_refused = True
            return False
        self._questions.add(question)
        return True

    def _is_known(self, entry: Entry) -> bool:
        """Whether the library's example is right (some are not), or there is not any."""
        example = right_answer(entry)
        return not example or bool(is_solved(self._dataset, example, entry))

    def _stream(self, first_seed: int) -> Iterator[Entry]:
        for start in range(0, SEED_STRIDE, BLOCK):
            dataset = create_dataset(self._config, seed=first_seed + start, size=BLOCK)
            for place in range(BLOCK):
                try:
                    yield dataset[place]
                except Exception as exc:  # whatever the library raises concerns its options
                    raise TaskError(
                        f"{self._config.name} cannot make a problem with task.params {self._config.params}: "
                        f"{type(exc).__name__}: {exc}"
                    ) from exc

    def _prompt(self, question: str) -> str:
        if (pattern := self._config.prompt_pattern) is not None:
            found = re.search(pattern, question)
            if found is None:
                raise TaskError(f"task.prompt_pattern {pattern!r} finds nothing in {question!r}")
            question = " ".join(group for group in found.groups() if group is not None)
        return self._examples + question if self._config.few_shot else question + "\n"


def _sizes(config: TaskConfig) -> dict[Split, int]:
    return {split: getattr(config, f"num_{split}") or SIZES[split] for split in get_args(Split)}


def _wanted(config: TaskConfig) -> str:
    return ", ".join(f"task.num_{split}={size}" for split, size in _sizes(config).items())


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as exc:
        raise MissingExtraError("reasoning-gym", "tasks", "a task of reasoning-gym") from exc
    return reasoning_gym

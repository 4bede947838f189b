"""A user's own task: rows of files in three disjoint splits, scored by exact match unless a reward function is set.

How splits come about. Files that are given for a split are that split; a row whose prompt also stands in a held-out or validation
file does not fit into an earlier-read one. Splits without files are taken off the training rows: all rows with an answer go
the same way, and all with a prompt too, so that neither is in two splits. Where few distinct answers make that impossible (yes or
no), rows are parted by prompt alone, and a warning says so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from podium.config import TaskConfig
from podium.errors import ConfigError, DataError, TaskError
from podium.tasks.base import Problem, RewardInputs, Split, Task, normalised, normalised_prompt
from podium.tasks.context import TaskContext
from podium.tasks.rows import BadRow, Row, check_file, read_rows

logger = logging.getLogger(__name__)

SPLITS: tuple[Split, ...] = ("held_out", "validation", "train")
SPLIT_OFF: dict[Split, int] = {"held_out": 256, "validation": 128}
"""Most rows that are split off the training rows unless the config says how many."""
SPLIT_OFF_FRACTION = 10
"""... and never more than one in so many."""
NUM_SHOWN = 5
"""Bad rows that a message shows."""


class FileTask(Task):
    """Problems from `task.train_files`, and `validation_files` and `held_out_files` where given. Rows keep their order."""

    def __init__(self, context: TaskContext[TaskConfig]) -> None:
        """With `exact_match` ground truths must be text. TaskError, ConfigError for unfit files."""
        config, count_tokens, exact_match = context.settings, context.count_tokens, context.exact_match
        if config.max_prompt_tokens is not None and count_tokens is None:
            raise ConfigError("task.max_prompt_tokens needs the tokenizer that counts: pass count_tokens")
        self._config, self._count_tokens = config, count_tokens
        files = {split: _files(config, split) for split in SPLITS}
        _check_files(files)
        read = {split: self._read(paths, exact_match=exact_match) for split, paths in files.items()}
        rows, bad = _without_leaks({split: found for split, (found, _) in read.items()})
        bad = [*(row for _, unfit in read.values() for row in unfit), *bad]
        self._settle_bad(bad, total=len(bad) + sum(map(len, rows.values())))
        if not rows["train"]:
            raise TaskError(f"no training row is left of {', '.join(files['train'])}")
        self.remarks = (*_ignored(rows), *filter(None, (_duplicates(split, rows[split]) for split in SPLITS)))
        parted = self._split_off(rows.pop("train"), [split for split in ("held_out", "validation") if not files[split]])
        self._rows: list[Row] = []
        named = _uids([row for found in (*rows.values(), *parted.values()) for row in found])
        for split in SPLITS:
            setattr(self, split, self._problems(split, {**rows, **parted}[split], named))

    def verify(self, problem: Problem, response: str) -> float:
        """1.0 when the response is the answer but for letters' case and white space around it, else 0.0."""
        return float(normalised(response) == normalised(problem.answer))

    def reward_inputs(self, problem: Problem) -> RewardInputs:
        row = self._rows[problem.key]
        return RewardInputs(row.data_source, row.ground_truth, row.extra_info)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, paths: Sequence[str], *, exact_match: bool) -> tuple[list[Row], list[BadRow]]:
        rows, bad = list[Row](), list[BadRow]()
        for path in paths:
            for row in read_rows(path, needs_text_answer=exact_match):
                match row if isinstance(row, BadRow) else self._fits(row):
                    case BadRow() as unfit:
                        bad.append(unfit)
                    case fit:
                        rows.append(fit)
        return rows, bad

    def _fits(self, row: Row) -> Row | BadRow:
        """The row, or what is wrong with its prompt's tokens."""
        if self._count_tokens is None:
            return row
        try:
            count = self._count_tokens(row.prompt)
        except DataError as exc:
            return BadRow(row.path, row.number, str(exc))
        limit = self._config.max_prompt_tokens
        if limit is not None and count > limit:
            return BadRow(row.path, row.number, f"the prompt has {count} tokens, task.max_prompt_tokens is {limit}")
        return row

    def _settle_bad(self, bad: Sequence[BadRow], *, total: int) -> None:
        if not bad:
            return
        text = f"{len(bad)} of {total} rows do not fit"
        if len(bad) == total > 1 and len({row.reason for row in bad}) == 1:
            raise TaskError(f"{text}, all for one reason: {bad[0].reason} (the first is {bad[0].path} row {bad[0].number})")
        text += f":{_listed(bad)}"
        if self._config.bad_rows == "raise":
            way_out = ", or leave them out with task.bad_rows=drop" if len(bad) < total else ""
            raise TaskError(f"{text}\nmend them{way_out}")
        logger.warning("%s\nthey are left out (task.bad_rows=drop)", text)

    # -- splitting ----------------------------------------------------------------------------------------------------

    def _split_off(self, rows: list[Row], missing: Sequence[Split]) -> dict[Split, list[Row]]:
        """The training rows, and those split off them for each missing split. Sets `disjoint_by`."""
        wanted = {split: self._num_wanted(split) or _default_size(split, len(rows)) for split in missing}
        if sum(wanted.values()) >= len(rows):
            asked = ", ".join(f"task.num_{split}={size}" for split, size in wanted.items())
            raise TaskError(f"{len(rows)} training rows are too few to split {asked} off them; give files of their own")
        if len(missing) < len(SPLIT_OFF):
            self.disjoint_by = "prompt"  # given files may share answers with the training rows
        parted = _part(rows, wanted, self._config.seed, by="answer")
        if parted is None:
            self.disjoint_by = "prompt"
            num_answers = len({normalised(row.answer) for row in rows})
            self.remarks += (
                f"{num_answers} distinct answers in {len(rows)} training rows are too few for splits without a common answer: "
                f"{' and '.join(missing)} split off by prompt",
            )
            parted = _part(rows, wanted, self._config.seed, by="prompt")
        if parted is None:
            raise TaskError(
                f"{len(rows)} training rows hold too few distinct prompts to split {' and '.join(missing)} off them; "
                "give task.validation_files and task.held_out_files"
            )
        return parted

    def _num_wanted(self, split: Split) -> int | None:
        wanted: int | None = getattr(self._config, f"num_{split}")
        return wanted

    def _problems(self, split: Split, rows: Sequence[Row], uids: Mapping[tuple[str, int], str]) -> tuple[Problem, ...]:
        wanted = self._num_wanted(split)
        if wanted is not None and wanted > len(rows) and _files(self._config, split):
            raise TaskError(f"task.num_{split} asks for {wanted} problems, the files leave {len(rows)} for that split")
        problems = []
        for row in rows[:wanted]:
            problems.append(Problem(uids[row.path, row.number], row.prompt, row.answer, len(self._rows)))
            self._rows.append(row)
        if not problems:
            raise TaskError(f"no {split} row is left of {', '.join(_files(self._config, split))}")
        return tuple(problems)


def _files(config: TaskConfig, split: Split) -> tuple[str, ...]:
    files: tuple[str, ...] = getattr(config, f"{split}_files")
    return files


def _listed(bad: Sequence[BadRow]) -> str:
    """The first bad rows, one a line."""
    more = f"\n  and {len(bad) - NUM_SHOWN} more" if len(bad) > NUM_SHOWN else ""
    return "".join(f"\n  {row}" for row in bad[:NUM_SHOWN]) + more


def _check_files(files: Mapping[Split, Sequence[str]]) -> None:
    seen: set[Path] = set()
    for split, paths in files.items():
        for path in paths:
            check_file(path, f"task.{split}_files")
            if Path(path).resolve() in seen:
                raise ConfigError(f"task.{split}_files: {path} is listed twice; a file belongs to one split, once")
            seen.add(Path(path).resolve())


def _default_size(split: Split, num_rows: int) -> int:
    return max(1, min(SPLIT_OFF[split], num_rows // SPLIT_OFF_FRACTION))


def _prompt_form(row: Row) -> str:
    return normalised_prompt(Problem("", row.prompt, "", 0))


def _without_leaks(rows: Mapping[Split, list[Row]]) -> tuple[dict[Split, list[Row]], list[BadRow]]:
    """Rows whose prompt is in no file of a split before theirs (held-out, validation, train), and the others."""
    owners: dict[str, tuple[Split, Row]] = {}
    kept: dict[Split, list[Row]] = {}
    bad: list[BadRow] = []
    for split in SPLITS:
        own: dict[str, tuple[Split, Row]] = {}
        kept[split] = []
        for row in rows[split]:
            form = _prompt_form(row)
            if form in owners:
                other, there = owners[form]
                bad.append(BadRow(row.path, row.number, f"the prompt is also a {other} one: {there.path} row {there.number}"))
            else:
                kept[split].append(row)
                own.setdefault(form, (split, row))
        owners |= own
    return kept, bad


def _ignored(rows: Mapping[Split, list[Row]]) -> list[str]:
    """What to say about columns that would change what the policy sees, one remark a file."""
    found: dict[str, set[str]] = {}
    for row in (row for split in SPLITS for row in rows[split] if row.ignored):
        found.setdefault(row.path, set()).update(row.ignored)
    return [f"{path}: the policy does not see the columns {', '.join(sorted(names))}" for path, names in found.items()]


def _duplicates(split: Split, rows: Sequence[Row]) -> str:
    """What to say about prompts that occur more than once; "" when none does."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_prompt_form(row), []).append(row)
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return ""
    different = sum(len({normalised(row.answer) for row in group}) > 1 for group in repeated)
    first, second = repeated[0][:2]
    return (
        f"{len(repeated)} prompts of the {split} rows occur more than once ({different} of them with different answers); all of "
        f"them are kept. The first: {first.path} row {first.number} and {second.path} row {second.number}"
    )


def _part(
    rows: Sequence[Row], wanted: Mapping[Split, int], seed: int, *, by: Literal["answer", "prompt"]
) -> dict[Split, list[Row]] | None:
    """Whole groups of rows to the wanted splits, the rest to training; None when a split gets less than half of its rows.

    Groups share a prompt, by answer also an answer (and so on through their members). Their order is drawn from the seed.
    """
    groups = _groups(rows, by=by)
    left = dict(wanted)
    chosen: dict[int, Split] = {}
    for number in np.random.default_rng([seed, len(rows)]).permutation(len(groups)).tolist():
        members = groups[number]
        split = next((split for split, room in left.items() if room >= len(members)), None)
        if split is not None:
            left[split] -= len(members)
            chosen |= dict.fromkeys(members, split)
    if any(2 * left[split] > size for split, size in wanted.items()):
        return None
    parted: dict[Split, list[Row]] = {split: [] for split in (*wanted, "train")}
    for place, row in enumerate(rows):
        parted[chosen.get(place, "train")].append(row)
    return parted


def _groups(rows: Sequence[Row], *, by: Literal["answer", "prompt"]) -> list[list[int]]:
    """Places of rows that must stay together, groups in the order of their first row (union-find over prompts and answers)."""
    parents = list(range(len(rows)))

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = place = parents[parents[place]]
        return place

    firsts: dict[tuple[str, str], int] = {}
    for place, row in enumerate(rows):
        for kind, form in _forms(row, by=by):
            parents[root(place)] = root(firsts.setdefault((kind, form), place))
    groups: dict[int, list[int]] = {}
    for place in range(len(rows)):
        groups.setdefault(root(place), []).append(place)
    return list(groups.values())


def _forms(row: Row, *, by: Literal["answer", "prompt"]) -> Iterable[tuple[str, str]]:
    yield "prompt", _prompt_form(row)
    if by == "answer":
        yield "answer", normalised(row.answer)


def _uids(rows: Sequence[Row]) -> dict[tuple[str, int], str]:
    """`file.jsonl:17` for each row by (path, number); the whole path where two files have the same name."""
    names = Counter(Path(path).name for path in {row.path for row in rows})
    return {
        (row.path, row.number): f"{row.path if names[Path(row.path).name] > 1 else Path(row.path).name}:{row.number}"
        for row in rows
    }

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from podium.config import RewardConfig, TaskConfig
from podium.errors import RewardError, TaskError
from podium.tasks import (
    Failed,
    Problem,
    RewardInputs,
    Score,
    Scorer,
    Task,
    build_task,
    check_disjoint,
    draw_targets,
    library_problems,
    reasoning_gym,
    task_fingerprint,
)
from podium.tasks.library_problems import MIXTURE, create_dataset, draw, is_solved, right_answer
from podium.tasks.reasoning_gym import RUNS_IN_THE_DRIVER, library_verifier

SPELL = {"name": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 7}, "prompt_pattern": r": (\w+)$"}


def small(**changes) -> Task:
    return build_task(TaskConfig(**{**SPELL, "num_train": 50, "num_validation": 20, "num_held_out": 30, **changes}))


def test_splits_are_disjoint_by_normalised_answer_and_of_the_asked_size():
    task = small()
    check_disjoint(task)
    answers = [problem.answer.strip().lower() for split in (task.train, task.validation, task.held_out) for problem in split]
    assert len(answers) == len(set(answers)) == 100
    assert (len(task.train), len(task.validation), len(task.held_out)) == (50, 20, 30)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others():
    assert small().train == small().train
    assert {p.answer for p in small().held_out} != {p.answer for p in small(seed=1).held_out}


def test_prompt_is_what_the_pattern_finds():
    problem = small().train[0]
    assert problem.prompt == problem.answer[::-1] + "\n"
    whole = small(prompt_pattern=None).train[0]
    assert whole.prompt.startswith("Spell this word backward")


def test_the_librarys_verifier_is_an_exact_zero_or_one():
    """The library's partial credit for a right answer with something behind it comes within 1e-15 of full marks."""
    task = small()
    for problem in task.train:
        right = problem.answer
        responses = [right, f" {right}\n", right + "x", right[:-1], ""]
        assert Scorer(task, RewardConfig())([problem] * 5, responses).values == [1.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "spell_bakward"}, "did you mean 'spell_backward'"),
        ({"params": {"min_lenght": 3}}, "min_lenght"),
        ({"name": "composite", "params": {}}, "mixes datasets by options that are Python objects; task.name must be"),
        ({"params": {"min_word_len": 9, "max_word_len": 3}}, "max_word_len must be >= min_word_len"),
        ({"params": {"min_word_len": 1, "max_word_len": 1}}, "cannot make a problem with task.params {'min_word_len': 1"),
        ({"prompt_pattern": "(Spell)"}, "gave only 1 new held_out questions in 400 draws, but task.num_held_out asks for 256"),
    ],
)
def test_a_task_that_cannot_be_built_says_why(changes, expected):
    with pytest.raises(TaskError) as caught:
        draw(TaskConfig(**{**SPELL, **changes}))
    assert expected in str(caught.value)


class Odd(Task):
    """A task whose verifier returns, or raises, the given verdict."""

    def __init__(self, verdict):
        self.train = self.validation = self.held_out = ()
        self.verdict = verdict

    def verify(self, problem, response):
        if isinstance(self.verdict, Exception):
            raise self.verdict
        return self.verdict

    def reward_inputs(self, problem):
        return RewardInputs("odd", problem.answer, {})


@pytest.mark.parametrize("verdict", [KeyError("gone"), float("nan"), None, "1"])
def test_a_verifier_that_fails_names_the_row_and_is_never_a_zero(verdict):
    with pytest.raises(RewardError, match=r"row 0 \(uid u7"):
        Scorer(Odd(verdict), RewardConfig())([Problem("u7", "p", "a", 0)], ["r"])


def test_overlapping_splits_are_found():
    task = Odd(1.0)
    task.train, task.held_out = (Problem("t", "p", "Abc ", 0),), (Problem("h", "q", "abc", 1),)
    with pytest.raises(TaskError, match="'abc' is in both the held_out and the train split"):
        check_disjoint(task)


def test_targets_follow_the_mixture_and_are_keyed_by_step():
    problems = small().train
    drawn = [target for step in range(40) for target in draw_targets(problems, {"answer": 0.3, "copy": 0.7}, seed=0, step=step)]
    right = sum(target == problems[row % 50].answer for row, target in enumerate(drawn))
    assert 0.26 < right / len(drawn) < 0.34  # 2,000 draws: three standard deviations are 0.03; palindromes add a little
    assert draw_targets(problems, {"answer": 1.0, "copy": 1.0}, seed=0, step=3) == draw_targets(
        problems, {"answer": 2.0, "copy": 2.0}, seed=0, step=3
    )
    assert draw_targets(problems, {"answer": 1.0}, seed=0, step=3) == [problem.answer for problem in problems]


SUMS = {"name": "chain_sum", "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}}


def test_questions_may_share_an_answer_within_a_split_but_not_between():
    """Sums of two digits have some 250 answers: more training problems than that are still distinct questions."""
    task = build_task(TaskConfig(**SUMS, prompt_pattern=r": (.+) =$", num_train=400, num_validation=20, num_held_out=20))
    check_disjoint(task)
    prompts = [problem.prompt for split in (task.train, task.validation, task.held_out) for problem in split]
    assert len(set(prompts)) == 440
    assert len({problem.answer for problem in task.train}) < 300


def test_groups_of_a_pattern_are_joined():
    pattern = r"(Decrypt).*text: ([A-Z ]+)\."
    task = build_task(TaskConfig(name="caesar_cipher", prompt_pattern=pattern, num_train=4, num_validation=2, num_held_out=2))
    assert all(problem.prompt.startswith("Decrypt ") and "." not in problem.prompt for problem in task.train)


def test_few_shot_examples_are_solved_and_in_no_split():
    task = build_task(TaskConfig(**SUMS, few_shot=2, num_train=50, num_validation=5, num_held_out=5))
    first, second, question = task.train[0].prompt.split("\n")
    assert question.startswith("State the final answer")
    assert question.endswith("=")
    everything = {
        problem.prompt.rsplit("\n", 1)[1] for split in (task.train, task.validation, task.held_out) for problem in split
    }
    assert len(everything) == 60
    for example in (first, second):
        shown, answer = example.rsplit(" ", 1)
        assert shown not in everything
        terms = shown.split(": ")[-1].removesuffix(" =")
        assert eval(terms) == int(answer)


@pytest.mark.parametrize(
    ("pattern", "expected"), [("(", "is not a regular expression"), ("abc", "needs a group"), ("(zebra)", "finds nothing in")]
)
def test_a_pattern_that_cannot_work_says_why(pattern, expected):
    with pytest.raises(ValueError, match=expected):
        small(prompt_pattern=pattern)


# -- where a verifier runs ------------------------------------------------------------------------------------------------

COUNTDOWN = {"name": "countdown", "params": {"min_numbers": 3, "max_numbers": 3}}


def test_a_verifier_that_evaluates_the_response_runs_in_limited_processes(tmp_path):
    """sympy's parse_expr is Python's eval: the policy's text made files and hung in the driver."""
    task = small(**COUNTDOWN, prompt_pattern=None)
    problem, made = task.train[0], tmp_path / "made"
    attacks = [
        f"__import__('os').system('touch {made}')",
        f"open('{made}', 'w').close()",
        f"__import__('pathlib').Path('{made}').touch()",
        f"__import__('subprocess').run(['touch', '{made}'])",
    ]
    config = RewardConfig(timeout_s=1.0, on_failure="drop", num_workers=2)
    with Scorer(task, config) as scorer:
        assert len(scorer.pids) == 2
        assert scorer([problem] * 2, [problem.answer, "1"]).values == [1.0, 0.0]
        started_s = time.monotonic()
        found = scorer.outcomes([problem] * 3, [problem.answer, "9**9**9", f" {problem.answer}\n"])
        assert time.monotonic() - started_s < 10
        assert found[0] == found[2] == Score(1.0)
        assert isinstance(found[1], Failed)
        assert found[1].reason == "took longer than reward.timeout_s (1 s)"
        for outcome in scorer.outcomes([problem] * len(attacks), attacks):
            assert isinstance(outcome, Failed)
            assert "which was refused" in outcome.reason
        assert not made.exists()
        assert scorer([problem] * 3, [attacks[0], problem.answer, "1"]).is_scored == [False, True, True]
        assert scorer.outcomes([problem], ["__import__('os')._exit(0)"]) == [Failed("the reward process ended with exit code 0")]
    with Scorer(task, RewardConfig(num_workers=1)) as scorer, pytest.raises(RewardError, match=r"about to do os\.system"):
        scorer([problem] * 2, [attacks[0], problem.answer])


def _attempts(problem: Problem) -> list[str]:
    right = problem.answer
    return [right, f" {right}\n", right.upper(), f"+{right}", f"{right}.0", f"{right}x", right[:-1], right[::-1], ""]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "spell_backward")) for name in sorted(RUNS_IN_THE_DRIVER)]
)
def test_the_driver_gives_the_values_that_a_process_gives(name):
    task = small(name=name, params={}, prompt_pattern=None, num_train=4, num_validation=2, num_held_out=2)
    assert task.isolated_verifier is None
    rows = [(problem, response) for problem in task.train for response in _attempts(problem)]
    problems, responses = zip(*rows, strict=True)
    with Scorer(task, RewardConfig()) as scorer:
        assert scorer.pids == []
        in_the_driver = scorer(problems, responses).values
    task.isolated_verifier = library_verifier(TaskConfig(name=name))
    with Scorer(task, RewardConfig(num_workers=1)) as scorer:
        assert len(scorer.pids) == 1
        assert scorer(problems, responses).values == in_the_driver
    assert set(in_the_driver) == {0.0, 1.0}


def test_verifiers_of_the_driver_are_those_that_were_read():
    """A new release of the library may move one of them to a method that we have not reviewed."""
    own = {name for name in RUNS_IN_THE_DRIVER if "score_answer" in vars(DATASETS[name][0])}
    assert own == {"spell_backward", "word_sorting", "palindrome_generation", "chain_sum"}


def test_a_fingerprint_is_that_of_the_problems():
    assert task_fingerprint(small()) == task_fingerprint(small())
    assert len({task_fingerprint(small(**changes)) for changes in ({}, {"seed": 1}, {"num_train": 51})}) == 3


# -- every dataset --------------------------------------------------------------------------------------------------------

MANY_RIGHT = {"graph_color": "answer", "rubiks_cube": "answer", "propositional_logic": "answer", "boxnet": "prompt"}
FEW_ANSWERS = {"syllogism": "prompt", "course_schedule": "prompt", "prime_factorization": "answer"}
FEW = {"boxnet", "circuit_logic", "course_schedule", "game_of_life_halting", "isomorphic_strings", "ransom_note", "rush_hour"}
FEW |= {"acre", "aiw", "mahjong_puzzle", "syllogism"}


@pytest.mark.parametrize(("name", "disjoint_by"), (MANY_RIGHT | FEW_ANSWERS).items())
def test_datasets_with_many_right_answers_or_few_distinct_ones_give_disjoint_splits(name, disjoint_by):
    """graph_color and others give None as the answer; syllogism has two answers for three splits."""
    config = TaskConfig(name=name, num_train=4, num_validation=2, num_held_out=2)
    drawn, dataset = draw(config), create_dataset(config, seed=0, size=1)
    problems = [problem for split in drawn.splits.values() for problem in split]
    assert len({problem.prompt for problem in problems}) == 8
    assert drawn.disjoint_by == disjoint_by
    if disjoint_by == "answer":
        answers = [{problem.answer for problem in split} for split in drawn.splits.values()]
        assert len(set.union(*answers)) == sum(map(len, answers))
    for problem in problems:
        entry = drawn.entries[problem.key]
        assert problem.answer == right_answer(entry)
        assert is_solved(dataset, f" {problem.answer}\n", entry) == float(name != "boxnet")
        assert is_solved(dataset, "no such answer", entry) == 0.0


def test_a_verifier_that_raises_on_a_right_answer_too_is_a_failure_not_a_zero():
    class Broken:
        def score_answer(self, answer, entry):
            raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        is_solved(Broken(), "7", {"answer": "7", "metadata": {}})


def test_few_shot_needs_a_dataset_that_gives_answers():
    with pytest.raises(TaskError, match=r"boxnet does not give any: set task\.few_shot=0"):
        draw(TaskConfig(name="boxnet", few_shot=1))


def test_a_split_by_prompt_is_remarked_and_a_verifier_that_takes_any_text_refused(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "RUNS_IN_THE_DRIVER", {"syllogism", "game_of_life_halting"})  # a process takes 3 s each
    monkeypatch.setattr(library_problems, "MAX_DRAWS_PER_PROBLEM", 10)
    task = small(name="syllogism", params={}, prompt_pattern=None)
    check_disjoint(task)
    assert task.disjoint_by == "prompt"
    assert task.remarks[0].startswith("syllogism has too few distinct answers for splits without a common one")
    halting = TaskConfig(name="game_of_life_halting", num_train=2, num_validation=1, num_held_out=1)
    with pytest.raises(TaskError, match=r"verifier of game_of_life_halting accepts any text as right: set reward\.function"):
        build_task(halting)
    assert build_task(halting, exact_match=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # a busy machine takes many times as long
def test_every_dataset_builds_scores_and_builds_again_as_a_resumed_run_does():
    """Two processes build the task of each dataset from its written configuration: about 40 s on two cores."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
    command = [sys.executable, "-m", "tests.tasks.every_dataset"]
    with contextlib.ExitStack() as stack:
        started = [subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for process in started:
            stack.callback(process.kill)
        first, again = ([json.loads(line) for line in process.communicate()[0].splitlines()] for process in started)
    assert {line["name"] for line in first} == DATASETS.keys() - {MIXTURE}
    assert [line["fingerprint"] for line in first] == [line["fingerprint"] for line in again]
    unsolved = {line["name"] for line in first if next(iter(line["scores"].values())) != 1.0}
    assert unsolved == {"boxnet", "rush_hour"}  # the library does not give any answer
    fooled = {line["name"] for line in first if any(list(line["scores"].values())[1:])}
    assert fooled == {"game_of_life_halting"}
    by_prompt = {line["name"] for line in first if line["by"] == "prompt"}
    assert {"boxnet", "rush_hour", "syllogism"} <= by_prompt <= FEW

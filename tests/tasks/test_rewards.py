"""A user's reward: how it is loaded and called, what its results mean, and that no failure ever becomes a plain zero."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from podium.config import RewardConfig
from podium.errors import ConfigError, RewardError
from podium.tasks import Failed, RewardInputs, Score, Scorer, check_reward, reward_pool, scoring
from podium.tasks.outcomes import LARGEST, outcome_of
from podium.tasks.reward_process import FunctionSpec
from tests.tasks.builders import Rows, reward_config, reward_file

ROOT = Path(__file__).parents[2]


def outcomes(config: RewardConfig, responses: list[str], **task):
    with Scorer(Rows(len(responses), **task), config) as scorer:
        return scorer.outcomes(Rows(len(responses), **task).train, responses)


def is_gone(pid: int) -> bool:
    """Whether a process has ended: gone, or a zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.05)


# -- results ------------------------------------------------------------------------------------------------------------


class Scalar:
    """Like a numpy or torch scalar, or an array with several elements."""

    def __init__(self, value):
        self.value = value

    def item(self):
        if isinstance(self.value, list):
            raise ValueError("only one element")
        return self.value


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (1, Score(1.0)),
        (-0.5, Score(-0.5)),
        (True, Score(1.0)),
        (Scalar(0.25), Score(0.25)),
        ({"score": 2, "acc": True, "length": 3.5, "pred": "x", "none": None}, Score(2.0, {"acc": 1.0, "length": 3.5})),
    ],
)
def test_a_number_or_a_dict_with_a_score_is_a_score(result, expected):
    assert outcome_of(result) == expected


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (None, "returned None (NoneType)"),
        ("1", "returned '1' (str)"),
        (math.nan, "returned nan (float)"),
        (math.inf, "returned inf (float)"),
        ([1.0], "returned [1.0] (list)"),
        (Scalar([1, 2]), "(Scalar)"),
        ({"acc": 1.0}, "returned a dict without 'score': {'acc': 1.0}"),
        ({"score": None}, "'score' is None (NoneType)"),
        ({"score": math.nan}, "'score' is nan (float)"),
        (1e308, "returned 1e+308 (float), which is infinite in float32 (largest: 3.4e+38); a"),
        (-1e308, "returned -1e+308 (float), which is infinite in float32"),
        ({"score": 10**300}, "'score' is 1000000000"),
        (10**400, "returned 1000000000"),
        pytest.param(-(10**5000), "returned what cannot be shown (ValueError: Exceeds the limit (4300 digits)", id="long"),
    ],
)
def test_anything_else_failed_and_says_what_it_was(result, expected):
    outcome = outcome_of(result)
    assert isinstance(outcome, Failed)
    assert expected in outcome.reason
    assert "a reward is a finite number, or a dict that holds one under 'score'" in outcome.reason


@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 1e-320, 0.0])
def test_the_largest_and_smallest_numbers_of_float32_are_rewards(value):
    assert outcome_of({"score": value, "twice": value}) == Score(value, {"twice": value})
    assert math.isfinite(float(torch.tensor(value)))
    assert math.isinf(float(torch.tensor(LARGEST * 1.001)))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (math.nan, "returned 'length' as nan (float), which is not finite; "),
        (Scalar(-math.inf), "(Scalar), which is not finite; "),
        (1e39, "returned 'length' as 1e+39 (float), which is infinite in float32 (largest: 3.4e+38); "),
    ],
)
def test_a_number_beside_the_score_that_would_spoil_its_mean_failed_and_is_named(number, expected):
    outcome = outcome_of({"score": 1.0, "fine": 2, "length": number})
    assert isinstance(outcome, Failed)
    assert expected + "the numbers beside 'score' are averaged: give a finite one, or none" in outcome.reason


# -- the function -------------------------------------------------------------------------------------------------------

HELPED = """
from beside import LIMIT  # a module in the same folder
IMPORTS = []  # a global
IMPORTS.append(1)

def helper(text):
    return len(text) <= LIMIT

{define} score(data_source, solution_str, ground_truth, extra_info, *, bonus=0.0):
    {first}
    assert data_source == "source" and extra_info["key"] >= 0
    return {{"score": float(solution_str == ground_truth) + bonus, "short": helper(solution_str), "imports": len(IMPORTS)}}
"""


@pytest.mark.parametrize(
    ("define", "first"), [("def", ""), ("async def", "import asyncio; await asyncio.sleep(0.001)")], ids=["sync", "async"]
)
def test_a_file_with_a_helper_and_a_global_is_imported_once_per_process(tmp_path, define, first):
    """Field report I4: verl #2239, #3769, #3404, #6166."""
    (tmp_path / "beside.py").write_text("LIMIT = 3")
    config = reward_config(tmp_path, HELPED.format(define=define, first=first), kwargs={"bonus": 0.5})
    found = outcomes(config, ["7", "12345", "7", "8", "9", "7"])
    assert [outcome.value for outcome in found] == [1.5, 0.5, 1.5, 0.5, 0.5, 1.5]
    assert [outcome.extra["short"] for outcome in found] == [1, 0, 1, 1, 1, 1]
    assert {outcome.extra["imports"] for outcome in found} == {1.0}


def test_the_same_function_by_dotted_name(tmp_path):
    """A package of the working directory, as with `python -m`."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("")
    (tmp_path / "mine" / "rewards.py").write_text(
        "def exact(data_source, solution_str, ground_truth, extra_info):\n    return solution_str == ground_truth\n"
    )
    code = (
        "from podium.config import RewardConfig; from podium.tasks import Scorer; from tests.tasks.builders import Rows\n"
        "task = Rows(2)\n"  # no __main__ guard: the processes never import it
        "with Scorer(task, RewardConfig(function='mine.rewards.exact')) as scorer:\n"
        "    print(scorer(task.train, ['7', '8']).values)"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[1.0, 0.0]", done.stderr


@pytest.mark.parametrize(("cores", "processes"), [(1, 2), (2, 2), (3, 3), (128, 32)])
def test_processes_are_by_default_as_many_as_there_are_cores(tmp_path, monkeypatch, cores, processes):
    monkeypatch.setattr(scoring, "num_cores", lambda: cores)
    config = reward_config(tmp_path, "def score(data_source, solution_str, ground_truth, extra_info): return 1")
    assert scoring.build_pool(FunctionSpec(config.function, {}), config)._num_workers == processes


def test_processes_are_reused_and_hold_no_torch(tmp_path):
    config = reward_config(
        tmp_path,
        """
        import os, sys
        def score(data_source, solution_str, ground_truth, extra_info):
            return {"score": 1, "pid": os.getpid(), "torch": "torch" in sys.modules}
        """,
        num_workers=2,
    )
    task = Rows(20)
    with Scorer(task, config) as scorer:
        pids = set(scorer.pids)
        for _ in range(3):
            found = scorer.outcomes(task.train, ["x"] * 20)
            assert {int(outcome.extra["pid"]) for outcome in found} <= pids
            assert {outcome.extra["torch"] for outcome in found} == {0.0}
        assert set(scorer.pids) == pids
    wait_until_gone(list(pids))


@pytest.mark.parametrize(
    ("code", "name", "expected"),
    [
        ("def scoer(**kwargs): return 1", "score", "has no function 'score'; did you mean 'scoer'?"),
        ("score = 3", "score", "score in {file}reward.py is 3, not a function"),
        ("def score(prompt, answer): return 1", "score", "(prompt, answer) cannot be called with the keyword arguments"),
        (
            "def score(data_source, solution_str, ground_truth): return 1",
            "score",
            "got an unexpected keyword argument 'extra_info'",
        ),
        ("def score(*, limit, **kwargs): return 1", "score", "more by reward.kwargs): missing a required argument: 'limit'"),
        ("import no_such_module_1", "score", "ModuleNotFoundError: No module named 'no_such_module_1'"),
        ("import os\n1 / 0", "score", "failed: ZeroDivisionError: division by zero"),
        ("def score(:", "score", "SyntaxError"),
        ("import sys; sys.exit(3)", "score", "failed: SystemExit: 3"),
        ("import os; os._exit(3)", "score", "one process after another ended with exit code 3 while importing"),
    ],
)
def test_a_function_that_cannot_be_used_is_an_error_before_anything_starts(tmp_path, code, name, expected):
    reward_file(tmp_path, code)
    with pytest.raises(ConfigError) as caught:
        check_reward(RewardConfig(function=f"{tmp_path / 'reward.py'}:{name}"), Rows(1))
    assert expected.format(file=f"{tmp_path}/") in str(caught.value)
    assert "reward_process.py" not in str(caught.value)  # the user's lines, not ours


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("no/such.py:score", "no such file: no/such.py (relative to "),
        ("no_such_package.rewards.score", "no module 'no_such_package'"),
        ("json.no_such", "json has no function 'no_such'"),
    ],
)
def test_a_file_or_module_that_is_not_there(function, expected):
    with pytest.raises(ConfigError) as caught:
        check_reward(RewardConfig(function=function), Rows(1))
    assert expected in str(caught.value)


def test_an_import_that_hangs_is_an_error_with_the_line_that_it_is_at(tmp_path, monkeypatch):
    monkeypatch.setattr(reward_pool, "START_LIMIT_S", 4.0)
    config = reward_config(tmp_path, "import time\ntime.sleep(600)\ndef score(**kwargs): return 1")
    with pytest.raises(ConfigError, match=r"the import of .*reward\.py:score hangs: it had not ended after 4 s") as caught:
        check_reward(config, Rows(1))
    assert 'reward.py", line 2 in <module>' in str(caught.value)


def test_kwargs_may_not_hide_what_podium_gives(tmp_path):
    config = reward_config(tmp_path, "def score(**kwargs): return 1", kwargs={"ground_truth": "x"})
    with pytest.raises(ConfigError, match=r"reward\.kwargs: ground_truth is given by Podium"):
        check_reward(config, Rows(1))


TRIED = """
import time
def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == {bad!r}:
        {what}
    return 1.0
"""


@pytest.mark.parametrize(
    ("bad", "what", "expected"),
    [
        ("", "return None", "cannot score an empty response, tried before the start: the reward returned None (NoneType)"),
        (
            "",
            "1 / len(solution_str)",
            "the reward raised ZeroDivisionError: division by zero on the training row u0 (answer '7')",
        ),
        ("7", "return 'no'", "reward.py:score cannot score the ground truth as the response, tried before"),
        ("7", "time.sleep(60)", "the reward took longer than reward.timeout_s (0.5 s) on the training row u0 (answer '7')"),
    ],
)
def test_a_function_that_fails_on_a_row_is_reported_before_the_start_by_the_policy(tmp_path, caplog, bad, what, expected):
    code = TRIED.format(bad=bad, what=what)
    with pytest.raises(ConfigError) as caught:
        check_reward(reward_config(tmp_path, code, timeout_s=0.5), Rows(2))
    text = str(caught.value)
    assert text.startswith("reward.function: ")
    assert expected in text
    assert text.endswith("mend the reward, or set reward.on_failure=drop (leave such rows out) or =value")
    assert "reward_process.py" not in text
    if "return" not in what:
        assert 'reward.py", line 5' in text
    caplog.clear()
    check_reward(reward_config(tmp_path, code, timeout_s=0.5, on_failure="value"), Rows(2))
    assert expected in caplog.text
    assert "(reward.on_failure=value)" in caplog.text


def test_the_trial_before_the_start_is_repeated_as_a_score_would_be(tmp_path):
    code = """
        import pathlib
        def score(data_source, solution_str, ground_truth, extra_info, *, folder):
            calls = pathlib.Path(folder, "calls")
            calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
            return 1 / (len(calls.read_text()) - 1)
        """
    check_reward(reward_config(tmp_path, code, kwargs={"folder": str(tmp_path)}, max_retries=1), Rows(1))
    assert (tmp_path / "calls").read_text() == "xxx"  # failed, again, and the empty response


# -- failures -----------------------------------------------------------------------------------------------------------

ODD = """
import os, re, sys, time

def deeper(text):
    raise KeyError(text)

def score(data_source, solution_str, ground_truth, extra_info):
    match solution_str:
        case "raise": deeper("gone")
        case "nan": return float("nan")
        case "exit": sys.exit(2)
        case "die": os._exit(9)
        case "crash": print("about to crash"); os.kill(os.getpid(), 11)
        case "sleep": time.sleep(60)
        case "busy": pow(7, 10**9)  # one C call that holds the GIL
        case "regex": re.match(r"(a+)+$", "a" * 40 + "b")  # for hours, and holds the GIL
        case "fork and regex":
            child = os.fork()
            if child == 0: time.sleep(300)
            print("child", child)
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "spawn": os.fork() or time.sleep(60); time.sleep(60)
    return float(solution_str == ground_truth)
"""


LINES = {name: ODD[: ODD.index(f'case "{name}"')].count("\n") + 1 for name in ("sleep", "busy", "spawn")}
"""The line of the file on which each of these hangs."""


def test_a_row_that_raises_returns_nonsense_or_dies_leaves_the_others_alone(tmp_path):
    responses = ["7", "raise", "nan", "7", "exit", "die", "8", "crash", "7"]
    found = outcomes(reward_config(tmp_path, ODD), responses)
    scores = [outcome.value if isinstance(outcome, Score) else None for outcome in found]
    assert scores == [1.0, None, None, 1.0, None, None, 0.0, None, 1.0]
    reasons = {text: outcome.reason for text, outcome in zip(responses, found, strict=True) if isinstance(outcome, Failed)}
    assert reasons["raise"] == "raised KeyError: 'gone'"
    assert reasons["nan"].startswith("returned nan")
    assert reasons["exit"] == "raised SystemExit: 2"
    assert reasons["die"] == "the reward process ended with exit code 9"
    assert reasons["crash"] == "the reward process was ended by SIGSEGV"
    assert "in deeper" in found[1].traceback
    assert "reward_process.py" not in found[1].traceback
    assert "about to crash" in found[7].traceback


@pytest.mark.parametrize("stuck", ["sleep", "busy", "spawn"])
def test_a_response_that_takes_too_long_is_ended_and_says_where_it_was(tmp_path, caplog, stuck):
    """Field report I2: verl #5839, #6673; miles #3221. Four samples, one hangs; so does one in a C loop."""
    task, config = Rows(4), reward_config(tmp_path, ODD, timeout_s=1.0)
    with Scorer(task, config) as scorer:
        scorer.outcomes(task.train, ["7"] * 4)  # the processes have started
        before, started_s = set(scorer.pids), time.monotonic()
        found = scorer.outcomes(task.train, ["7", stuck, "8", "7"])
        assert time.monotonic() - started_s < 5
        assert [outcome.value for outcome in found if isinstance(outcome, Score)] == [1.0, 0.0, 1.0]
        assert isinstance(found[1], Failed)
        assert found[1].reason == "took longer than reward.timeout_s (1 s)"
        lines = found[1].traceback.splitlines()
        assert lines[0] == "it was at (innermost call first):"
        assert f'reward.py", line {LINES[stuck]} in score' in lines[-1]
        assert f"row 1 timed out after 1 s at reward.py:{LINES[stuck]} in score" in caplog.text
        wait_until_gone(list(before - set(scorer.pids)))
        assert len(scorer.pids) == 2
        assert scorer.outcomes(task.train, ["7"] * 4) == [Score(1.0)] * 4  # replaced, and as good as before
        pids = scorer.pids
    wait_until_gone([*pids, *before])


def test_what_a_reward_prints_goes_to_its_log_and_not_to_the_terminal(tmp_path, capfd):
    config = reward_config(
        tmp_path,
        """
        import os, sys
        print("imported")
        def score(data_source, solution_str, ground_truth, extra_info):
            print("scoring", solution_str)
            os.system("echo from a shell")
            print("to stderr", file=sys.stderr)
            return 1
        """,
        num_workers=1,
    )
    with Scorer(Rows(2), config, log=tmp_path / "reward.log") as scorer:
        scorer(Rows(2).train, ["a", "b"])
    assert capfd.readouterr() == ("", "")
    text = (tmp_path / "reward.log").read_text()
    assert all(part in text for part in ("imported", "scoring a", "from a shell", "to stderr", "scoring b"))


def test_signal_alarm_works_for_it_runs_in_the_main_thread(tmp_path):
    """Field report I1: verl #5635, a verifier with signal.alarm off the main thread scored 0 for everything."""
    found = outcomes(
        reward_config(
            tmp_path,
            """
            import signal
            def score(data_source, solution_str, ground_truth, extra_info):
                signal.signal(signal.SIGALRM, lambda *_: None)
                signal.alarm(1)
                signal.alarm(0)
                return float(solution_str == ground_truth)
            """,
        ),
        ["7", "8"],
    )
    assert found == [Score(1.0), Score(0.0)]


# -- the policy ---------------------------------------------------------------------------------------------------------

FAILS = """
def score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "fail":
        raise ValueError("signal only works in main thread")
    return {"score": float(solution_str), "length": len(solution_str)}
"""


def rewards(config: RewardConfig, responses: list[str]):
    task = Rows(len(responses))
    with Scorer(task, config) as scorer:
        return scorer(task.train, responses)


def test_raise_is_the_default_and_names_row_uid_response_reason_and_traceback(tmp_path):
    with pytest.raises(RewardError) as caught:
        rewards(reward_config(tmp_path, FAILS), ["1", "fail", "0", "1"])
    text = str(caught.value)
    assert text.startswith(
        "a response of 4 could not be scored; the reward raised ValueError: signal only works in main thread on row 1 "
        "(uid u1, response 'fail', answer '7')\n"
    )
    assert 'reward.py", line 4, in score' in text
    assert "reward.on_failure=drop" in text


def test_raise_stops_at_the_first_failure_without_waiting_for_the_rest(tmp_path):
    """50 rows that hang for 30 s each on two processes were 12 minutes of silence."""
    task, config = Rows(50), reward_config(tmp_path, ODD, timeout_s=1.0)
    with Scorer(task, config) as scorer:
        scorer(task.train[:2], ["7", "7"])  # the processes have started
        started_s = time.monotonic()
        with pytest.raises(
            RewardError, match=r"a response of 50 could not be scored; the reward took longer than reward"
        ) as caught:
            scorer(task.train, ["sleep"] * 50)
        assert time.monotonic() - started_s < 4
        assert "Fatal Python error" not in str(caught.value)
        assert "Extension modules" not in str(caught.value)
        assert scorer(task.train[:3], ["7", "8", "7"]).values == [1.0, 0.0, 1.0]  # it can be used again


def test_what_is_still_being_scored_when_another_row_failed_is_not_waited_for(tmp_path):
    task, started_s = Rows(3), time.monotonic()
    with Scorer(task, reward_config(tmp_path, ODD)) as scorer:
        pids = scorer.pids
        with pytest.raises(RewardError, match=r"raised KeyError: 'gone' on row 1"):
            scorer(task.train, ["sleep", "raise", "7"])
        assert len(scorer.pids) == 1  # the other was at the row that sleeps
    assert time.monotonic() - started_s < 25  # and not reward.timeout_s, 30 s
    wait_until_gone(pids)


def test_timeouts_are_logged_as_they_happen_the_first_few_by_name(tmp_path, caplog):
    task, config = Rows(6), reward_config(tmp_path, ODD, timeout_s=0.5, num_workers=5, on_failure="drop")
    with Scorer(task, config) as scorer:
        scorer(task.train, ["7"] * 6)
        assert scorer(task.train, ["sleep"] * 5 + ["7"]).is_scored == [False] * 5 + [True]
    logged = [record.getMessage() for record in caplog.records if "timed out" in record.getMessage()]
    assert [text.startswith("row ") for text in logged] == [True, True, True, False]
    assert all(text.endswith(f" timed out after 0.5 s at reward.py:{LINES['sleep']} in score") for text in logged[:3])
    assert logged[3] == "2 more timed out after 0.5 s"


def test_drop_leaves_the_row_without_a_value(tmp_path, caplog):
    found = rewards(reward_config(tmp_path, FAILS, on_failure="drop"), ["1", "fail", "0", "1"])
    assert found.is_scored == [True, False, True, True]
    assert math.isnan(found.values[1])
    assert found.scored == [1.0, 0.0, 1.0]
    assert found.metrics.to_floats() == {"reward/failed": 1.0, "reward/length/mean": 1.0}
    assert "1 of 4 responses could not be scored; the reward raised ValueError" in caplog.text


def test_value_is_the_value_that_was_asked_for_and_counted(tmp_path):
    found = rewards(reward_config(tmp_path, FAILS, on_failure="value", failure_value=-1.0), ["1", "fail", "0", "1"])
    assert found.values == [1.0, -1.0, 0.0, 1.0]
    assert all(found.is_scored)
    assert found.metrics.to_floats()["reward/failed"] == 1.0


@pytest.mark.parametrize("result", [pytest.param("1e308", marks=pytest.mark.slow), "{'score': 1.0, 'length': float('nan')}"])
def test_a_number_that_spoils_the_rest_is_the_policys_and_names_row_and_value(tmp_path, result):
    """Infinite once it is float32, or in a metric's mean: neither may reach the advantages or the log."""
    code = f"def score(data_source, solution_str, ground_truth, extra_info): return {result} if solution_str == 'odd' else 1.0"
    with pytest.raises(RewardError, match=r"the reward returned .*(1e\+308|'length' as nan) \(float\).* on row 1 \(uid u1,"):
        rewards(reward_config(tmp_path, code), ["1", "odd"])
    found = rewards(reward_config(tmp_path, code, on_failure="drop"), ["1", "odd"])
    assert (found.is_scored, found.scored) == ([True, False], [1.0])
    assert found.metrics.to_floats() == {"reward/failed": 1.0}


class Flaky(Rows):
    """A verifier that breaks on a response as often as the response says, and then scores it."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.calls: list[str] = []

    def verify(self, problem, response):
        self.calls.append(response)
        if self.calls.count(response) <= int(response):
            raise ConnectionError("try again")
        return 1.0


@pytest.mark.parametrize(
    ("max_retries", "is_scored", "num_retries", "calls"),
    [
        (0, [True, False, False], None, ["0", "1", "2"]),
        (1, [True, True, False], 2.0, ["0", "1", "2", "1", "2"]),
        (2, [True, True, True], 3.0, ["0", "1", "2", "1", "2", "2"]),
        (9, [True, True, True], 3.0, ["0", "1", "2", "1", "2", "2"]),
    ],
)
def test_retry_scores_what_failed_again_before_it_counts_as_failed(max_retries, is_scored, num_retries, calls):
    """Field report I3: failures that pass, a verifier's server for one."""
    task = Flaky(3)
    found = Scorer(task, RewardConfig(max_retries=max_retries, on_failure="drop"))(task.train, ["0", "1", "2"])
    assert found.is_scored == is_scored
    assert task.calls == calls
    assert found.metrics.to_floats().get("reward/retries") == num_retries
    assert found.metrics.to_floats()["reward/failed"] == is_scored.count(False)


def test_a_row_that_fails_every_time_fails_by_the_policy_with_the_number_of_tries():
    task = Flaky(2)
    with pytest.raises(
        RewardError,
        match=r"a response of 2 could not be scored in 3 tries; the reward raised ConnectionError: try again on row 1",
    ):
        Scorer(task, RewardConfig(max_retries=2))(task.train, ["0", "5"])


def test_a_response_that_took_its_process_down_is_tried_again_in_another(tmp_path):
    config = reward_config(
        tmp_path,
        """
        import os
        from pathlib import Path
        def score(data_source, solution_str, ground_truth, extra_info, *, folder):
            if solution_str == "die" and not Path(folder, "died").exists():
                Path(folder, "died").touch()
                os._exit(9)
            return float(solution_str == ground_truth)
        """,
        kwargs={"folder": str(tmp_path)},
        max_retries=1,
    )
    found = rewards(config, ["7", "die", "8"])
    assert found.values == [1.0, 0.0, 0.0]
    assert found.metrics.to_floats() == {"reward/failed": 0.0, "reward/retries": 1.0}


@pytest.mark.parametrize("policy", ["drop", "value"])
def test_a_batch_in_which_every_row_fails_stops_the_run_whatever_the_policy(tmp_path, policy):
    """Field report I1: 100 % identical failures never become plain zeros."""
    with pytest.raises(RewardError, match="all 4 responses could not be scored; the reward raised ValueError: signal only"):
        rewards(reward_config(tmp_path, FAILS, on_failure=policy), ["fail"] * 4)


def test_a_tasks_own_verifier_takes_the_same_path():
    class Odd(Rows):
        def verify(self, problem, response):
            if response == "bad":
                raise ZeroDivisionError("by zero")
            return super().verify(problem, response)

    task = Odd(3)
    with Scorer(task, RewardConfig(on_failure="drop")) as scorer:
        assert scorer.pids == []
        found = scorer(task.train, ["7", "bad", "8"])
    assert (found.scored, found.is_scored) == ([1.0, 0.0], [True, False, True])
    with pytest.raises(RewardError, match="raised ZeroDivisionError: by zero on row 1"):
        Scorer(task, RewardConfig())(task.train, ["7", "bad", "8"])


# -- the end ------------------------------------------------------------------------------------------------------------

DRIVER = """
import sys, time
from pathlib import Path
from podium.config import RewardConfig
from podium.tasks import Scorer
from tests.tasks.builders import Rows

task, how = Rows(4), sys.argv[2]
with Scorer(task, RewardConfig(function=sys.argv[1]), log=Path(sys.argv[3]) if sys.argv[3:] else None) as scorer:
    scorer(task.train, ["7"] * 4)
    print(*scorer.pids, flush=True)
    if how == "raise":
        raise RuntimeError("on purpose")
    if how in ("regex", "fork and regex"):
        scorer(task.train, [how, "7", how, "7"])
    if how == "wait":
        scorer(task.train, ["sleep", "7", "sleep", "7"])
"""


@pytest.mark.parametrize(
    ("how", "kill"),
    [
        ("end", None),
        ("wait", signal.SIGKILL),
        pytest.param("raise", None, marks=pytest.mark.slow),
        pytest.param("wait", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("wait", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_no_process_is_left_however_the_driver_ends(tmp_path, how, kill):
    function = reward_file(tmp_path, ODD)
    command = [sys.executable, "-c", DRIVER, function, how]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2, driver.communicate()
        if kill:
            time.sleep(0.3)  # now its processes are asleep in a response
            assert not any(is_gone(pid) for pid in pids)
            driver.send_signal(kill)
        _, errors = driver.communicate(timeout=20)
    assert driver.returncode == {None: 0 if how == "end" else 1, signal.SIGINT: -signal.SIGINT}.get(kill, -(kill or 0)), errors
    wait_until_gone(pids)


@pytest.mark.parametrize("stuck", [pytest.param("regex", marks=pytest.mark.slow), "fork and regex"])
def test_a_process_that_holds_the_gil_and_its_children_end_with_a_killed_driver(tmp_path, stuck):
    """A thread that waits for the driver's end never gets the GIL back from a regular expression."""
    command = [sys.executable, "-c", DRIVER, reward_file(tmp_path, ODD), stuck, str(tmp_path / "reward.log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2, driver.communicate()
        time.sleep(1.0)  # now they are in the expression
        children = [int(line.split()[1]) for log in tmp_path.glob("reward*.log") for line in log.read_text().splitlines()]
        assert len(children) == (2 if stuck == "fork and regex" else 0)
        assert not any(is_gone(pid) for pid in [*pids, *children])
        driver.kill()
        driver.communicate(timeout=20)
    try:
        wait_until_gone([*pids, *children])
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def test_the_process_that_waits_for_the_drivers_end_is_not_a_child_of_the_reward(tmp_path):
    code = """
        import os
        def score(data_source, solution_str, ground_truth, extra_info):
            try:
                os.wait()
            except ChildProcessError:
                return 1.0
        """
    assert outcomes(reward_config(tmp_path, code, timeout_s=5.0), ["x"]) == [Score(1.0)]


def test_what_a_process_wrote_last_is_its_own_and_all_of_it_is_in_the_log(tmp_path):
    """Processes that share a file show a neighbour's lines as the reason of a failure."""
    config = reward_config(
        tmp_path,
        """
        import os, time
        def score(data_source, solution_str, ground_truth, extra_info):
            if solution_str == "noisy":
                for number in range(100):
                    print("neighbour", number)
                    time.sleep(0.02)
                return 1
            time.sleep(0.5)
            print("my last words")
            time.sleep(0.5)
            os._exit(3)
        """,
        num_workers=2,
    )
    task, log = Rows(2), tmp_path / "reward.log"
    log.write_text("of the run before\n")
    with Scorer(task, config, log=log) as scorer:
        found = scorer.outcomes(task.train, ["noisy", "die"])
    assert found[0] == Score(1.0)
    assert found[1] == Failed("the reward process ended with exit code 3", "my last words")
    lines = log.read_text().splitlines()
    assert lines[0] == "of the run before"
    assert sorted(lines[1:]) == sorted(["my last words", *(f"neighbour {number}" for number in range(100))])
    assert list(tmp_path.glob("reward*.log")) == [log]


class WithExtra(Rows):
    """Rows with something large, or something that cannot be pickled, for the reward function."""

    def __init__(self, count: int, extra: object) -> None:
        super().__init__(count)
        self.extra = extra

    def reward_inputs(self, problem):
        return RewardInputs("source", problem.answer, {"key": problem.key, "extra": self.extra})


def test_a_process_that_does_not_read_is_ended_when_the_time_is_over(tmp_path):
    """A request larger than the pipe's buffer blocked the driver for good."""
    task, config = WithExtra(2, "x" * 4_000_000), reward_config(tmp_path, ODD, num_workers=1, timeout_s=1.0)
    with Scorer(task, config) as scorer:
        assert scorer.outcomes(task.train, ["7", "8"]) == [Score(1.0), Score(0.0)]  # large ones arrive
        os.kill(scorer.pids[0], signal.SIGSTOP)
        started_s = time.monotonic()
        found = scorer.outcomes(task.train, ["7", "7"])
        assert time.monotonic() - started_s < 8
        assert isinstance(found[0], Failed)
        assert found[0].reason == "the reward process did not take its response within reward.timeout_s (1 s)"
        assert found[1] == Score(1.0)


def test_what_cannot_be_sent_to_a_process_fails_its_row_alone(tmp_path):
    class Mixed(WithExtra):
        def reward_inputs(self, problem):
            return super().reward_inputs(problem) if problem.key == 1 else Rows.reward_inputs(self, problem)

    task = Mixed(3, lambda: None)
    with Scorer(task, reward_config(tmp_path, ODD)) as scorer:
        found = scorer.outcomes(task.train, ["7", "7", "8"])
    assert (found[0], found[2]) == (Score(1.0), Score(0.0))
    assert isinstance(found[1], Failed)
    assert found[1].reason.startswith("cannot be called: its arguments cannot be pickled: ")


def test_closing_twice_and_scoring_again_afterwards(tmp_path):
    task = Rows(2)
    scorer = Scorer(task, reward_config(tmp_path, ODD))
    with scorer:
        assert scorer(task.train, ["7", "8"]).values == [1.0, 0.0]
    assert scorer.pids == []
    with scorer:
        assert scorer(task.train, ["7", "8"]).values == [1.0, 0.0]
    assert scorer.pids == []


def test_an_idle_process_that_was_killed_is_replaced_and_no_row_suffers(tmp_path):
    task = Rows(4)
    with Scorer(task, reward_config(tmp_path, ODD)) as scorer:
        scorer(task.train, ["7"] * 4)
        for pid in scorer.pids:
            os.kill(pid, signal.SIGKILL)
        wait_until_gone(scorer.pids)
        assert scorer(task.train, ["7", "8", "7", "8"]).values == [1.0, 0.0, 1.0, 0.0]

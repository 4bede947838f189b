"""What a slow or timed-out call says of its ranks."""

from __future__ import annotations

import pytest

from podium.process_probe import folded_threads
from podium.single_controller.processes.stragglers import fold_stacks, straggler_line
from podium.single_controller.rank.naming import rank_list, ranks_named


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((4,), "4"),
        ((0, 1), "0-1"),
        ((0, 1, 2, 5), "0-2, 5"),
        ((5, 2, 0, 1, 1), "0-2, 5"),
        ((0, 2, 4, 9, 10, 11), "0, 2, 4, 9-11"),
    ],
)
def test_ranks_are_listed_in_runs(ranks: tuple[int, ...], text: str) -> None:
    assert rank_list(ranks) == text


def test_one_rank_is_named_in_the_singular() -> None:
    assert (ranks_named((3,)), ranks_named((3, 4))) == ("rank 3", "ranks 3-4")


def test_equal_stacks_are_shown_once_and_the_odd_one_out_first() -> None:
    waiting = "torch/distributed/distributed_c10d.py:2829 all_reduce\n/w.py:7 update"
    stacks = dict.fromkeys(range(8), waiting) | {1: "/w.py:3 load\n/w.py:6 update"}
    assert fold_stacks(stacks) == (
        "rank 1:\n  /w.py:3 load\n  /w.py:6 update\n"
        "ranks 0, 2-7:\n  torch/distributed/distributed_c10d.py:2829 all_reduce\n  /w.py:7 update"
    )


def test_groups_of_one_size_come_in_rank_order() -> None:
    assert fold_stacks({3: "c", 2: "b", 1: "c", 0: "b"}) == "ranks 0, 2:\n  b\nranks 1, 3:\n  c"


def test_idle_threads_do_not_make_another_stack() -> None:
    stacks = {0: "/w.py:7 update" + folded_threads(7), 1: "/w.py:7 update" + folded_threads(1), 2: "/w.py:7 update"}
    assert fold_stacks(stacks) == "ranks 0-2:\n  /w.py:7 update\n  and 7 threads of the runtime"


def test_no_ranks_have_no_stacks() -> None:
    assert fold_stacks({}) == ""


@pytest.mark.parametrize(
    ("answered_s", "usual_s", "age_s", "is_late"),
    [
        ({0: 1.0, 1: 2.0}, None, 29.0, False),  # far over 3 x 2 s, but no rank is called slow so early
        ({0: 1.0, 1: 20.0}, None, 59.0, False),  # over 30 s, under 3 x 20 s
        ({0: 1.0, 1: 20.0}, None, 61.0, True),
        ({0: 1.0, 1: 20.0}, 200.0, 61.0, True),  # the peers of this call count, not the last call
        ({}, None, 37.0, False),  # the first long call of a large model: no rank is later than another
        ({}, None, 499.0, False),
        ({}, None, 501.0, True),  # half of the limit
        ({}, 400.0, 1199.0, False),
        ({}, 400.0, 1201.0, True),
        ({}, 1.0, 29.0, False),
        ({}, 1.0, 31.0, True),
    ],
)
def test_a_rank_is_late_against_its_peers_or_against_the_last_call(
    answered_s: dict[int, float], usual_s: float | None, age_s: float, is_late: bool
) -> None:
    line = straggler_line("update", answered_s, (2, 3), age_s, limit_s=1000.0, usual_s=usual_s, slow_after_s=30.0)
    assert (line is not None) == is_late


def test_the_line_names_method_ranks_and_times() -> None:
    line = straggler_line("update", {0: 0.5, 1: 1.25, 4: 1.0}, (3, 2), 12.0, limit_s=3600.0, slow_after_s=10.0)
    assert line == "method 'update': no answer from ranks 2-3 after 12 s; the other 3 took at most 1.25 s"


@pytest.mark.parametrize(
    ("usual_s", "compared_with"), [(2.5, "the last call took 2.5 s"), (None, "half of its limit of 60 s has passed")]
)
def test_without_any_answer_the_line_compares_with_the_last_call(usual_s: float | None, compared_with: str) -> None:
    line = straggler_line("load", {}, (0,), 40.4, limit_s=60.0, usual_s=usual_s, slow_after_s=10.0)
    assert line == f"method 'load': no answer from rank 0 after 40.4 s; {compared_with}"


def test_no_rank_is_named_when_all_have_answered() -> None:
    assert straggler_line("update", {0: 1.0, 1: 2.0}, (), 1000.0, limit_s=3600.0) is None

"""The table of runtimes: what is asked of a runtime goes by its capabilities, never by its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from podium.errors import ConfigError, UnsupportedByRuntime
from podium.runtimes import CAPABILITIES, capabilities_of, require, runtime_for, runtimes_with

SOURCE = Path(__file__).parents[1] / "src"


def comparisons_with_names(source: str) -> list[int]:
    """The lines on which something is compared with the name of a runtime."""
    found = []
    for node in ast.walk(ast.parse(source)):
        compared = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        compared += [node.value] if isinstance(node, ast.MatchValue) else []
        constants = [part.value for value in compared for part in ast.walk(value) if isinstance(part, ast.Constant)]
        if any(constant in CAPABILITIES for constant in constants if isinstance(constant, str)):
            found.append(node.lineno)
    return found


def test_names_of_runtimes_are_compared_nowhere():
    found = {str(path): lines for path in SOURCE.rglob("*.py") if (lines := comparisons_with_names(path.read_text()))}
    assert not found, "ask for a capability of podium.runtimes.CAPABILITIES instead"


@pytest.mark.parametrize(
    "line", ["x == 'ray'", "'inline' != x", "x in ('ray', 'process')", "match x:\n    case 'ray':\n        y"]
)
def test_a_comparison_with_a_name_is_found(line: str):
    assert comparisons_with_names(line)


def test_only_the_table_and_defaults_name_runtimes():
    assert not comparisons_with_names("def start(runtime='ray'): ...")


def test_an_unknown_runtime_is_answered_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown runtime 'rai'; did you mean 'ray'"):
        capabilities_of("rai")


def test_a_run_that_names_no_runtime_gets_the_first_that_can_hold_its_ranks():
    assert runtime_for(1) == next(iter(CAPABILITIES))
    assert capabilities_of(runtime_for(2)).collectives


def test_what_a_runtime_does_not_offer_is_refused_with_those_that_do():
    with pytest.raises(UnsupportedByRuntime, match="does not offer a restart: use runtime 'ray'"):
        require("inline", "restart", "a restart")
    assert not runtimes_with("exit_codes")
    with pytest.raises(UnsupportedByRuntime, match="no runtime offers that yet"):
        require("ray", "exit_codes", "exit codes")

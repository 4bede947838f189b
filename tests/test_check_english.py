"""scripts/check_english.py finds what is hard to read, with file and line, and leaves good English alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "check_english.py"
    spec = importlib.util.spec_from_file_location("check_english", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ENGLISH: Any = load()


def found(source: str, path: str = "src/a.py") -> list[tuple[int, str]]:
    return [(finding.line, finding.text) for finding in ENGLISH.check(path, source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Doc.\n\nA path that\nis no folder.\n"""', [(4, "is no")]),
        ("x = 1  # what came back\n", [(1, "what came")]),
        ("# a rank that\n# has none of them\n", [(2, "has none")]),
        ("raise ValueError(\n    f'{path!r} is '\n    'no file'\n)", [(2, "is no")]),
        ("def test_nobody_reads(): ...", [(1, "nobody")]),
        ("def test_a_mask_that_is_no_mask(): ...", [(1, "is no")]),
        ("def test_e6_a_field(): ...", [(1, "test_e6")]),
        ("def test_lists_row_18(): ...", [(1, "row_18")]),
        (f"def test_{'x' * 76}(): ...", [(1, f"test_{'x' * 76}")]),
        ("is_told = True\nfor came in []: ...", [(1, "is_told"), (2, "came")]),
        ('"""KD22: a sentence."""', [(1, "KD22")]),
    ],
)
def test_a_phrase_is_found_on_its_line(source: str, expected: list[tuple[int, str]]):
    assert found(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "# there is no rank 7; it is no longer there, and is None; it has no effect\n",
        "def test_two_of_32_bits_k3_and_bfloat16_exit_with_code_2(): ...",
        f"def test_{'x' * 75}(): ...",
        "assert x is None  # a gpu of 80 GB, python 3.11, E501\n",
        "name = 'nobodyelse'",
    ],
)
def test_good_english_is_left_alone(source: str):
    assert found(source) == []


def test_markdown_is_read_without_its_code():
    page = "A path is\nno file, `is none`.\n\n```\nis none\n```\nText is none.\n"
    assert found(page, "docs/a.md") == [(1, "is no"), (7, "is none")]


def test_a_quotation_is_exempt_with_a_reason_and_only_where_it_is_needed():
    quoted = 'x = "is no file"'
    assert found(f"# english: quotes ls\n{quoted}") == []
    assert found(f"{quoted}  # english: quotes ls") == []
    assert found(f"# english:\n{quoted}") == [(1, "english:"), (2, "is no")]
    assert found("# english: quotes ls\nx = 1") == [(1, "english: quotes ls")]
    assert found("<!-- english: quotes ls -->\nA path is no file.", "docs/a.md") == []


def test_exit_code_and_lines_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 'is no file'\n")
    assert ENGLISH.main(tmp_path) == 1
    assert "src/a.py:1: 'is no': write 'is not a'" in capsys.readouterr().out
    (tmp_path / "src" / "a.py").write_text("x = 'is not a file'\n")
    assert ENGLISH.main(tmp_path) == 0

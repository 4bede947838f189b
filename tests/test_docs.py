"""The documents are true: links lead somewhere, Python is run by some test, and what `coming-from-verl.md` says holds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.verl.ported.imports import MODULES

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PORTING = ROOT / "docs" / "coming-from-verl.md"

RUN_BY = {
    "README.md": "tests/test_docs.py",
    "coming-from-verl.md": "tests/test_docs.py",
    "data.md": "tests/test_docs.py",
    "programming-model.md": "tests/test_docs_programming_model.py",
    "tasks.md": "tests/cli/test_user_task.py",
    "trackers.md": "tests/cli/test_user_tracker.py",
}
"""The test that runs a page's Python."""


def python_of(page: Path) -> str:
    """The page's Python as one script, with every line where it stands on the page."""
    lines, is_code = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        is_fence = line.startswith("```")
        lines.append(line if is_code and not is_fence else "")
        if is_fence:
            is_code = line == "```python"
    return "\n".join(lines) + "\n"


def anchor(heading: str) -> str:
    """What a heading is called in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, heading = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (heading and heading not in anchors_of(target)):
            lost.append(link)
    assert lost == []


def test_python_on_a_page_is_run_by_a_test():
    with_python = {page.name for page in PAGES if "```python" in page.read_text(encoding="utf-8")}
    assert with_python == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert page in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [ROOT / "README.md", PORTING, ROOT / "docs" / "data.md"], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text(python_of(page), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_false_statement_on_a_page_would_be_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```text\nassert False\n```\n\n```python\nx = 1\nassert x == 2\n```\n", encoding="utf-8")
    assert python_of(page).splitlines() == [""] * 7 + ["x = 1", "assert x == 2", ""]


def test_the_import_table_is_the_one_that_ports_are_made_with():
    rows = re.findall(r"^\| `(verl[\w.]*)` \| `(podium[\w.]*)` \|$", PORTING.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == MODULES

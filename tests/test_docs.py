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
    "algorithms.md": "tests/trainers/test_docs_algorithms.py",
    "coming-from-verl.md": "tests/test_docs.py",
    "data.md": "tests/test_docs.py",
    "parts.md": "tests/parts/test_own_parts.py",
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


def test_the_python_of_the_pages_runs(tmp_path: Path):
    """One after another in one process, whose Ray cluster they share. A traceback names the page and its line."""
    scripts = []
    for page in (ROOT / "README.md", PORTING, ROOT / "docs" / "data.md"):
        scripts.append(tmp_path / f"{page.stem}.py")
        scripts[-1].write_text(python_of(page), encoding="utf-8")
    run_all = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__'); print(path)"
    done = subprocess.run([sys.executable, "-c", run_all, *scripts], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert [path for path in map(str, scripts) if path not in done.stdout] == []


def test_a_false_statement_on_a_page_would_be_found(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```text\nassert False\n```\n\n```python\nx = 1\nassert x == 2\n```\n", encoding="utf-8")
    assert python_of(page).splitlines() == [""] * 7 + ["x = 1", "assert x == 2", ""]


def test_the_import_table_is_the_one_that_ports_are_made_with():
    rows = re.findall(r"^\| `(verl[\w.]*)` \| `(podium[\w.]*)` \|$", PORTING.read_text(encoding="utf-8"), re.MULTILINE)
    assert dict(rows) == MODULES

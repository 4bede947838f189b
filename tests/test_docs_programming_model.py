"""`docs/programming-model.md` is true: its code runs as one script on both runtimes, and its tables are those of the code.

The page is run as its reader would run it, by a fresh interpreter, so that its classes are those of `__main__`. Other
lines become empty, so that line numbers in a traceback are those of the page.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from podium.single_controller import CAPABILITIES, Capabilities, Dispatch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "programming-model.md"
RUNTIME_LINE = 'RUNTIME = "inline"'
ONLY_ON_RAY = "<!-- ray -->"
LIMIT_S = 540  # below the limit of the test, so that it ends the script itself
TYPE_CHECK = [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context"]


def script(*, runtime: str) -> str:
    """The page's blocks in order; those that need Ray only where it is the runtime."""
    lines = PAGE.read_text().splitlines()
    kept = [""] * len(lines)
    for start in (number for number, line in enumerate(lines) if line == "```python"):
        stop = lines.index("```", start)
        if runtime == "ray" or lines[start - 1] != ONLY_ON_RAY:
            kept[start + 1 : stop] = lines[start + 1 : stop]
    code = "\n".join(kept)
    assert code.count(RUNTIME_LINE) == 1, "the page sets its runtime once"
    return code.replace(RUNTIME_LINE, f'RUNTIME = "{runtime}"')


def written(tmp_path: Path, runtime: str) -> Path:
    path = tmp_path / f"programming_model_on_{runtime}.py"
    path.write_text(script(runtime=runtime))
    return path


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)


@pytest.mark.timeout(600)  # about twenty processes start
@pytest.mark.parametrize("runtime", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_page_runs(runtime: str, tmp_path: Path):
    pytest.importorskip("ray")
    ended = run(sys.executable, written(tmp_path, runtime))
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_type_checkers_see_what_the_page_says(tmp_path: Path):
    pytest.importorskip("mypy")
    pytest.importorskip("ray")
    path = written(tmp_path, "ray")
    assert run(*TYPE_CHECK, path).stdout == ""
    mistake = "typed.call.add(batch, tims=3)"
    path.write_text(path.read_text().replace(f"# {mistake}", f"{mistake}  #"))
    assert 'Unexpected keyword argument "tims"' in run(*TYPE_CHECK, path).stdout


def test_the_table_of_capabilities_is_the_codes():
    stated = {cells[0].strip("`"): cells[2:] for cells in table("capability")}
    assert stated == {
        capability.name: ["yes" if getattr(can, capability.name) else "no" for can in CAPABILITIES.values()]
        for capability in fields(Capabilities)
        if capability.type == "bool"
    }
    assert header("capability")[2:] == list(CAPABILITIES)


def test_the_table_of_modes_has_every_built_in_one():
    stated = [cells[0].strip("`") for cells in table("mode")]
    built_in = [name for name, mode in vars(Dispatch).items() if not name.startswith("_") and mode in Dispatch]
    assert sorted(stated) == sorted([*built_in, "make_nd_compute_dataproto_dispatch_fn(mesh)", "a mode of one's own"])


def test_the_architecture_names_every_module():
    stated = (ROOT / "docs" / "architecture.md").read_text()
    section = stated[stated.index("## The single controller") : stated.index("## A step of GRPO")]
    package = ROOT / "src" / "podium" / "single_controller"
    modules = [path.relative_to(package).with_suffix("") for path in package.rglob("*.py") if path.stem != "__init__"]
    named = set(re.findall(r"`([^`]+)`", section))
    assert [str(module) for module in modules if not named & {str(module), module.name}] == []


def table(first_head: str) -> list[list[str]]:
    """The body's cells, by row, of the table whose first column has that head."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if cells_of(line)[0] == first_head)
    stop = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    return [cells_of(line) for line in lines[start + 2 : stop]]


def header(first_head: str) -> list[str]:
    return next(cells for line in PAGE.read_text().splitlines() if (cells := cells_of(line))[0] == first_head)


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"\|", line)[1:-1]] or [""]

"""The package as a whole: what importing it costs and brings, what it exports, what a wheel of it holds."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import podium

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "ray", "transformers", "tensordict", "reasoning_gym", "matplotlib", "tensorboard")
IMPORT_BUDGET_S = 0.3
VAGUE_NAMES = {"utils", "helpers", "common", "misc", "manager"}  # code lives where its subject is

MODULES = sorted(info.name for info in pkgutil.walk_packages(podium.__path__, "podium."))
PACKAGES = ["podium", *sorted(info.name for info in pkgutil.walk_packages(podium.__path__, "podium.") if info.ispkg)]


def in_fresh_interpreter(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick() -> None:
    code = "import time; start = time.perf_counter(); import podium; print(time.perf_counter() - start)"
    best_s = min(float(in_fresh_interpreter(code)) for _ in range(3))  # the best: the rest is the machine's noise
    assert best_s < IMPORT_BUDGET_S


@pytest.mark.parametrize("name", ["podium", "podium.cli", "podium.cli.main", "podium.config", "podium.recipes"])
def test_import_brings_nothing_heavy(name: str) -> None:
    loaded = json.loads(in_fresh_interpreter(f"import json, sys, {name}; print(json.dumps(sorted(sys.modules)))"))
    assert [module for module in HEAVY if module in loaded] == []


def test_import_changes_neither_environment_nor_logging() -> None:
    code = (
        "import logging, os; before = dict(os.environ), list(logging.root.handlers), logging.root.level; import podium.cli;"
        "assert before == (dict(os.environ), list(logging.root.handlers), logging.root.level)"
    )
    in_fresh_interpreter(code)


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_resolve(name: str) -> None:
    package = importlib.import_module(name)
    names = [public for public, value in vars(package).items() if public[0] != "_" and not isinstance(value, ModuleType)]
    exported = getattr(package, "__all__", None)
    if exported is None:  # right for a package that offers no names, such as the command line
        assert names == [], f"{name}/__init__.py has names but no __all__, so readers cannot see which are public"
        return
    assert len(set(exported)) == len(exported)
    assert [public for public in exported if not hasattr(package, public)] == []


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "src" / "podium").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_no_package_without_a_subject() -> None:
    assert [module for module in MODULES if module.rpartition(".")[2] in VAGUE_NAMES] == []


def test_wheel_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"podium-{podium.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "podium").rglob("*.py")}
    info = f"podium-{podium.__version__}.dist-info"
    assert names >= sources | {"podium/py.typed", f"{info}/entry_points.txt", f"{info}/licenses/LICENSE"}
    assert {name.split("/")[0] for name in names} == {"podium", info}


def check_lift(run_dir: Path, *values: float | None) -> subprocess.CompletedProcess[str]:
    lines = [{"step": step} if value is None else {"step": step, "val/x": value} for step, value in enumerate(values)]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, str(ROOT / ".ci" / "check_lift.py"), str(run_dir), "0.30", "val/x"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ((0.1, None, 0.2, 0.41, None), 0, "0.100 at step 0 -> 0.410 at step 3"),
        ((0.1, 0.9, 0.39), 1, "lift +0.290"),  # the last value counts, not the best
        ((0.1, None), 2, "1 values in 2 lines"),
        ((0.1, float("nan")), 2, "nan at step 1"),
    ],
)
def test_ci_lift_check(tmp_path: Path, values: tuple[float | None, ...], code: int, message: str) -> None:
    done = check_lift(tmp_path, *values)
    assert done.returncode == code
    assert message in done.stdout + done.stderr

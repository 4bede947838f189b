"""Names of parts: what they resolve to, and what a wrong one is answered with."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from podium.config import PartSettings
from podium.errors import ConfigError, MissingExtraError
from podium.parts import PartTable, Row, SourceFile, tables

ANIMALS = PartTable(
    "animal",
    {"dog": "tests.parts.animals:Dog", "unicorn": Row("tests.parts.animals:Dog", package="no_such_library", extra="myths")},
    base="tests.parts.animals:Animal",
)
CALLABLES = PartTable("function", {})

ROOT = Path(__file__).parents[2]

OWN = """
from dataclasses import dataclass
from tests.parts.animals import Animal

class Cat(Animal):
    class Settings: pass
    def speak(self): return "meow"

class Tiger(Animal): pass

@dataclass
class Toy: name: str

NUMBER = 3
def purr(): raise RuntimeError("no breath")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.parametrize("name", ["dog", "tests.parts.animals:Dog", "tests.parts.animals.Dog"])
def test_a_name_is_a_row_of_the_table_or_a_module_and_its_attribute(name: str) -> None:
    assert ANIMALS.resolve(name)().speak() == "woof"


@pytest.mark.parametrize("name", ["own.py:Cat", "./own.py:Cat", "{own}:Cat"])
def test_a_name_is_a_path_and_an_attribute(own: Path, name: str) -> None:
    assert ANIMALS.resolve(name.format(own=own))().speak() == "meow"
    assert ANIMALS.settings_of(name.format(own=own)) is ANIMALS.resolve("own.py:Cat").Settings
    assert ANIMALS.settings_of("dog") is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "dgo",
            "unknown animal 'dgo'; did you mean 'dog'? Known: dog, unicorn; your own: package.module:Name or path/to/file.py",
        ),
        ("own.py", "the animal must be package.module:Name or path/to/file.py:Name, got 'own.py'"),
        (":Cat", "got ':Cat'. Known: dog"),
        ("own.py:Cta", "own.py does not have 'Cta'; did you mean 'Cat'? It has: Cat"),
        ("tests.parts.animals:Dgo", "tests.parts.animals does not have 'Dgo'; did you mean 'Dog'?"),
        ("gone.py:Cat", "the animal 'gone.py:Cat': no such file: gone.py (relative to "),
        ("no_such_package.module:Cat", "no module 'no_such_package' in "),
        ("tests.parts.missing:Cat", "no module 'tests.parts.missing' in "),
        ("own.py:Tiger", "the animal 'own.py:Tiger' is abstract: it must define speak; of this kind the module has: Cat"),
        ("own.py:NUMBER", "must be a subclass of tests.parts.animals.Animal, got 3; of this kind the module has: Cat"),
        ("own.py:purr", "must be a subclass of tests.parts.animals.Animal, got <function purr"),
        ("pathlib:Path", "must be a subclass of tests.parts.animals.Animal, got <class 'pathlib"),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(own: Path, name: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ANIMALS.resolve(name)
    assert expected in str(caught.value)


def test_parts_without_a_base_class_must_be_callable(own: Path) -> None:
    assert CALLABLES.resolve("own.py:purr").__name__ == "purr"
    with pytest.raises(
        ConfigError, match=r"the function 'own.py:NUMBER' must be callable, got 3; of this kind .* Cat, Tiger, Toy"
    ):
        CALLABLES.resolve("own.py:NUMBER")


def test_a_missing_library_is_answered_with_its_pip_line_without_an_import() -> None:
    with pytest.raises(MissingExtraError, match=r"not installed: no-such-library, for the animal 'unicorn'.*\[myths\]"):
        ANIMALS.resolve("unicorn")
    assert ANIMALS.missing_extra("dog") is None
    assert ANIMALS.missing_extra("unicorn") is not None


@pytest.mark.parametrize(
    ("text", "expected", "cause"),
    [
        ("x = 1 / 0\n", r"importing own.py failed: ZeroDivisionError: division by zero \(own.py, line 1\)", ZeroDivisionError),
        ("def f(:\n", r"importing own.py failed: SyntaxError: invalid syntax \(own.py, line 1\)", SyntaxError),
        ("import no_such_library\n", "own.py imports 'no_such_library', which is not installed here", ModuleNotFoundError),
        ("raise SystemExit(3)\n", "importing own.py failed: SystemExit: 3", SystemExit),
    ],
)
def test_an_import_that_fails_keeps_its_cause(own: Path, text: str, expected: str, cause: type[BaseException]) -> None:
    own.write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        ANIMALS.resolve("own.py:Cat")
    assert isinstance(caught.value.__cause__, cause)


def test_an_edited_file_is_another_module_and_the_same_text_is_imported_once(own: Path) -> None:
    source = SourceFile.read("own.py")
    before = source.module()
    own.write_text(OWN.replace("meow", "hiss"))
    assert source.module() is before is SourceFile(str(own), OWN).module()
    assert ANIMALS.resolve("own.py:Cat")().speak() == "hiss"
    assert ANIMALS.resolve("own.py:Cat", source)().speak() == "meow"


def test_a_traceback_shows_the_text_that_ran_and_not_the_edited_file(own: Path) -> None:
    purr = CALLABLES.resolve("own.py:purr")
    own.write_text("# edited\n" * 40)
    with pytest.raises(RuntimeError) as caught:
        purr()
    assert str(caught.traceback[-1].statement).strip() == 'def purr(): raise RuntimeError("no breath")'


def test_objects_of_a_file_are_unpickled_after_their_source_without_the_file(own: Path) -> None:
    source = SourceFile.read("own.py")
    packed = pickle.dumps((source, source.module().Toy("ball")))
    own.unlink()
    script = f"import sys; sys.path.append({str(ROOT)!r})\n"
    script += "import pickle; source, toy = pickle.load(sys.stdin.buffer); print(toy, type(toy).__module__)"
    found = subprocess.run([sys.executable, "-c", script], input=packed, capture_output=True, check=True)
    assert found.stdout.decode().split() == ["Toy(name='ball')", f"podium_part_{source.sha256[:16]}"]


TABLES = [table for table in vars(tables).values() if isinstance(table, PartTable)]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.kind)
def test_every_row_of_our_tables_resolves_and_its_settings_are_those_of_the_part(table: PartTable) -> None:
    for name in table.rows:
        if table.missing_extra(name) is None:
            part, settings = table.resolve(name), table.settings_of(name)
            assert part.__name__ == table.place_of(name).rpartition(":")[2]
            assert table.base is None or table._objection(part) is None
            assert settings is None or issubclass(settings, PartSettings)
            assert getattr(part, "Settings", settings) is settings

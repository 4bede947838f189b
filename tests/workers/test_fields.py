"""The table of a step's columns: each is what its name says, and docs/data.md shows them all."""

from __future__ import annotations

from pathlib import Path

from podium.protocol import Field
from podium.workers import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
HEAD = ["| column | is | made by | read by | holds |", "|---|---|---|---|---|"]


def line(field: Field) -> str:
    makers, readers = (", ".join(f"`{name}`" for name in names) for names in (field.made_by, field.read_by))
    return f"| `{field.name}` | {field.kind} | {makers} | {readers} | {field.meaning} |"


def test_the_page_shows_the_table():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index(HEAD[0])
    stop = next(number for number in range(start, len(lines)) if not lines[number].startswith("|"))
    assert lines[start:stop] == [*HEAD, *map(line, FIELDS.values())]


def test_every_column_is_under_its_name_and_somebody_makes_and_reads_it():
    for name, field in FIELDS.items():
        assert field.name == name
        assert field.shape[0] == "B"
        assert field.made_by
        assert field.read_by
        assert field.meaning

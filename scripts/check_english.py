"""Find phrases that are hard to read in comments, docstrings, string literals, names and the prose of Markdown pages.

`make english` runs it, and so does `make check`. A pattern is here only if it is always wrong; "has no" and "there is no" are
good English and are not. A line that quotes another program's text is exempt with a reason: `# english: quotes Ray's error` in
Python, `<!-- english: quotes Ray's error -->` in Markdown, on the line itself or on the line before it.
"""

from __future__ import annotations

import ast
import bisect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("src", "tests", "benchmarks", "scripts", "examples", ".ci", "docs", "README.md")
"""Where to look; below them every .py and .md file."""

EXAMPLES_OF_PHRASES = "tests/test_check_english.py"
"""Not checked: it consists of what the check finds."""

PHRASES: tuple[tuple[str, str], ...] = (
    (
        r"(?<![Tt]here )\b(?:is|are|was|were) no\b(?! (?:longer|more|less|fewer|better|worse|different|other)\b)",
        "write 'is not a'",
    ),
    (r"(?<![Tt]here )\b(?:is|are|was|were) none\b", "write 'is not a ...', 'is not in ...' or 'there are none'"),
    (r"\b(?:has|have|had) none\b", "write 'does not have'"),
    (r"\b(?:[Ss]ome|[Nn]o)body\b", "name the actor: the driver, rank 3, Ray, the caller, the optimizer"),
    (r"\b[Tt]old\b", "write what is done: reported, given, set, distinguished"),
    (r"\b[Ww]hat (?:comes|came|is heard|is said)\b", "name the thing: the reply, the rows, the message"),
)
"""A pattern, and what to write in its place."""

CODES = r"\b(?:KD|FR)-?\d{1,3}\b|\b[DE][1-9]\b"
CODE_IN_NAME = r"(?:^test_|_)(?!k[123](?:_|$))(?:[a-z]{1,2}\d+|(?:row|kd|fr|item|issue|bug|report|finding)_?\d+)(?=_|$)"
CODE_HINT = "say the behaviour: the list of these codes is not in the repository"
PAGES_WITH_CODES = ("docs/results.md",)
"""Where the numbers of reports are meant."""

MAX_TEST_NAME = 80
EVENTS_AS_NAMES = {"told", "came"}  # english: the words themselves
"""Words that are neither nouns nor flags, so not part of a name."""

MARK = re.compile(r"english: *(?P<reason>[^-\s>][^>]*)?")
NAME_HINT = f"{' and '.join(sorted(EVENTS_AS_NAMES))} are not nouns or flags: say what is reported, given or fetched"


@dataclass(frozen=True, order=True)
class Finding:
    """A phrase that is hard to read, where it stands, and what to write in its place."""

    path: str
    line: int
    text: str
    hint: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}: {self.hint}"


class Prose:
    """Pieces of text, joined by single spaces, that know the line of each character."""

    def __init__(self) -> None:
        self.text = ""
        self._starts: list[int] = []
        self._lines: list[int] = []

    def add(self, line: int, text: str, *, glued: bool = False) -> None:
        """Add text that begins on `line`; `glued` continues the word before, as a literal beside a literal does."""
        for number, part in enumerate(text.split("\n")):
            words = " ".join(part.split()) if not glued else part
            self.text += "" if glued and number == 0 else " "
            self._starts.append(len(self.text))
            self._lines.append(line + number)
            self.text += words

    def line_of(self, index: int) -> int:
        return self._lines[max(bisect.bisect_right(self._starts, index) - 1, 0)]


def proses_of_python(source: str) -> Iterator[Prose]:
    """Each run of comment lines, and each literal with those beside it, as one text."""
    prose, kind = Prose(), None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            if token.type == tokenize.NEWLINE and kind == tokenize.STRING:
                kind = None
            continue
        name = tokenize.tok_name[token.type]
        found = tokenize.STRING if token.type == tokenize.STRING or name.startswith("FSTRING") else token.type
        if found != kind:
            yield prose
            prose, kind = Prose(), found
        if found == tokenize.COMMENT:
            prose.add(token.start[0], token.string.lstrip("#"))
        elif found == tokenize.STRING and name not in ("FSTRING_START", "FSTRING_END"):
            prose.add(token.start[0], _inside(token.string) if name == "STRING" else token.string, glued=True)
    yield prose


def _inside(literal: str) -> str:
    """The text between a literal's quotes, as written; the lines of a long one without their indentation."""
    body = re.sub(r"\A\w*(\"\"\"|'''|\"|')(.*)\1\Z", r"\2", literal, flags=re.DOTALL)
    return "\n".join(line.strip() for line in body.split("\n")) if "\n" in body else body


def proses_of_markdown(source: str) -> Iterator[Prose]:
    """The paragraphs of a page, without blocks and spans of code."""
    prose, is_code = Prose(), False
    for number, line in enumerate(source.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not line.strip():
            yield prose
            prose = Prose()
        elif not is_code:
            prose.add(number, re.sub(r"`[^`]*`", "`code`", line))
    yield prose


def findings_in_prose(path: str, prose: Prose) -> Iterator[Finding]:
    rules = PHRASES if path in PAGES_WITH_CODES else (*PHRASES, (CODES, CODE_HINT))
    for pattern, hint in rules:
        for match in re.finditer(pattern, prose.text):
            yield Finding(path, prose.line_of(match.start()), match.group(), hint)


def findings_in_names(path: str, source: str) -> Iterator[Finding]:
    """Of tests: length, codes, phrases. Of everything that is assigned or defined: words that are neither noun nor flag."""
    for node in ast.walk(ast.parse(source)):
        name = _defined(node)
        if name is None:
            continue
        line = int(getattr(node, "lineno", 1))
        if EVENTS_AS_NAMES & set(name.lower().split("_")):
            yield Finding(path, line, name, NAME_HINT)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and name.startswith("test_"):
            if len(name) > MAX_TEST_NAME:
                yield Finding(path, line, name, f"a test's name has at most {MAX_TEST_NAME} characters, this one {len(name)}")
            if code := re.search(CODE_IN_NAME, name):
                yield Finding(path, line, code.group().strip("_"), CODE_HINT)
            words = name.replace("_", " ")
            for pattern, hint in PHRASES:
                if (match := re.search(pattern, words)) and not re.search(r"\b[Tt]old\b|(?:is|are) none", match.group()):  # None
                    yield Finding(path, line, match.group(), f"{hint} (in the name {name})")


def _defined(node: ast.AST) -> str | None:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
    return None


def check(path: str, source: str) -> list[Finding]:
    """What is hard to read in a file, in the order of its lines; marks without a reason or without a phrase are findings too."""
    if path.endswith(".py"):
        proses, names = proses_of_python(source), list(findings_in_names(path, source))
    else:
        proses, names = proses_of_markdown(source), []
    found = [*names, *(finding for prose in proses for finding in findings_in_prose(path, prose))]
    comments = comments_of_python(source) if path.endswith(".py") else comments_of_markdown(source)
    marks = {line: match for line, comment in comments if (match := MARK.match(comment))}
    exempt = {number for number, match in marks.items() if match["reason"]}
    used = {number for finding in found for number in (finding.line, finding.line - 1) if number in exempt}
    kept = [finding for finding in found if not {finding.line, finding.line - 1} & exempt]
    for number, match in marks.items():
        if not match["reason"]:
            kept.append(Finding(path, number, match.group().strip(), "say why after the colon"))
        elif number not in used:
            kept.append(Finding(path, number, match.group().strip(), "this line and the next need no exemption: remove the mark"))
    return sorted(set(kept))


def comments_of_python(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def comments_of_markdown(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), start=1):
        if line.lstrip().startswith("<!--"):
            yield number, line.lstrip().removeprefix("<!--").lstrip()


def files(root: Path) -> list[str]:
    """The files to check, as paths below `root`."""
    tops = [root / room for room in ROOMS]
    found = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*")))]
    return [path.relative_to(root).as_posix() for path in found if path.suffix in (".py", ".md") and path.is_file()]


def main(root: Path = ROOT) -> int:
    paths = [path for path in files(root) if path != EXAMPLES_OF_PHRASES]
    found = [finding for path in paths for finding in check(path, (root / path).read_text(encoding="utf-8"))]
    for finding in found:
        print(finding)
    print(f"{len(found)} phrases to change")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""The files of parts in a run's folder, and a run that goes on after one was edited."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from podium.config import resolve
from podium.errors import ConfigError
from podium.parts import SourceFile, edited, read_sources, write_sources
from podium.trainers import RunDirectory
from tests.config.test_load import SETTINGS
from tests.config.test_parts import OWN


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN, newline="")
    return tmp_path / "own.py"


def test_stored_files_read_back_equal_and_keep_their_line_ends(tmp_path: Path) -> None:
    sources = {
        path: SourceFile(path, text) for path, text in (("/a.py", "x = 1\r\n"), ("/b.py", "x = 'é'\n"), ("/c.py", "x = 1\r\n"))
    }
    write_sources(tmp_path / "parts", {"/a.py": sources["/a.py"]})
    write_sources(tmp_path / "parts", sources)
    assert read_sources(tmp_path / "parts") == sources
    assert len([*(tmp_path / "parts").glob("*.py")]) == 2
    assert read_sources(tmp_path / "none") == {}


def test_a_damaged_copy_is_named(own: Path, tmp_path: Path) -> None:
    source, folder = SourceFile.read("own.py"), tmp_path / "parts"
    write_sources(folder, {source.path: source})
    (folder / f"{source.sha256}.py").write_text("")
    with pytest.raises(ConfigError, match=r"\.py is not the text that the run began with .*: put it back, or start a new run"):
        read_sources(folder)
    (folder / f"{source.sha256}.py").unlink()
    with pytest.raises(ConfigError, match=r"index\.json is damaged \(.*No such file"):
        read_sources(folder)
    (folder / "index.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json is damaged \(it must hold a SHA-256 for each path"):
        read_sources(folder)


def test_a_run_keeps_the_files_of_its_parts_and_goes_on_with_them(own: Path, caplog: pytest.LogCaptureFixture) -> None:
    started = resolve(SETTINGS, ["rollout=own.py:Echo", "rollout.words=hi"])
    run = RunDirectory.create(started)
    digest = SourceFile.read("own.py").sha256
    assert json.loads((run.parts / "index.json").read_text()) == {str(own): digest}
    assert (run.parts / f"{digest}.py").read_text() == OWN

    own.write_text(OWN.replace("words", "phrase"))
    with caplog.at_level(logging.WARNING):
        _, config = RunDirectory.open(run.path, ["rollout.times=3"])
    assert f"{own} was edited since the run began: the run goes on with the text that it began with" in caplog.text
    assert (config.rollout.name, config.rollout.words, config.rollout.times) == (f"{own}:Echo", "hi", 3)
    assert edited(config.rollout.source)

    own.unlink()
    assert RunDirectory.open(run.path)[1].rollout.source == started.rollout.source


def test_another_part_that_a_resumed_run_chooses_is_stored_too(own: Path) -> None:
    run = RunDirectory.create(resolve(SETTINGS))
    assert not run.parts.exists()
    _, config = RunDirectory.open(run.path, ["rollout=own.py:Echo"])
    run.pin_settings(config)
    own.unlink()
    assert RunDirectory.open(run.path)[1] == config

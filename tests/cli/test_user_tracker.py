"""The tracker of docs/trackers.md as a user would write it: from YAML, from the command line, and with a wrong key."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from podium.config import resolve
from podium.errors import ConfigError
from podium.observability import RunInfo, Trackers
from tests.cli.test_cli import podium
from tests.config.probes import SETTINGS

PAGE = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")
(SOURCE,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with the file of the page."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_trackers.py").write_text(SOURCE)
    return tmp_path


def test_the_tracker_of_the_docs_is_chosen_from_settings_and_writes_its_file(here):
    section = {"name": "my_trackers.py:CsvTracker", "folder": str(here)}
    config = resolve({**SETTINGS, "trainer": {**SETTINGS["trainer"], "trackers": [section]}})
    run = RunInfo(run_id="0" * 16, name="a-1", group="a-1", phase="rl", folder=here, config={})
    trackers = Trackers(run, config.trainer.trackers)
    trackers.start(None)
    trackers.log(0, {"val/score/mean": 0.5})
    trackers.log(1, {"critic/rewards/mean": 0.25})
    trackers.finish("finished")
    assert (here / "a-1.csv").read_text() == "0,\n1,0.25\n"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{name: my_trackers.py:CsvTracker}", "trainer.trackers.0.folder: is required and was not given"),
        (
            "{name: my_trackers.py:CsvTracker, folder: x, foldr: y}",
            "unknown key 'trainer.trackers.0.foldr'; did you mean 'folder'",
        ),
        ("{name: my_trackers.py:CsvTraker, folder: x}", "my_trackers.py does not have 'CsvTraker'; did you mean 'CsvTracker'"),
        ("wanbd", "unknown tracker 'wanbd'; did you mean 'wandb'"),
        ("{name: wandb, projct: x}", "unknown key 'trainer.trackers.0.projct'; did you mean 'project'"),
    ],
)
def test_a_wrong_section_is_named_with_its_place_and_the_nearest_name(here, section, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(SETTINGS, [f"trainer.trackers=[{section}]"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("runtime=ray", "num_workers=2")], ids=["inline", "ray"])
def test_a_run_from_the_command_line_uses_the_tracker_of_the_docs(here, layout):
    done = podium(
        *("train", "spell_backward", "warmup.steps=2", "trainer.total_steps=2", "trainer.curve=false", *layout),
        f"trainer.trackers=[{{name: my_trackers.py:CsvTracker, folder: {here}}}]",
        cwd=here,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(len(path.read_text().splitlines()) for path in here.glob("*.csv")) == [2, 3]
    (run,) = (here / "runs").glob("spell_backward-*")
    assert not (run / "tb").exists()


@pytest.mark.slow
def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_the_end_of_the_process(here):
    """W&B waits at the interpreter's exit for a server that does not answer, for longer than a job may take to end."""
    (here / "hanging.py").write_text(
        "import threading, time\n"
        "from podium.observability import Tracker\n"
        "class Hanging(Tracker):\n"
        "    def log(self, step, metrics):\n"
        "        threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "        time.sleep(600)\n"
    )
    started_s = time.monotonic()
    done = podium(
        *("train", "spell_backward", "warmup.steps=0", "trainer.total_steps=1", "trainer.curve=false"),
        "trainer.trackers=[hanging.py:Hanging]",
        cwd=here,
    )
    assert time.monotonic() - started_s < 200
    assert done.returncode == 0, done.stderr
    assert "did not take 2 of 2 rows" in done.stderr
    assert (here / "runs" / "latest" / "hf" / "config.json").is_file()

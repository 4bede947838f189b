"""Text that is not ours is printed as it stands: brackets, emoji names, and characters that the terminal's encoding lacks."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from podium.cli import main, terminal, training
from podium.cli.explaining import explain_run
from podium.errors import ConfigError
from podium.observability import Progress
from podium.trainers import RunDirectory
from podium.trainers.traffic import StepTraffic, write_traffic
from tests.trainers.builders import small_config

SRC = Path(terminal.__file__).parents[1]
FOREIGN = "[/] [red]a[INST]:smile:[a, 3]"
"""An error of rich's markup, a style that vanishes, and an emoji."""


def test_a_report_prints_prompts_and_answers_literally(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    answer = {"prompt": FOREIGN, "answer": FOREIGN, "response": FOREIGN, "score": 1.0}
    entry = {"greedy_score": 1.0, "sampled_score": 1.0, "n": 1, "failed": 0, "answers": [answer]}
    run = RunDirectory(tmp_path / "[lr=1]")
    run.hf.mkdir(parents=True)
    run.write_report({"before": entry, "after": entry})
    training._print_report(terminal.text_console(), small_config(tmp_path), run)
    printed = capsys.readouterr().out
    assert printed.count(FOREIGN) == 4
    assert f"model: {run.hf}" in printed


def test_explain_prints_names_literally(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    row = {"call": FOREIGN, "way": "sent", "column": FOREIGN, "bytes": 1}
    write_traffic(tmp_path / "traffic.json", StepTraffic.model_validate({"step": 1, "rows": [row]}))
    explain_run(tmp_path, [FOREIGN], as_json=False)
    assert capsys.readouterr().out.count(FOREIGN) == 3


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_prints_literally_also_on_a_console_of_the_users(is_terminal):
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, color_system=None, width=400)
    with Progress(console, title=FOREIGN) as progress:
        progress.start_phase(FOREIGN, 1)
        progress.announce(FOREIGN)
        progress.update(1, {f"timing_s/{FOREIGN}": 1.0})
    assert FOREIGN in file.getvalue()
    assert file.getvalue().count("[INST]") == file.getvalue().count("[red]")


def test_a_console_is_made_in_one_place():
    """Any other would read text as markup."""
    makes = re.compile(r"\bConsole\(|from_markup|print\(\s*f?\"[^\"]*\[/?(?:red|bold|dim|green|yellow|cyan)")
    found = [path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py") if makes.search(path.read_text())]
    assert found == ["cli/terminal.py"]


def test_a_letter_that_the_encoding_lacks_is_printed_by_its_number(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    terminal.accept_all_characters()
    terminal.text_console().print("日 \udc80")
    assert written.getvalue() == rb"\u65e5 \udc80" + b"\n"


def test_a_folder_called_latest_stays_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "latest").mkdir()
    run = RunDirectory.create(small_config(tmp_path))
    assert run.config.is_file()
    assert (tmp_path / "latest").is_dir()
    assert "latest is not a link to a run; it stays as it is" in caplog.text


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_is_one_message(monkeypatch, capsys, code):
    def full():
        raise OSError(code, os.strerror(code), "runs/x/metrics.jsonl")

    monkeypatch.setattr(main, "app", full)
    monkeypatch.setattr(sys, "argv", ["podium"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("failed: the disk is full or read-only: [Errno")


def test_a_run_root_that_cannot_be_a_folder_is_refused_also_by_a_dry_run(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run_root: no run directory can be made in .*file/runs: .*file is not a folder"):
        training.start(small_config(tmp_path / "file" / "runs"), dry_run=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_with_brackets_and_non_ascii_names_prints_on_an_ascii_terminal(tmp_path):
    """And `latest` is a folder of the user's: it is left alone, and the run goes on."""
    root = tmp_path / "runs [lr=1] 日"
    (root / "latest").mkdir(parents=True)
    rows = [{"prompt": f"[INST]{number}[/INST]日\n", "answer": f"[a, {number}]"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = f"""
name: foreign
run_root: '{root}'
model: {{path: char_llama, override_config: {{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1}}}}
task: {{train_files: '{tmp_path}/rows.jsonl'}}
actor: {{optim: {{lr: 1e-3}}}}
rollout: {{sampling: {{n: 2, max_new_tokens: 2, stop: ['[/INST]']}}}}
trainer: {{total_steps: 1, prompts_per_step: 2, trackers: [], curve: false}}
"""
    (tmp_path / "[x].yaml").write_text(settings)
    command = [sys.executable, "-m", "podium.cli.main", "train", str(tmp_path / "[x].yaml")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "400"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs [lr=1] \\u65e5" in done.stdout
    assert re.search(r"\[INST\]\d+\[/INST\]\\u65e5 .* \[a, \d+\]", done.stdout), done.stdout
    assert f"{root}/latest is not a link".encode("ascii", "backslashreplace").decode() in done.stderr

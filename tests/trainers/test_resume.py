"""Going on with a run whose folder was edited, damaged or moved away from: what matters is named, nothing is taken in silence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from podium.cli import training
from podium.config import RunConfig, read_yaml, resolve
from podium.errors import ConfigError
from podium.trainers import RunDirectory
from podium.trainers.paths import anchored
from tests.tasks.builders import reward_file, sums, write_rows
from tests.trainers.builders import rows, small_config, train, weights

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")
ONE_STEP = ("warmup.steps=0", "trainer.total_steps=1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one step."""
    return train(small_config(tmp_path_factory.mktemp("finished"), *ONE_STEP)).path


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it to spoil."""
    return RunDirectory(shutil.copytree(finished, tmp_path / "run"))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


# -- settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "expected", "remedy"),
    [
        ("lr: 0.0004", "lr: 0.001", "actor.optim.lr: was 0.0004, is 0.001", "actor.optim.lr=0.001"),
        ("max_word_len: 3", "max_word_len: 4", "task.params.max_word_len: was 3, is 4", "task.params.max_word_len=4"),
        ("  params:\n    min_word_len: 3\n", "  params:\n", "task.params.min_word_len: was 3, is not set", ""),
        ("entropy_coeff: 0.0", "entropy_coeff: 0.1", "actor.entropy_coeff: was 0.0, is 0.1", "actor.entropy_coeff=0.1"),
        ("  stop: []", "  stop: ['a b']", "rollout.sampling.stop: was [], is [a b]", "'rollout.sampling.stop=[a b]'"),
    ],
)
@pytest.mark.parametrize("go_on", [lambda run: training.resume(run, [], dry_run=True), lambda run: training.evaluate(run, None)])
def test_an_edited_setting_that_matters_is_named_with_what_it_was(run, old, new, expected, remedy, go_on):
    replace(run.config, old, new)
    with pytest.raises(ConfigError) as caught:
        go_on(run.path)
    assert f"config.yaml was edited since the run was last started:\n  {expected}\n" in str(caught.value)
    assert str(caught.value).endswith(f"podium train --resume {run.path} {remedy}".rstrip())


def test_an_edit_is_taken_once_the_command_line_says_the_same(run):
    replace(run.config, "lr: 0.0004", "lr: 0.001")
    assert RunDirectory.open(run.path, ["actor.optim={lr: 0.001}"])[1].actor.optim.lr == 0.001
    with pytest.raises(ConfigError, match=r"actor\.optim\.lr: was 0\.0004, is 0\.001"):
        RunDirectory.open(run.path, ["actor.optim.lr=0.002"])


def test_an_edit_that_decides_no_number_is_taken_as_it_is(run):
    replace(run.config, "keep_checkpoints: 2", "keep_checkpoints: 7")
    replace(run.config, "trackers: []", "trackers: [{name: mlflow, experiment: mine}]")
    trainer = RunDirectory.open(run.path)[1].trainer
    assert (trainer.keep_checkpoints, trainer.trackers[0].experiment) == (7, "mine")


def test_a_run_goes_on_with_what_the_command_line_changes_and_keeps_a_record(run, caplog):
    directory, config = RunDirectory.open(run.path, ["trainer.total_steps=2", "actor.optim.lr=1e-3"])
    assert [config.trainer.total_steps, config.actor.optim.lr] == [2, 0.001]
    assert RunDirectory.open(run.path)[1].trainer.total_steps == 1, "open writes nothing"
    train(config, directory)
    assert [row["step"] for row in rows(directory)] == [0, 1, 2]
    assert RunDirectory.open(run.path)[1] == config == resolve(read_yaml(run.config))
    assert json.loads(run.settings.path.read_text())["changed"] == [
        {"after_step": 1, "key": "actor.optim.lr", "was": 0.0004, "is": 0.001},
        {"after_step": 1, "key": "trainer.total_steps", "was": 1, "is": 2},
    ]
    assert "goes on with another setting: trainer.total_steps: was 1, is 2" in caplog.text


def test_a_change_that_comes_too_late_is_refused(run):
    with pytest.raises(ConfigError, match=r"warmup\.\*: the warm-up of .* is done"):
        RunDirectory.open(run.path, ["warmup.steps=3"])
    (run.checkpoints / "step-1").rename(run.checkpoints / "step-7")
    with pytest.raises(ConfigError, match=r"trainer\.total_steps=1, but .* has done 7"):
        RunDirectory.open(run.path)


def test_another_setting_of_the_task_is_named(run):
    """It was blamed on the task's files."""
    with pytest.raises(ConfigError, match=r"^task\.seed: was 0, is 3: the problems would not be those that .* began with"):
        training.resume(run.path, ["task.seed=3"], dry_run=True)
    config = RunDirectory.open(run.path, ["task.seed=3"])[1]
    before = run.settings.path.read_bytes()
    with pytest.raises(ConfigError, match=r"^task\.seed: was 0, is 3"):
        train(config, run)
    assert run.settings.path.read_bytes() == before


def test_a_finished_run_says_so_and_how_to_get_more(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*") if path.is_file() and path.name != ".lock"}
    training.resume(run.path, [], dry_run=False)
    assert f"already done (1/1); for more: podium train --resume {run.path} trainer.total_steps=2" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_what_an_interrupted_run_has_kept_is_said(tmp_path, monkeypatch, capsys):
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run", interrupt)
    config = small_config(tmp_path, "warmup.steps=300")
    directory = RunDirectory.create(config)

    def printed() -> str:
        with pytest.raises(typer.Exit):
            training.resume(directory.path, [], dry_run=False)
        return capsys.readouterr().out

    assert "interrupted; nothing was saved yet, the warm-up starts again from 0 (it saves every 200 steps). Go on" in printed()
    (directory.warmup.checkpoints / "step-200").mkdir(parents=True)
    assert "interrupted; the warm-up's checkpoint of step 200 is kept. Go on" in printed()
    directory.warmup.hf.mkdir()
    (directory.warmup.hf / "config.json").write_text("{}")
    assert "interrupted; no step of RL was saved yet, the warm-up is kept. Go on" in printed()
    (directory.checkpoints / "step-0").mkdir(parents=True)
    monkeypatch.setattr(training, "_is_done", lambda *_: False)
    assert "interrupted; the checkpoint of step 0 is kept. Go on" in printed()


def test_without_the_record_a_warning_says_that_edits_are_not_known(run, caplog):
    run.settings.path.unlink()
    RunDirectory.open(run.path)
    assert "settings.json is gone: whether config.yaml was edited" in caplog.text


# -- files --------------------------------------------------------------------------------------------------------------


def in_place_of(name: str) -> Callable[[Path], None]:
    """What was a folder becomes a file, and the other way round."""

    def spoil(run: Path) -> None:
        found = run / name
        if found.is_dir():
            shutil.rmtree(found)
            found.write_text("")
        else:
            found.unlink(missing_ok=True)
            found.mkdir()

    return spoil


def content(name: str, text: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(text) and None


SCORES = {"greedy_score": 0.5, "sampled_score": 0.5, "n": 1, "failed": 0, "answers": []}


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (in_place_of("checkpoints"), r"checkpoints is not a folder"),
        (in_place_of("hf"), r"hf is not a folder"),
        (in_place_of("metrics.jsonl"), r"metrics\.jsonl is not a file"),
        (in_place_of("samples.jsonl"), r"samples\.jsonl is not a file"),
        (in_place_of("reward.log"), r"reward\.log is not a file"),
        (in_place_of("report.json"), r"report\.json is not a file"),
        (content("report.json", '{"before": {'), r"report\.json is damaged .* remove it to go on without the scores"),
        (content("report.json", "[]"), r"report\.json is damaged \(an object was expected, got list\)"),
        (content("report.json", '{"before": {}}'), r"report\.json is damaged \(before\.greedy_score: Field required\)"),
        (content("report.json", json.dumps({"after": {**SCORES, "n": "?"}})), r"report\.json is damaged \(after\.n: "),
        (content("report.json", json.dumps({"after": {**SCORES, "answers": [1]}})), r"damaged \(after\.answers\.0: "),
        (content("task.json", "{}"), r"task\.json is damaged \(it has no fingerprint\)"),
        (content("task.json", "\x00"), r"task\.json is damaged"),
        (content("settings.json", "{}"), r"settings\.json is damaged \(it has no settings\)"),
        (content("settings.json", "[" * 100_000), r"settings\.json is damaged \(maximum recursion depth"),
        (
            content("settings.json", '{"settings": {"old": 1}, "changed": []}'),
            r"settings\.json does not .*(?s:.*)remove it to trust",
        ),
        (
            content("report.json", json.dumps({"before": {**SCORES, "greedy_score": float("nan")}})),
            r"damaged \(JSON has no NaN\)",
        ),
    ],
)
def test_a_damaged_run_is_one_message_before_anything_starts(run, spoil, expected):
    config = RunDirectory.open(run.path)[1]
    spoil(run.path)
    for go_on in (lambda: training.resume(run.path, [], dry_run=True), lambda: train(config, run)):
        with pytest.raises(ConfigError, match=expected):
            go_on()


def test_a_run_whose_report_is_gone_says_so_and_reports_what_it_can(run, caplog, capsys):
    run.report.unlink()
    training.resume(run.path, [], dry_run=False)
    assert "report.json has no scores from before the run any more" in caplog.text
    assert run.read_report().keys() == {"after"}
    printed = capsys.readouterr().out
    assert "greedy exact match" in printed
    assert "before" not in printed


@pytest.mark.parametrize(("lines", "expected"), [(None, "is gone or empty"), (0, "is gone or empty"), (1, "ends at step 0")])
def test_a_run_whose_metrics_are_gone_says_so_and_goes_on(run, caplog, lines, expected):
    metrics = run.path / "metrics.jsonl"
    if lines is None:
        metrics.unlink()
    else:
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:lines]))
    config = RunDirectory.open(run.path, ["trainer.curve=true"])[1]
    train(config, run)
    assert f"step 1 of {run.path} is saved, but metrics.jsonl {expected}" in caplog.text
    assert ("curve.png is not drawn" in caplog.text) == (not lines)


# -- paths --------------------------------------------------------------------------------------------------------------


def test_a_run_keeps_absolute_paths_of_what_exists(finished, tmp_path, monkeypatch):
    """`latest` is followed, since it soon means the new run; a data file keeps the name that its rows' uids carry."""
    (tmp_path / "latest").symlink_to(finished)
    write_rows(tmp_path / "data.jsonl", sums(30))
    (tmp_path / "link.jsonl").symlink_to("data.jsonl")
    reward_file(tmp_path, "def score(data_source, solution_str, ground_truth, extra_info): return 0.0")
    script = next(tmp_path.glob("*.py")).name
    monkeypatch.chdir(tmp_path)
    config = resolve(
        small_config(tmp_path).model_dump(mode="json") | {"task": {"train_files": ["link.jsonl"]}},
        ["model=latest/hf", "ref.model=latest/hf", f"reward.function={script}:score", "task.held_out_files=[no.jsonl]"],
    )
    kept = anchored(config)
    assert kept.model.path == kept.ref.model == str(finished.resolve() / "hf")
    assert kept.task.train_files == (str(tmp_path / "link.jsonl"),)
    assert kept.task.held_out_files == ("no.jsonl",)
    assert kept.reward.function == f"{tmp_path / script}:score"
    directory = RunDirectory.create(config)
    monkeypatch.chdir("/")
    assert RunDirectory.open(directory.path)[1] == anchored(kept) == kept


def test_names_that_are_not_files_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "char_llama").mkdir()
    config: RunConfig = small_config(tmp_path, "reward.function=json.dumps", "ref.model=owner/name")
    assert anchored(config) == config


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_changed_bit_in_the_warmed_up_model_is_refused_on_resume(tmp_path):
    config = small_config(tmp_path, "warmup.steps=2", "trainer.total_steps=1")
    directory = train(config)
    flip_a_bit(directory.warmup.hf / "model.safetensors")
    with pytest.raises(ConfigError, match=r"warmup/hf/model\.safetensors is damaged: .*or remove the folder, and podium train"):
        train(config, directory)
    shutil.rmtree(directory.warmup.hf)  # what the message advises
    before = weights(directory)
    train(config, directory)
    assert weights(directory) == before
    flip_a_bit(directory.hf / "model.safetensors")
    with pytest.raises(ConfigError, match=r"hf/model\.safetensors is damaged"):
        training.evaluate(directory.path, None)
    with pytest.raises(ConfigError, match=r"hf/model\.safetensors is damaged"):  # also of a finished run
        training.resume(directory.path, [], dry_run=False)


@pytest.mark.parametrize("given_as", ["model={}", "ref.model={}"])
def test_a_given_model_that_changed_is_refused_on_resume(run, tmp_path, given_as):
    given = shutil.copytree(run.hf, tmp_path / "given")
    config = small_config(tmp_path, *ONE_STEP, "actor.use_kl_loss=true", given_as.format(given))
    other = RunDirectory.create(config)
    other.pin_models(other.check_models(config))
    (given / "README.md").write_text("not a file of the model")
    assert other.check_models(config).keys() == {str(given)}
    flip_a_bit(given / "model.safetensors")
    with pytest.raises(ConfigError, match=r"given is not the one that the run began with: model\.safetensors changed since"):
        train(config, other)

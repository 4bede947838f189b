"""Sections of the configuration that name a part."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import cloudpickle
import pytest
import yaml

from podium.config import HFRolloutConfig, PartOf, PartSettings, RolloutConfig, RunConfig, Settings, explain, resolve, to_yaml
from podium.config.parts import part_sections, sources_of
from podium.errors import ConfigError
from podium.parts import PartTable, SourceFile
from tests.config.test_load import SETTINGS

OWN = """
from pydantic import Field
from podium.config import RolloutConfig
from podium.rollout import BaseRollout

class Echo(BaseRollout):
    class Settings(RolloutConfig):
        words: str = "hello"
        times: int = Field(2, gt=0)
    def update_weights(self, weights, *, version): ...
    def _generate(self, prompts, sampling, *, seed, step): ...

class Plain(Echo):
    Settings = None

class Odd(Echo):
    Settings = int
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        ({"rollout": {"name": "own.py:Echo", "times": 5, "sampling": {"n": 3}}}, []),
        ({"rollout": "own.py:Echo"}, ["rollout.times=5", "rollout.sampling.n=3"]),
        ({}, ["rollout.times=5", "rollout=own.py:Echo", "rollout.sampling.n=3"]),
        ({"rollout": {"max_rows": 64, "sampling": {"n": 3}}}, ["rollout.name=own.py:Echo", "rollout.times=5"]),
        ({"rollout": {"sampling": {"n": 3}}}, ["rollout={name: own.py:Echo, times: 5}"]),
    ],
)
def test_a_part_is_chosen_by_its_name_and_checked_by_its_own_settings(own: Path, base: dict, overrides: list[str]) -> None:
    rollout = resolve({**SETTINGS, **base}, overrides).rollout
    assert (rollout.name, rollout.times, rollout.words, rollout.sampling.n) == ("own.py:Echo", 5, "hello", 3)
    assert isinstance(rollout, RolloutConfig)
    assert not hasattr(rollout, "max_rows")


def test_choosing_the_same_part_again_keeps_its_keys_and_another_drops_them(own: Path) -> None:
    base = resolve(SETTINGS, ["rollout.max_rows=7"])
    assert resolve(base, ["rollout=hf"]).rollout.max_rows == 7
    assert resolve(resolve(base, ["rollout=own.py:Echo"]), ["rollout=hf"]).rollout.max_rows == 1024


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["rollout=hff"],
            "rollout.name: unknown rollout engine 'hff'; did you mean 'hf'? Known: hf; your own: package.module:Name",
        ),
        (["actor.engine.name=fsdp"], "actor.engine.name: unknown training engine 'fsdp'; did you mean 'fsdp2'?"),
        (["rollout.max_rwos=5"], "unknown key 'rollout.max_rwos'; did you mean 'max_rows'?"),
        (["rollout=own.py:Echo", "rollout.tims=5"], "unknown key 'rollout.tims'; did you mean 'times'?"),
        (["rollout=own.py:Echo", "rollout.max_rows=5"], "unknown key 'rollout.max_rows'; there are: name, sampling, times"),
        (["rollout=own.py:Echo", "rollout.times=0"], "rollout.times: input should be greater than 0, got 0"),
        (["rollout=own.py:Echo", "rollout.times=x"], "rollout.times: input should be a valid integer, got 'x'"),
        (
            ["rollout=own.py:Ecoh"],
            "rollout.name: the rollout engine 'own.py:Ecoh': own.py does not have 'Ecoh'; did you mean 'Echo'?",
        ),
        (
            ["rollout=own.py:Odd"],
            "the settings class of the rollout engine 'own.py:Odd' must be a subclass of podium.config.RolloutC",
        ),
        (["actor.engine=own.py:Echo"], "must be a subclass of podium.engines.BaseEngine, got <class"),
        (["rollout.name=3"], "rollout.name: unknown rollout engine '3'"),
        (["rollout=[1]"], "rollout.name: "),
        (["rollout={name: 3}"], "rollout.name: input should be a valid string, got 3"),
    ],
)
def test_wrong_names_and_keys_are_answered_with_the_dotted_path_and_the_nearest(
    own: Path, overrides: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(SETTINGS, overrides)
    assert expected in str(caught.value)


def test_what_a_module_raised_is_the_cause_of_the_error(own: Path) -> None:
    own.write_text("import json\njson.loads('')\n")
    with pytest.raises(ConfigError, match=r"rollout.name: the rollout engine 'own.py:Echo': importing own.py failed") as caught:
        resolve(SETTINGS, ["rollout=own.py:Echo"])
    assert isinstance(caught.value.__cause__, json.JSONDecodeError)


def test_a_key_that_takes_text_is_read_as_text_by_the_part_that_is_chosen_later(own: Path) -> None:
    assert resolve(SETTINGS, ["rollout.words=007", "rollout=own.py:Echo"]).rollout.words == "007"
    assert resolve(SETTINGS, ["rollout.words=[a]", "rollout=own.py:Echo"]).rollout.words == "[a]"


def test_a_part_without_settings_of_its_own_has_those_of_its_kind(own: Path) -> None:
    assert type(resolve(SETTINGS, ["rollout=own.py:Plain"]).rollout) is RolloutConfig


def test_settings_of_the_kind_become_those_of_the_part() -> None:
    config = RunConfig.model_validate({**resolve(SETTINGS).model_dump(), "rollout": RolloutConfig(name="hf")})
    assert config.rollout == HFRolloutConfig()


def test_a_config_with_parts_from_files_reads_back_equal_and_explains_itself(own: Path) -> None:
    config = resolve(SETTINGS, ["rollout=own.py:Echo", "rollout.times=5"])
    assert yaml.safe_load(to_yaml(config))["rollout"]["times"] == 5
    assert resolve(yaml.safe_load(to_yaml(config))) == config
    line = next(line for line in explain(config) if line.startswith("parts: "))
    assert "actor.engine fsdp2 (podium.engines.fsdp2:FSDP2Engine)" in line
    assert f"rollout own.py:Echo ({own}, sha256 {SourceFile.read('own.py').sha256[:12]})" in line


def test_stored_sources_stand_in_for_the_files(own: Path) -> None:
    config = resolve(SETTINGS, ["rollout=own.py:Echo"])
    stored = sources_of(config)
    own.write_text(OWN.replace("words", "phrase"))
    assert resolve(yaml.safe_load(to_yaml(config)), sources=stored) == config
    assert resolve(config, ["rollout.words=hi"]).rollout.words == "hi"
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.words'"):
        resolve(yaml.safe_load(to_yaml(config)))


TRACKER = """
from podium.config import TrackerConfig
from podium.observability import Tracker

class Quiet(Tracker):
    class Settings(TrackerConfig):
        times: int = 2
    def log(self, step, metrics): ...
"""


def test_a_config_is_unpickled_where_the_file_of_its_part_does_not_exist(own: Path) -> None:
    own.write_text(TRACKER)
    config = resolve(SETTINGS, ["trainer.trackers=[{name: own.py:Quiet, times: 5}]"])
    own.unlink()
    script = """
import pickle, sys
from podium.parts import TRACKERS
sections = [pickle.load(sys.stdin.buffer).trainer.trackers[0] for _ in range(2)]
assert type(sections[0]) is type(sections[1])
for section in sections:
    part = TRACKERS.resolve(section.name, section.source)
    print(section.times, type(section) is part.Settings, section.model_copy().source == section.source)
"""
    found = subprocess.run(
        [sys.executable, "-c", script], input=pickle.dumps(config) + cloudpickle.dumps(config), capture_output=True, check=True
    )
    assert found.stdout.decode().split() == ["5", "True", "True"] * 2


SOUNDS = PartTable("sound", {"bark": "tests.parts.animals:Dog"})


class Sound(PartSettings):
    loud: bool = False


class Concert(Settings):
    sounds: tuple[Annotated[Sound, PartOf(SOUNDS)], ...] = ()


def test_a_setting_may_be_a_list_of_parts() -> None:
    concert = Concert.model_validate({"sounds": ("bark", {"name": "tests.parts.animals:Dog", "loud": True})})
    assert [(path, table.kind, section.loud) for path, table, section in part_sections(concert)] == [
        ("sounds.0", "sound", False),
        ("sounds.1", "sound", True),
    ]
    assert Concert.model_validate(concert.model_dump()) == concert

"""What settings mean as text: overrides, YAML files, and that every accepted config reads back equal."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.config import read_yaml, resolve, to_yaml, write_value
from podium.config.reading import dump_yaml, load_yaml, read_value
from podium.errors import ConfigError
from podium.trainers import RunDirectory

SETTINGS = {
    "name": "small",
    "model": "char_llama",
    "task": {"train_files": "a.jsonl"},
    "reward": {"function": "r.py:f"},
    "actor": {"optim": {"lr": 1e-3}},
    "trainer": {"total_steps": 3, "prompts_per_step": 8},
}
PLAIN = "${ ${x} \\${x} ${oc.env:HOME} \\ ' \" # : - yes null ~ 007 1:30 1e5 0x1f 2024-01-01 << = [ { 日 % ! &a *a | > --- ..."
ODD = st.sampled_from([*PLAIN.split(), "\n", "\r\n", "\x85", "\u2028", "\ufeff", "\x00", "\x7f", "\t", " ", ": ", "\U0001f600"])
TEXT = st.lists(st.one_of(ODD, st.text(max_size=3)), max_size=4).map("".join)
FILLED = TEXT.filter(bool)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def settings_of_any_text(draw):
    """A run's settings with any text in each setting that takes one, and any JSON where that may stand."""
    return {
        **SETTINGS,
        "description": draw(TEXT),
        "run_root": draw(FILLED),
        "model": {
            "path": draw(FILLED),
            "override_config": draw(st.dictionaries(TEXT, st.one_of(st.booleans(), TEXT), max_size=2)),
        },
        "task": {
            key: draw(st.lists(FILLED, min_size=1, max_size=2)) for key in ("train_files", "validation_files", "held_out_files")
        },
        "reward": {"function": f"{draw(FILLED)}:f", "kwargs": draw(st.dictionaries(TEXT, JSON, max_size=2))},
        "rollout": {"sampling": {"stop": draw(st.lists(FILLED, max_size=3))}},
        "ref": {"model": draw(st.none() | TEXT)},
        "actor": {"optim": {"lr": 1e-3, "clip_grad": draw(st.sampled_from([1.0, math.inf, "inf"]))}},
        "profiler": {
            "save_path": draw(TEXT),
            "finish_command": draw(st.none() | TEXT),
            "tool_config": draw(st.dictionaries(TEXT, JSON)),
        },
    }


@settings(max_examples=settings.default.max_examples // 5)
@given(filled=settings_of_any_text())
def test_every_accepted_config_reads_back_equal_from_config_yaml_and_settings_json(tmp_path_factory, filled):
    config = resolve(filled)
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    run.config.write_text(to_yaml(config), encoding="utf-8")
    run.settings.write(config)
    assert resolve(read_yaml(run.config)) == config
    assert run.settings.read() == config
    json.loads(run.settings.path.read_text(), parse_constant=pytest.fail)


@settings(max_examples=settings.default.max_examples // 2)
@given(value=JSON)
def test_a_value_written_as_an_override_is_read_back(value):
    assert read_value(write_value(value)) == value
    assert load_yaml(dump_yaml([value])) == [value]


@given(text=TEXT)
def test_other_readers_of_yaml_find_the_same_text(text):
    assert yaml.safe_load(dump_yaml({"x": text})) == {"x": text}


TEXTS = "#### yes No on 007 0x1f 1_000 1:30 2024-01-01 ${x} *a &a !x | %x @x None - . e5 日 ="


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, text) for text in (*TEXTS.split(), "# x", "x # y", "a: b", "> a", "- a", "a\tb")],
        *[("null", None), ("~", None), ("true", True), ("False", False), ("12", 12), ("-3", -3), ("0", 0)],
        *[("1e-3", 0.001), ("1e3", 1000.0), (".5", 0.5), ("2.", 2.0), ("-1.5E+2", -150.0)],
        *[("''", ""), ("'null'", "null"), ('"a\\nb"', "a\nb"), ("' a '", " a "), (" a ", "a")],
        *[("[]", []), ("['#', x]", ["#", "x"]), ("[yes, 007, 1e-3]", ["yes", "007", 0.001])],
        ("{a: {b: null}}", {"a": {"b": None}}),
    ],
)
def test_a_value_of_an_override_means(text, value):
    found = read_value(text)
    assert (found, type(found)) == (value, type(value))


UNREADABLE = ["", "  ", "[#]", "[a, b", "[a] # b", "'a' b", "'a", '"', "{x}", "{a: }", "{a: 1, a: 2}", "[*a]", "9" * 5000]


@pytest.mark.parametrize("text", UNREADABLE)
def test_an_override_that_cannot_be_meant_as_it_is_read_is_refused(text):
    with pytest.raises(ConfigError, match=r"^reward\.kwargs\.k: "):
        resolve(SETTINGS, [f"reward.kwargs.k={text}"])


def test_a_setting_that_is_a_text_takes_numbers_and_brackets_as_they_stand():
    overrides = ["name=007", "description=[x] {y", "run_root=runs [lr=1]", "task.train_files=[12a.jsonl]", "ref.model=null"]
    config = resolve(SETTINGS, overrides)
    found = (config.name, config.description, config.run_root, config.task.train_files, config.ref.model)
    assert found == ("007", "[x] {y", "runs [lr=1]", ("12a.jsonl",), None)


@pytest.mark.parametrize("value", [math.nan, math.inf, [1, {"a": -math.inf}], 10**4100])
def test_a_value_that_json_cannot_hold_is_refused(value):
    with pytest.raises(ConfigError, match=r"reward\.kwargs\.x"):
        resolve({**SETTINGS, "reward": {"function": "r.py:f", "kwargs": {"x": value}}})


@pytest.mark.parametrize("override", ["run_root=a\udc80", "reward.kwargs.a\udc80=1", r'rollout.sampling.stop=[a, "\uDC80"]'])
def test_text_that_no_file_can_hold_is_refused(override):
    with pytest.raises(ConfigError, match="a text must be valid Unicode"):
        resolve(SETTINGS, [override])


def test_a_seed_that_torch_does_not_take_is_refused():
    assert resolve(SETTINGS, [f"seed={2**63 - 1}"]).seed == 2**63 - 1
    with pytest.raises(ConfigError, match=r"^seed: input should be less than 9223372036854775808, got"):
        resolve(SETTINGS, [f"seed={2**63}"])


def test_a_limit_may_be_switched_off_by_inf():
    assert resolve(SETTINGS, ["actor.optim.clip_grad=inf", "actor.loss.clip_high=.inf"]).actor.optim.clip_grad == math.inf
    with pytest.raises(ConfigError, match=r"actor\.optim\.eps: input should be a finite number"):
        resolve(SETTINGS, ["actor.optim.eps=.inf"])


def test_a_key_that_a_file_gives_twice_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 1\nactor: {epochs: 1}\nseed: 2\n")
    with pytest.raises(ConfigError, match="the key 'seed' is given twice"):
        read_yaml(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    "text", ["a: &a {b: *a}", "&a [*a]", "a: !!bool x", "a: !!timestamp x", "a: !!set {b}", "a: !!binary aGk="]
)
def test_a_value_that_holds_itself_or_is_of_another_type_is_refused(tmp_path, text):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"c\.yaml cannot be read as YAML: "):
        read_yaml(tmp_path / "c.yaml")


def test_yaml_anchors_and_comments_work_in_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text("a: &x {b: 1}  # once\nc: {<<: *x, d: yes}\n")
    assert read_yaml(tmp_path / "c.yaml") == {"a": {"b": 1}, "c": {"b": 1, "d": "yes"}}

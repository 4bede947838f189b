from __future__ import annotations

import re

import pytest
import yaml

from podium.config import ModelConfig, RunConfig, explain, optimizer_steps_per_step, read_yaml, resolve, rows_per_step, to_yaml
from podium.config import check as check_arithmetic
from podium.errors import ConfigError
from podium.recipes import RECIPES, recipe

SETTINGS = {
    "name": "small",
    "model": "char_llama",
    "task": {"name": "spell_backward"},
    "actor": {"optim": {"lr": 1e-3}, "mini_batch_prompts": 4},
    "rollout": {"sampling": {"n": 4, "max_new_tokens": 8}},
    "trainer": {"total_steps": 3, "prompts_per_step": 8},
}


def test_overrides_reach_their_field_and_the_last_one_wins():
    config = resolve(
        SETTINGS, ["actor.optim.lr=4e-4", "seed=1", "seed=2", "rollout.sampling.stop=['x','y']", "actor.optim.betas=[0.8,0.9]"]
    )
    assert config.actor.optim.lr == 4e-4
    assert config.seed == 2
    assert config.rollout.sampling.stop == ("x", "y")
    assert config.actor.optim.betas == (0.8, 0.9)


def test_model_may_be_a_string():
    assert resolve(SETTINGS, ["model=some/model"]).model.path == "some/model"
    changed = resolve(SETTINGS, ["model.dtype=bfloat16"])
    assert (changed.model.path, changed.model.dtype) == ("char_llama", "bfloat16")
    other = resolve(changed, ["model=other/model", "model.override_config.hidden_size=8"]).model
    assert (other.path, other.dtype, other.override_config) == ("other/model", "float32", {"hidden_size": 8})


def test_yaml_reads_back_equal(tmp_path):
    config = resolve(SETTINGS, ["warmup.targets.copy=0.3"])
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    assert resolve(read_yaml(tmp_path / "c.yaml")) == config


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actr.optim.lr=1", "unknown key 'actr'; did you mean 'actor'?"),
        ("actor.optim.lrr=1", "unknown key 'actor.optim.lrr'; did you mean 'lr'?"),
        ("actor.optim.lr=abc", "actor.optim.lr: input should be a valid number, got 'abc'"),
        ("actor.optim.lr=-1", "actor.optim.lr: input should be greater than 0, got -1"),
        ("trainer.total_steps=1.5", "trainer.total_steps: input should be a valid integer, got 1.5"),
        ("seed=true", "seed: input should be a valid integer, got True"),
        ("seed=-1", "seed: input should be greater than or equal to 0, got -1"),
        ("actor.optim.betas=[1.0,1.0]", "actor.optim.betas.0: input should be less than 1"),
        ("actor.optim.lr=.inf", "actor.optim.lr: input should be a finite number"),
        ("rollout.sampling.temperature=.inf", "rollout.sampling.temperature: input should be a finite number"),
        ("rollout.sampling.stop=['']", "rollout.sampling.stop.0: string should have at least 1 character"),
        ("threads_per_rank=100000000", "threads_per_rank: input should be less than or equal to 1024"),
        ("runtime=rya", "runtime: unknown runtime 'rya'; did you mean 'ray'? Known: auto, inline, ray"),
        ("name=a/b", "name is part of a folder's name"),
        ("actor.kl_loss_type=low_var", "got 'low_var'; did you mean 'low_var_kl'?"),
        ("algorithm.kl_penalty=full", "algorithm.kl_penalty: input should be 'kl', 'k1'"),
        ("actor.loss.clip_c=1", "actor.loss.clip_c: input should be greater than 1, got 1"),
        ("actor.entropy_coeff=-0.1", "actor.entropy_coeff: input should be greater than or equal to 0"),
        ("actor.kl_loss_coef=inf", "actor.kl_loss_coef"),
        ("model.dtype=float16", "model.dtype: float16 needs a scaled loss"),
        ("actor.engine.compute_dtype=float16", "actor.engine.compute_dtype: float16 needs a scaled loss"),
        ("actor.engine.compute_dtype=bf16", "input should be 'bfloat16', got 'bf16'"),
        ("lr=1e-3", "unknown key 'lr'; did you mean 'warmup.optim.lr' or 'actor.optim.lr'?"),
        ("total_steps=5", "unknown key 'total_steps'; did you mean 'trainer.total_steps'?"),
        ("seed", "an override must be key=value, got 'seed'"),
        ("seed=[1", "seed: the value [1 cannot be read"),
    ],
)
def test_bad_overrides_say_what_is_wrong(override, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(SETTINGS, [override])
    assert expected in str(caught.value)


def test_all_bad_keys_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        resolve(SETTINGS, ["sede=1", "trainer.totl_steps=2"])
    assert "'seed'" in str(caught.value)
    assert "'total_steps'" in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"actor": {}, "trainer": {}}])
def test_all_that_is_required_is_named_at_once_with_an_example_that_then_works(settings):
    with pytest.raises(ConfigError) as caught:
        resolve(settings)
    lines = str(caught.value).splitlines()
    required = ["name", "model.path", "task", "actor.optim.lr", "trainer.total_steps", "trainer.prompts_per_step"]
    assert [line.split(": is required and was not given, for example ")[0] for line in lines] == required
    examples = [re.split(r" for |, or ", line.split("for example ")[1])[0] for line in lines]
    config = resolve(settings, examples)
    check_arithmetic(config)
    assert config.trainer.prompts_per_step == config.mini_batch_prompts == 32
    assert optimizer_steps_per_step(config) == 1


def test_a_mini_batch_is_a_whole_step_unless_it_is_given():
    config = resolve(SETTINGS, ["actor.mini_batch_prompts=null"])
    assert config.mini_batch_prompts == 8
    assert "8 prompts / 8 prompts per mini-batch x 1 epoch(s) = 1 optimizer steps per step" in explain(config)
    assert resolve(SETTINGS).mini_batch_prompts == 4


@pytest.mark.parametrize("content", ["[1, 2]", "a: [", "\x00"])
def test_a_file_that_is_not_a_config_is_named(tmp_path, content):
    path = tmp_path / "c.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"c\.yaml"):
        read_yaml(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "nothing.yaml")


def test_arithmetic_by_hand():
    """Field report K3: prompts=8, n=4, mini=4 prompts, 2 ranks -> 32 rows, 2 optimizer steps, 8 rows a rank and step."""
    config = resolve(SETTINGS, ["num_workers=2"])
    assert rows_per_step(config) == 32
    assert optimizer_steps_per_step(config) == 2
    text = "\n".join(explain(config))
    assert "8 prompts x 4 samples = 32 rows per step" in text
    assert "= 2 optimizer steps per step" in text
    assert "16 rows per optimizer step, 8 per rank" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.mini_batch_prompts=3", "8 / 3 leaves 2 prompts over"),
        ("task.num_train=4", "(8) is more than task.num_train (4)"),
        ("actor.engine.max_tokens_per_micro_batch=8", "do not fit"),
        ("rollout.sampling.temperature=0", "greedy samples"),
        ("rollout.sampling.top_k=1", "top_k is 1"),
        ("actor.loss_agg_mode=seq-mean-token-sum-norm", "the longest response: actor.loss_scale_factor=8"),
        ("actor.loss_scale_factor=8", "means nothing in token-mean; use actor.loss_scale_factor=null"),
        ("model.dtype=bfloat16", "(actor.optim.lr=0.001). Use model.dtype=float32"),
        ("actor.kl_loss_coef=0.1", "actor.kl_loss_coef=0.1 has no effect without actor.use_kl_loss=true: set that, or leave"),
        ("actor.kl_loss_type=k3", "actor.kl_loss_type=k3 has no effect"),
        ("algorithm.kl_coef=0.1", "has no effect without algorithm.use_kl_in_reward=true"),
        ("algorithm.kl_penalty=k3", "or leave algorithm.kl_penalty at kl"),
        ("reward.failure_value=-1", "has no effect without reward.on_failure=value"),
        ("call_timeout_s=60", "call_timeout_s=60.0 has no effect without runtime=ray"),
    ],
)
def test_arithmetic_that_cannot_work_is_shown(override, expected):
    with pytest.raises(ConfigError) as caught:
        check_arithmetic(resolve(SETTINGS, [override]))
    assert expected in str(caught.value)


def test_settings_whose_switch_is_on_are_taken():
    switched_on = [
        *("actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.kl_loss_type=k3"),
        *("algorithm.use_kl_in_reward=true", "algorithm.kl_coef=0.1", "algorithm.kl_penalty=k3"),
        *("reward.on_failure=value", "reward.failure_value=-1", "runtime=ray", "call_timeout_s=60"),
    ]
    check_arithmetic(resolve(SETTINGS, switched_on))


def test_every_recipe_passes_with_and_without_its_warm_up():
    for name in RECIPES:
        for overrides in ([], ["warmup.steps=0", "model=other/model"]):
            check_arithmetic(resolve(recipe(name), overrides))


def test_bfloat16_is_refused_only_where_it_is_trained():
    check_arithmetic(resolve(SETTINGS, ["model.dtype=bfloat16"]), is_trained=False)


def test_mixed_precision_is_explained_and_off_by_default():
    assert not any("bfloat16" in line for line in explain(resolve(SETTINGS)))
    config = resolve(SETTINGS, ["actor.engine.compute_dtype=bfloat16"])
    check_arithmetic(config)
    line = "passes of warm-up, actor and reference in bfloat16; parameters, gradient sums and optimizer in float32"
    assert line in explain(config)


def test_a_model_that_moved_is_loaded_in_the_same_way():
    model = ModelConfig(path="a/b", dtype="float64", trust_remote_code=True, override_config={"hidden_size": 8})
    assert model.moved_to("there") == ModelConfig(path="there", dtype="float64", trust_remote_code=True)


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan"])
def test_the_limit_of_a_call_is_a_positive_number(value):
    with pytest.raises(ConfigError, match="call_timeout_s"):
        resolve(SETTINGS, [f"call_timeout_s={value}"])


def test_inline_refuses_more_than_one_worker():
    with pytest.raises(ConfigError, match="use runtime=ray"):
        check_arithmetic(resolve(SETTINGS, ["runtime=inline", "num_workers=2"]))


def test_auto_runtime():
    assert resolve(SETTINGS).runtime_name == "inline"
    assert resolve(SETTINGS, ["num_workers=2"]).runtime_name == "ray"


def test_configs_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        resolve(SETTINGS).seed = 3  # type: ignore[misc]


def test_every_setting_is_documented():
    def undocumented(model, prefix=""):
        for name, field in model.model_fields.items():
            if not field.description:
                yield prefix + name
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                yield from undocumented(field.annotation, f"{prefix}{name}.")

    assert list(undocumented(RunConfig)) == []


def test_the_terms_of_the_loss_are_explained_and_off_by_default():
    plain = resolve(SETTINGS)
    assert not any("KL" in line or "entropy" in line for line in explain(plain))
    full = ["actor.use_kl_loss=true", "actor.entropy_coeff=0.01", "algorithm.use_kl_in_reward=true"]
    config = resolve(SETTINGS, [*full, "actor.kl_loss_type=k3+", "actor.drop_zero_advantage=true", "ref.model=a/b"])
    check_arithmetic(config)
    text = "\n".join(explain(config))
    assert "loss + 0.001 x KL from the reference (k3+)" in text
    assert "loss - 0.01 x entropy" in text
    assert "reward - 0.001 x KL from the reference, summed over the response (kl)" in text
    assert "rows of zero advantage are computed in spite of actor.drop_zero_advantage" in text


def test_dr_grpo_is_three_settings():
    """Liu et al. 2025: no deviation, and a constant divisor."""
    config = resolve(
        SETTINGS,
        [
            "algorithm.adv_estimator.norm_by_std=false",
            "actor.loss_agg_mode=seq-mean-token-sum-norm",
            "actor.loss_scale_factor=8",
        ],
    )
    check_arithmetic(config)
    assert config.actor.loss_scale_factor == 8.0


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["task.train_files=[a.jsonl]"],
            "either a dataset of reasoning-gym (task.name) or your own rows (task.train_files), got both",
        ),
        (["task.name=null"], "got neither"),
        (
            ["task.max_prompt_tokens=9", "task.bad_rows=drop"],
            "task.bad_rows, task.max_prompt_tokens: only for a task with task.train_f",
        ),
        (
            ["task.name=null", "task.train_files=[a.jsonl]", "task.prompt_pattern='(a)'"],
            "task.prompt_pattern: only for a task with task.name",
        ),
        (["reward.kwargs.a=1"], "reward.kwargs are arguments of reward.function, which is not set"),
        (["reward.function=mine.py"], "must be path/to/file.py:function or package.module.function, got 'mine.py'"),
        (["reward.function=:score"], "got ':score'"),
        (["reward.timeout_s=0"], "reward.timeout_s: input should be greater than 0"),
        (["reward.failure_value=.nan"], "reward.failure_value: input should be a finite number"),
        (
            ["reward.failure_value=1e39"],
            "reward.failure_value: is infinite in float32, in which rewards are kept: use a number of at most 3.4e38, got 1e+39",
        ),
        (["reward.max_retries=-1"], "reward.max_retries: input should be greater than or equal to 0, got -1"),
    ],
)
def test_settings_of_a_task_and_a_reward_that_do_not_go_together(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        resolve(SETTINGS, overrides)
    assert expected in str(caught.value)


def test_a_task_of_files_reads_back_equal_and_explains_itself_without_reading_them():
    own = {**SETTINGS, "task": {"train_files": "a.jsonl", "held_out_files": ["b.parquet"]}}
    config = resolve(own, ["reward.function=r.py:f", "reward.kwargs={a: [1, {b: null}]}", "reward.timeout_s=5"])
    assert config.task.train_files == ("a.jsonl",)
    assert resolve(yaml.safe_load(to_yaml(config))) == config
    check_arithmetic(config)
    assert explain(config)[-2].endswith(" prompts")

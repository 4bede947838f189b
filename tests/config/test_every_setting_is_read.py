"""Field report K2: every setting reaches what it is for. verl #5885, #6317, #4773, #5359, #7051, #418, #6016, #6630.

For each leaf of `RunConfig` the table holds a value other than the default, and what the consumers then show that they did not
show before. A leaf without a line fails the test: what a new setting changes is written down here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import pytest

from podium.algorithms import KLTerm
from podium.config import PartSettings, RunConfig, Settings, part_sections, resolve
from tests.config.probes import (
    BASE,
    SETTINGS,
    Probe,
    chat_templates,
    folder,
    group,
    model_loading,
    policy,
    profile,
    profiled_ranks,
    recipe_list,
    scorer,
    step,
    task,
    warm_up,
    whole_run,
    write_files,
)

DIFFERS = object()
"""Something else than before, whatever it is."""


@dataclass(frozen=True)
class Case:
    """`given` these overrides, the leaf set to `value` makes the probe show `shows`; without it, something else in each."""

    value: str
    probe: Probe
    shows: dict[str, object]
    given: tuple[str, ...] = ()


def close(*numbers: float) -> Any:
    return pytest.approx(list(numbers), rel=1e-6)


def loss(**changes: object) -> dict[str, object]:
    """The policy's loss with its defaults but for some."""
    plain = {
        **{"clip_low": 0.2, "clip_high": 0.2, "clip_c": None, "aggregation": {"mode": "token-mean", "scale": None}, "kl": None},
        **{"drop_zero_advantage": False, "entropy_coeff": 0.0, "calculate_entropy": False},
    }
    return {"loss": plain | changes}


def adamw(**changes: object) -> dict[str, object]:
    return {"adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0} | changes}


def optim_cases(section: str, probe: Probe, *given: str) -> dict[str, Case]:
    """Four optimizer steps in all, of which three are looked at."""
    linear = (f"{section}.schedule=linear", *given)
    return {
        f"{section}.lr": Case("0.01", probe, {"lrs": close(0.01, 0.01, 0.01)}, given),
        f"{section}.betas": Case("[0.8,0.9]", probe, adamw(betas=(0.8, 0.9)), given),
        f"{section}.eps": Case("0.1", probe, adamw(eps=0.1), given),
        f"{section}.weight_decay": Case("0.5", probe, adamw(weight_decay=0.5), given),
        f"{section}.clip_grad": Case("0.001", probe, {"first_moment": pytest.approx(1e-4, rel=1e-3)}, given),
        f"{section}.warmup_steps": Case("2", probe, {"lrs": close(0.0005, 0.001, 0.001)}, given),
        f"{section}.schedule": Case("linear", probe, {"lrs": close(0.001, 0.002 / 3, 0.001 / 3)}, given),
        f"{section}.min_lr_ratio": Case("0.5", probe, {"lrs": close(0.001, 0.0025 / 3, 0.002 / 3)}, linear),
    }


FILES = ("task.name=null", "task.num_train=null", "task.num_validation=null", "task.num_held_out=null")
OWN = (*FILES, "task.train_files=train.jsonl", "task.validation_files=validation.jsonl", "task.held_out_files=held_out.jsonl")
FOLDER = ("model=model",)
KL_LOSS = ("actor.use_kl_loss=true",)
KL_REWARD = ("algorithm.use_kl_in_reward=true", "ref.model=model", "algorithm.adv_estimator.norm_by_std=false")
WARM = ("warmup.steps=4", "warmup.optim.lr=0.001")
ONE_STEP = ("warmup.steps=1", "trainer.total_steps=1")
SLOW = ("reward.function=reward.py:slow", "reward.num_workers=1", "reward.on_failure=drop")
PROFILE = ("profiler.tool=torch", "profiler.steps=[1]", "trainer.val_freq=0")
FUNCTION = ("reward.function=reward.py:constant", "reward.num_workers=1")

CASES: dict[str, Case] = {
    "name": Case("other", folder, {"name": "other"}),
    "description": Case("what it shows", recipe_list, {"output": "mine\n    what it shows\n"}),
    "run_root": Case("elsewhere", folder, {"root": "elsewhere"}),
    "seed": Case("7", policy, {"prompts": DIFFERS, "weights": DIFFERS, "seed": 7}),
    "runtime": Case("ray", group, {"runtime": "ray"}),
    "num_workers": Case("3", group, {"ranks": 3, "runtime": "ray", "session.num_ranks": 3}),
    "nodes": Case("2", group, {"on_nodes": (2, 2)}, ("num_workers=4",)),
    "use_gpu": Case("false", group, {"use_gpu": False}),
    "start_timeout_s": Case("600", group, {"start_timeout_s": 600.0}, ("runtime=ray",)),
    "worker_env": Case(
        "{NCCL_DEBUG: INFO, LEVEL: 1}", group, {"worker_env": {"NCCL_DEBUG": "INFO", "LEVEL": "1"}}, ("runtime=ray",)
    ),
    "threads_per_rank": Case("2", group, {"threads_per_rank": 2}),
    "call_timeout_s": Case("60", group, {"call_timeout_s": 60.0}, ("runtime=ray",)),
    # model
    "model.path": Case("start", policy, {"loaded_from": "start", "weights": DIFFERS}),
    "model.override_config": Case("{hidden_size: 24}", policy, {"hidden_size": 24}),
    "model.dtype": Case("float64", policy, {"dtype": "torch.float64"}),
    "model.trust_remote_code": Case(
        "true", model_loading, {"trust": dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"), True)}, FOLDER
    ),
    # task
    "task.name": Case("chain_sum", task, {"source": "chain_sum", "first": DIFFERS}),
    "task.params": Case("{min_word_len: 5, max_word_len: 5}", task, {"answer_lengths": {5}}),
    "task.prompt_pattern": Case("': (\\w+)$'", task, {"first": DIFFERS}),
    "task.few_shot": Case("2", task, {"lines": 3}),
    "task.train_files": Case("[train.jsonl,validation.jsonl]", task, {"sizes": [16, 2, 2]}, OWN[:5]),
    "task.validation_files": Case("validation.jsonl", task, {"sizes": [15, 4, 1]}, OWN[:5]),
    "task.held_out_files": Case("held_out.jsonl", task, {"sizes": [15, 1, 4]}, OWN[:5]),
    "task.bad_rows": Case("drop", task, {"sizes": [16, 4, 4]}, (*OWN, "task.train_files=bad.jsonl")),
    "task.max_prompt_tokens": Case("14", task, {"sizes": [15, 3, 3]}, (*OWN, "task.bad_rows=drop")),
    "task.chat_template": Case("never", chat_templates, {"asked": {"never"}}, (*FOLDER, *ONE_STEP)),
    "task.num_train": Case("9", task, {"sizes": [9, 4, 4]}),
    "task.num_validation": Case("5", task, {"sizes": [16, 5, 4]}),
    "task.num_held_out": Case("6", task, {"sizes": [16, 4, 6]}),
    "task.seed": Case("3", task, {"first": DIFFERS}),
    # reward
    "reward.function": Case("reward.py:constant", step, {"rewards": [0.5] * 8}, FUNCTION[1:]),
    "reward.kwargs": Case("{value: 0.25}", scorer, {"rewards": [0.25, 0.25]}, FUNCTION),
    "reward.num_workers": Case("3", scorer, {"processes": 3}, FUNCTION),
    "reward.timeout_s": Case(
        "0.3",
        scorer,
        {"rewards": [None, 1.0]},
        SLOW,
    ),
    "reward.max_retries": Case("2", scorer, {"retries": 2.0}, ("reward.on_failure=drop",)),
    "reward.on_failure": Case("drop", scorer, {"rewards": [None, 1.0]}),
    "reward.failure_value": Case("-2", scorer, {"rewards": [-2.0, 1.0]}, ("reward.on_failure=value",)),
    # warmup
    "warmup.steps": Case("3", warm_up, {"steps": (3, 3)}),
    "warmup.batch_rows": Case("5", warm_up, {"rows": 5}, WARM),
    "warmup.targets": Case("{answer: 1, copy: 1e9}", warm_up, {"targets": DIFFERS}, WARM),
    "warmup.dropout": Case("false", warm_up, {"is_noisy": False}, WARM),
    **optim_cases("warmup.optim", warm_up, *WARM),
    # actor
    **optim_cases("actor.optim", policy),
    "actor.engine.max_tokens_per_micro_batch": Case("80", policy, {"micro_batches": 4}),
    "actor.engine.compute_dtype": Case("bfloat16", policy, {"computed_in": {"torch.bfloat16"}}),
    "actor.engine.layout": Case("shared", policy, {"layouts": {"shared"}}),
    "actor.mini_batch_prompts": Case("4", step, {"optimizer_steps": 1}),
    "actor.epochs": Case("3", step, {"optimizer_steps": 6}),
    "actor.loss.clip_low": Case("0.1", policy, loss(clip_low=0.1)),
    "actor.loss.clip_high": Case("0.3", policy, loss(clip_high=0.3)),
    "actor.loss.clip_c": Case("3", policy, loss(clip_c=3.0)),
    "actor.loss_agg_mode": Case("seq-mean-token-sum", policy, loss(aggregation={"mode": "seq-mean-token-sum", "scale": None})),
    "actor.loss_scale_factor": Case(
        "9",
        policy,
        loss(aggregation={"mode": "seq-mean-token-sum-norm", "scale": 9.0}),
        ("actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_scale_factor=4"),
    ),
    "actor.entropy_coeff": Case("0.5", policy, loss(entropy_coeff=0.5)),
    "actor.calculate_entropy": Case("true", policy, loss(calculate_entropy=True)),
    "actor.use_kl_loss": Case("true", policy, {**loss(kl=KLTerm(0.001, "low_var_kl")), "role": "actor_rollout_ref"}),
    "actor.kl_loss_coef": Case("0.5", policy, loss(kl=KLTerm(0.5, "low_var_kl")), KL_LOSS),
    "actor.kl_loss_type": Case("k2", policy, loss(kl=KLTerm(0.001, "k2")), KL_LOSS),
    "actor.drop_zero_advantage": Case("true", policy, loss(drop_zero_advantage=True)),
    "actor.dropout": Case("true", policy, {"is_noisy": True}),
    "actor.recompute_old_log_probs": Case("false", step, {"calls": ["generate_sequences", "update_actor"]}),
    # rollout
    "rollout.sampling.max_new_tokens": Case("6", step, {"longest": 6}),
    "rollout.sampling.temperature": Case(
        "0.5",
        step,
        {"temperatures": {"generate_sequences": None, "compute_log_prob": 0.5, "update_actor": 0.5}, "responses": DIFFERS},
    ),
    "rollout.sampling.top_p": Case("0.1", step, {"responses": DIFFERS}),
    "rollout.sampling.top_k": Case("2", step, {"responses": DIFFERS}),
    "rollout.sampling.stop": Case("[a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z]", step, {"responses": DIFFERS}),
    "rollout.sampling.n": Case("3", step, {"rows": 12}),
    "rollout.max_rows": Case("3", policy, {"decoded_at_once": [2, 2]}),
    # algorithm, ref
    "algorithm.adv_estimator.norm_by_std": Case("false", step, {"advantages": DIFFERS}, KL_REWARD[:2]),
    "algorithm.use_kl_in_reward": Case("true", step, {"reward_kl": DIFFERS, "calls": DIFFERS}),
    "algorithm.kl_penalty": Case("k2", step, {"reward_kl": DIFFERS, "advantages": DIFFERS}, KL_REWARD),
    "algorithm.kl_coef": Case("0.5", step, {"advantages": DIFFERS}, KL_REWARD),
    "ref.model": Case("model", policy, {"ref.hidden_size": 8}, KL_LOSS),
    # trainer
    "trainer.total_steps": Case("3", policy, {"steps": (3, 6)}),
    "trainer.prompts_per_step": Case("8", step, {"rows": 16, "optimizer_steps": 4}),
    "trainer.val_freq": Case("1", whole_run, {"validated": [0, 1, 2]}),
    "trainer.save_freq": Case("1", whole_run, {"saved": [0, 1, 2]}, ("trainer.keep_checkpoints=9",)),
    "trainer.keep_checkpoints": Case("1", whole_run, {"saved": [2]}),
    "trainer.samples_per_step": Case("1", whole_run, {"samples": 1}),
    "trainer.trackers": Case("[tracker.py:Mine]", whole_run, {"files": ["mine.txt"]}),
    "trainer.curve": Case("false", whole_run, {"files": []}, ("trainer.curve=true",)),
    # profiler
    "profiler.tool": Case("torch", profile, {"files": ["step-1-rank-0.json.gz"]}, PROFILE[1:]),
    "profiler.steps": Case("[2]", profile, {"files": ["step-2-rank-0.json.gz"]}, PROFILE),
    "profiler.all_ranks": Case("true", profiled_ranks, {"ranks": [0, 1, 2]}, PROFILE),
    "profiler.ranks": Case("[1,2]", profiled_ranks, {"ranks": [1, 2]}, PROFILE),
    "profiler.save_path": Case("elsewhere", profile, {"folder": "elsewhere"}, PROFILE),
    "profiler.tool_config": Case("{record_shapes: true}", profile, {"has_shapes": True}, PROFILE),
    "profiler.finish_command": Case("touch done", profile, {"files": ["done", "step-1-rank-0.json.gz"]}, PROFILE),
}

FURTHER: dict[str, Case] = {
    "seed": Case("7", warm_up, {"prompts": DIFFERS}, WARM),
    "runtime": Case("inline", group, {"runtime": "inline", "call_timeout_s": None}, ("runtime=ray",)),
    "model.path": Case("start", warm_up, {"loaded_from": "start"}, WARM),
    "reward.function": Case("reward.py:constant", scorer, {"rewards": [0.5, 0.5]}, ("reward.on_failure=drop", FUNCTION[1])),
    "actor.engine.max_tokens_per_micro_batch": Case("80", warm_up, {"micro_batches": 4}, WARM),
    "actor.engine.compute_dtype": Case("bfloat16", warm_up, {"computed_in": {"torch.bfloat16"}}, WARM),
    "actor.engine.layout": Case("shared", warm_up, {"layouts": {"shared"}}, WARM),
    "actor.use_kl_loss": Case("true", step, {"calls": DIFFERS}),
}
"""The same for settings that have a second consumer."""

ONE_VALUE = {"actor.engine.name", "actor.loss.name", "algorithm.adv_estimator.name", "rollout.name", "trainer.name"}
"""Names of parts: tests/parts, tests/config/test_parts.py and tests/trainers/test_own_parts.py show what they change."""


def leaves(model: type[Settings], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and field of every setting; of parts, those of the default ones."""
    for name, field in model.model_fields.items():
        kind = type(field.default) if isinstance(field.default, PartSettings) else field.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            yield from leaves(kind, f"{prefix}{name}.")
        else:
            assert not any(isinstance(arg, type) and issubclass(arg, Settings) for arg in get_args(kind)), (
                f"{prefix}{name} may hold a section: teach this walk to go into it"
            )
            yield f"{prefix}{name}", field


LEAVES = dict(leaves(RunConfig))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    where = tmp_path_factory.mktemp("settings")
    write_files(where)
    return where


def test_every_setting_has_a_line():
    names = {f"{path}.name" for path, _, _ in part_sections(BASE)}
    assert {path for path, field in LEAVES.items() if _has_one_value(field.annotation)} == ONE_VALUE - names
    assert CASES.keys() | ONE_VALUE == LEAVES.keys()
    assert FURTHER.keys() <= CASES.keys()


@pytest.mark.parametrize(
    ("path", "case"),
    [pytest.param(*line, id=f"{line[0]}-{line[1].probe.__name__}") for line in (*CASES.items(), *FURTHER.items())],
)
def test_a_setting_changes_what_it_is_for(path, case, files, monkeypatch):
    monkeypatch.chdir(files)
    before, after = resolve(SETTINGS, case.given), resolve(SETTINGS, [*case.given, f"{path}={case.value}"])
    assert _value(after, path) not in (_value(before, path), LEAVES[path].default)
    shown_before, shown = case.probe(before), case.probe(after)
    for name, value in case.shows.items():
        assert shown[name] != shown_before.get(name), f"{name} is the same with and without {path}={case.value}"
        assert value is DIFFERS or shown[name] == value


def _has_one_value(kind: Any) -> bool:
    return get_origin(kind) is Literal and len(get_args(kind)) == 1


def _value(config: RunConfig, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value

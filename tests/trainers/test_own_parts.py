"""Estimators and policy losses of a user's own file, and those of the tables, chosen by one setting in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from podium.config import resolve
from podium.errors import ConfigError, DataError
from podium.protocol import DataProto
from podium.protocol.jagged import jagged, parts
from podium.single_controller import DataProtoFuture
from podium.trainers.preflight import prepare
from podium.trainers.steps import advantage_estimator, with_advantages
from podium.workers import policy_loss
from tests.trainers.builders import from_base, rows, small_config, train

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")
OWN = Path(__file__).parent / "own_parts.py"
SHORT = ("trainer.total_steps=1", "task.num_held_out=4", "task.num_validation=4", "actor.recompute_old_log_probs=true")


def test_estimators_and_losses_of_the_tables_and_of_a_file_train(base, tmp_path):
    """At the first step r = 1, so that the unclipped loss equals the clipped one, and REINFORCE differs in value alone."""
    plain = rows(train(from_base(tmp_path / "plain", base, *SHORT, "actor.mini_batch_prompts=8")))[1]
    assert plain["actor/grad_norm"] > 0
    norms = {}
    for loss in (f"{OWN}:Unclipped", "reinforce"):
        found = rows(train(from_base(tmp_path / "loss", base, *SHORT, "actor.mini_batch_prompts=8", f"actor.loss={loss}")))[1]
        norms[loss] = found["actor/grad_norm"]
        assert "actor/pg_clipfrac" not in found
    assert list(norms.values()) == pytest.approx([plain["actor/grad_norm"]] * 2, rel=1e-5)
    for estimator in ("rloo", f"{OWN}:Centred", f"{OWN}:RewardToGo"):
        found = rows(train(from_base(tmp_path / "estimator", base, *SHORT, f"algorithm.adv_estimator={estimator}")))[1]
        assert found["actor/grad_norm"] > 0
        assert found["actor/grad_norm"] != plain["actor/grad_norm"]


def test_settings_of_own_parts_reach_them(tmp_path):
    overrides = (f"actor.loss={OWN}:Unclipped", "actor.loss.factor=3", f"algorithm.adv_estimator={OWN}:Centred")
    config = small_config(tmp_path, *overrides, "algorithm.adv_estimator.baseline=0.25")
    assert policy_loss(config.actor).surrogate.settings.factor == 3.0
    assert advantage_estimator(config.algorithm).settings.baseline == 0.25


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.adv_estimator=rlo", "unknown advantage estimator 'rlo'; did you mean 'rloo'?"),
        ("actor.loss=ppo_clipp", "unknown policy loss 'ppo_clipp'; did you mean 'ppo_clip'?"),
        ("trainer.name=pppo", "unknown trainer 'pppo'; did you mean 'ppo'?"),
        ("actor.loss.clip_hihg=0.3", "unknown key 'actor.loss.clip_hihg'; did you mean 'clip_high'?"),
        (
            "algorithm.adv_estimator.norm_by_sdt=false",
            "unknown key 'algorithm.adv_estimator.norm_by_sdt'; did you mean 'norm_by_std'?",
        ),
        (f"algorithm.adv_estimator={OWN}:Centered", "did you mean 'Centred'?"),
        (f"algorithm.adv_estimator={OWN}:Unclipped", "must be a subclass of podium.algorithms.AdvantageEstimator"),
        ("actor.clip_ratio_high=0.28", "unknown key 'actor.clip_ratio_high': it is called 'actor.loss.clip_high' now"),
        ("algorithm.norm_adv_by_std_in_grpo=false", "it is called 'algorithm.adv_estimator.norm_by_std' now"),
    ],
)
def test_a_wrong_name_or_key_is_answered_before_the_start_with_the_right_one(override, expected, tmp_path):
    with pytest.raises(ConfigError) as caught:
        prepare(small_config(tmp_path, override))
    assert expected in str(caught.value)


# -- what a step gives an estimator -----------------------------------------------------------------------------------


def scored(rewards: list[float], mask: list[list[int]]) -> DataProtoFuture:
    offsets = torch.tensor([0, *torch.tensor([len(row) for row in mask]).cumsum(0).tolist()])
    flat = torch.tensor([item for row in mask for item in row])
    columns = {name: jagged(flat, offsets) for name in ("responses", "response_mask")}
    columns |= {name: jagged(flat * value, offsets) for name, value in {"old_log_probs": 0.5, "ref_log_prob": 0.25}.items()}
    columns |= {"rewards": torch.tensor(rewards), "is_scored": ~torch.tensor(rewards).isnan()}
    return DataProtoFuture.of(DataProto(columns, {"uid": ["a"] * len(rewards)}))


def test_an_estimator_of_tokens_gets_the_reward_at_the_last_token_that_counts():
    """Rewards 1, 2, none and 3 on masks 110, 01, 1 and 00: the reward to go is the reward up to that token, and 0 behind it."""
    config = resolve(small_config(Path(), f"algorithm.adv_estimator={OWN}:RewardToGo"))
    batch = scored([1.0, 2.0, float("nan"), 3.0], [[1, 1, 0], [0, 1], [1], [0, 0]])
    found = with_advantages(batch, config.algorithm, advantage_estimator(config.algorithm)).get()
    assert [row.tolist() for row in found.batch["advantages"].unbind()] == [[1.0, 1.0, 0.0], [2.0, 2.0], [0.0], [0.0, 0.0]]
    assert parts(found.batch["returns"])[0].tolist() == parts(found.batch["advantages"])[0].tolist()
    assert parts(found.batch["response_mask"])[0].tolist() == [1, 1, 0, 0, 1, 0, 0, 0]


def test_the_kl_penalty_of_an_estimator_of_tokens_is_taken_at_each_token():
    """k1 is 0.25 at each of two tokens, times 2: the rewards are -0.5 and 1 - 0.5, and to go 0 and 0.5."""
    settings = ("algorithm.use_kl_in_reward=true", "algorithm.kl_coef=2.0")
    config = small_config(Path(), f"algorithm.adv_estimator={OWN}:RewardToGo", *settings)
    found = with_advantages(scored([1.0], [[1, 1]]), config.algorithm, advantage_estimator(config.algorithm)).get()
    assert parts(found.batch["advantages"])[0].tolist() == [0.0, 0.5]
    assert found.meta_info["kl_metrics"].to_floats() == {"actor/reward_kl_penalty": 0.25}


@pytest.mark.parametrize(
    ("value", "expected"),
    [("Advantages(torch.zeros(3))", r"must return advantages of shape \[2\], one for each row, got \[3\]"),
     ("Advantages(rows.rewards / 0)", "must return finite advantages, got inf for row 0"),
     ("rows.rewards", r"must return Advantages\(advantages\), got a Tensor"),
     ("Advantages(rows.rewards, rows.rewards)", "returned returns, but its gives_returns is False: change one")],
)  # fmt: skip
def test_an_estimator_that_returns_nonsense_is_named(value, expected, tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(
        "import torch\nfrom podium.algorithms import AdvantageEstimator, Advantages\nclass Wrong(AdvantageEstimator):\n"
        f"    def __call__(self, rows):\n        return {value}\n"
    )
    config = small_config(tmp_path, f"algorithm.adv_estimator={path}:Wrong")
    with pytest.raises(DataError, match=f"Wrong {expected}"):
        with_advantages(scored([1.0, 2.0], [[1], [1]]), config.algorithm, advantage_estimator(config.algorithm))


def test_columns_and_outputs_that_nothing_makes_are_errors_before_the_start(tmp_path):
    path = tmp_path / "asking.py"
    path.write_text(
        "from podium.algorithms import Advantages, AdvantageEstimator, Reinforce\n"
        "class Outputs(Reinforce):\n    outputs = ('entropy',)\n"
        "class Columns(AdvantageEstimator):\n    reads = ('value',)\n"
        "    def __call__(self, rows):\n        return Advantages(rows.rewards)\n"
    )
    with pytest.raises(ConfigError, match=r"asks for the output 'entropy' of the model; did you mean 'entropies'\?"):
        prepare(small_config(tmp_path, f"actor.loss={path}:Outputs"))
    with pytest.raises(ConfigError, match=r"advantages reads the column 'value', .*algorithm\.adv_estimator=.*:Columns"):
        prepare(small_config(tmp_path, f"algorithm.adv_estimator={path}:Columns"))

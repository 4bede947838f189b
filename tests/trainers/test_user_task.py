"""A user's own rows and reward in a run: checked before anything starts, and what a failed reward does to the update."""

from __future__ import annotations

import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from podium.cli import training
from podium.config import ModelConfig, RunConfig, resolve
from podium.errors import ConfigError, RewardError, TaskError, WorkerError
from podium.models import load_model, load_tokenizer, save_model
from podium.protocol import DataProto, jagged_from_rows, object_column
from podium.single_controller import DataProtoFuture, Init, ResourcePool, WorkerGroup
from podium.tasks import Scorer, reasoning_gym, task_fingerprint
from podium.trainers import steps
from podium.trainers.ppo import policy_spec
from podium.trainers.preflight import prepare
from podium.workers import ActorRolloutRefWorker
from tests.tasks.builders import Rows, reward_file, sums, verl_row, write_rows
from tests.trainers.builders import rows, small_config, train

SETTINGS = {
    "name": "mine",
    "threads_per_rank": 1,
    "model": "char_llama",
    "task": {"train_files": []},
    "actor": {"optim": {"lr": 1e-3}, "mini_batch_prompts": 2, "engine": {"max_tokens_per_micro_batch": 2000}},
    "rollout": {"sampling": {"n": 4, "max_new_tokens": 6}},
    "trainer": {"total_steps": 1, "prompts_per_step": 4, "val_freq": 1, "trackers": [], "curve": False},
}


def config_of(tmp_path, data: list, *overrides: str) -> RunConfig:
    path = write_rows(tmp_path / "mine.jsonl", data)
    return resolve(SETTINGS, [f"task.train_files=[{path}]", f"run_root={tmp_path / 'runs'}", *overrides])


# -- before anything starts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "overrides", "error", "expected"),
    [
        (sums(20), ["trainer.prompts_per_step=18"], ConfigError, "(18) is more than the 16 training problems"),
        (sums(20), ["warmup.steps=1", "warmup.batch_rows=17"], ConfigError, "(17) is more than the 16 training problems"),
        (sums(20), ["task.max_prompt_tokens=4"], TaskError, "20 of 20 rows do not fit"),
        (sums(20), ["task.chat_template=always"], ConfigError, "the tokenizer of char_llama has no chat template"),
        (sums(20), ["actor.engine.max_tokens_per_micro_batch=10"], ConfigError, "task.max_prompt_tokens with"),
        (
            list(map(verl_row, range(20))),
            [],
            TaskError,
            "20 of 20 rows do not fit, all for one reason: a prompt of messages needs a chat template",
        ),
        ([*sums(20), {"prompt": "p", "answer": ["a"]}], [], TaskError, "row 21: the ground truth ['a'] is not text or a number"),
        (sums(20), ["reward.function=json.dumps"], ConfigError, "cannot be called with the keyword arguments"),
        (sums(20), ["reward.function=no/such.py:score"], ConfigError, "no such file: no/such.py"),
        (sums(20), ["reward.function=json.dumbs"], ConfigError, "json has no function 'dumbs'; did you mean 'dumps'?"),
    ],
)
def test_preflight(tmp_path, data, overrides, error, expected):
    with pytest.raises(error) as caught:
        prepare(config_of(tmp_path, data, *overrides))
    assert expected in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_prompts_are_counted_as_the_policy_sees_them(tmp_path):
    """The template's own text counts against task.max_prompt_tokens."""
    folder = tmp_path / "chat"
    tokenizer = load_tokenizer(ModelConfig(path="char_llama"))
    tokenizer.chat_template = "{{ messages[0].content }} Answer:"
    tokenizer.save_pretrained(folder)
    save_model(load_model(ModelConfig(path="char_llama"), seed=0), str(folder))
    prepare(config_of(tmp_path, sums(9), f"model={folder}", "trainer.prompts_per_step=4", "task.max_prompt_tokens=12"))
    with pytest.raises(TaskError, match=r"the prompt has 12 tokens, task\.max_prompt_tokens is 11"):
        prepare(config_of(tmp_path, sums(9), f"model={folder}", "task.max_prompt_tokens=11"))


def test_remarks_about_the_rows_are_logged_once_a_run(tmp_path, caplog):
    """Not again when it goes on or is scored: two lines above the output of every command."""
    config = config_of(tmp_path, [*sums(30), *sums(1)])
    prepare(config)
    assert caplog.text.count("1 prompts of the train rows occur more than once") == 1
    caplog.clear()
    prepare(config, is_new=False)
    prepare(config, is_trained=False)
    assert caplog.text == ""


def test_problems_of_one_uid_in_a_step_are_refused(tmp_path):
    """A task of one's own may name two problems alike: their samples would be one group."""
    config, task = config_of(tmp_path, sums(20)), Rows(4)
    task.train = (*task.train[:3], task.train[0])
    init = Init(ActorRolloutRefWorker, policy_spec(config, config.model), "rollout")
    with WorkerGroup(ResourcePool([1]), init, runtime="inline", threads_per_rank=1) as group:
        prompts = steps.prompts(task.train, load_tokenizer(config.model), step=1, chat_template="auto")
        with pytest.raises(WorkerError, match="uid 'u0' is on 2 prompts"):
            group.call.generate_sequences(prompts).get()


# -- a failed reward and the update -------------------------------------------------------------------------------------


def scored_batch(tmp_path, policy: str, responses: list[str]) -> DataProto:
    """One group through the steps `score` and `with_advantages`."""
    function = reward_file(
        tmp_path,
        "def score(data_source, solution_str, ground_truth, extra_info): return {'score': float(solution_str), 'digits': 1}",
    )
    config = config_of(
        tmp_path,
        sums(20),
        *(f"reward.function={function}", f"reward.on_failure={policy}", "reward.failure_value=-1"),
        *("trainer.prompts_per_step=1", "actor.mini_batch_prompts=1"),
    )
    tokenizer, task = load_tokenizer(config.model), Rows(1)
    tokens = [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in responses]
    batch = DataProto(
        {"responses": jagged_from_rows(tokens), "response_mask": jagged_from_rows([torch.ones_like(row) for row in tokens])},
        {"uid": ["u0"] * len(responses), "problem": object_column(list(task.train) * len(responses)), "response": responses},
    )
    with Scorer(task, config.reward) as scorer:
        scored = steps.score.on(DataProtoFuture.of(batch), scorer)
        return steps.with_advantages(scored, config.algorithm, steps.advantage_estimator(config.algorithm)).get()


def by_row(batch: DataProto, column: str) -> list[list[float]]:
    return [row.tolist() for row in batch.batch[column].unbind()]


def test_drop_takes_a_row_out_of_its_groups_statistics_and_out_of_the_loss(tmp_path):
    """Group rewards [1, failed, 0, 1]; statistics use three rows, the fourth has a zero mask."""
    batch = scored_batch(tmp_path, "drop", ["1", "oops", "0", "1"])
    deviation = math.sqrt(((1 / 3) ** 2 * 2 + (2 / 3) ** 2) / 2)  # unbiased, of 1, 0, 1
    high, low = (1 / 3) / (deviation + 1e-6), (-2 / 3) / (deviation + 1e-6)
    assert batch.batch["advantages"].tolist() == pytest.approx([high, 0.0, low, high])
    assert by_row(batch, "response_mask") == [[1], [0] * 4, [1], [1]]
    assert batch.batch["is_scored"].tolist() == [True, False, True, True]
    assert math.isnan(batch.batch["rewards"][1])
    assert batch.meta_info["reward_metrics"].to_floats() == {"reward/failed": 1.0, "reward/digits/mean": 1.0}


def test_value_keeps_the_row_with_its_value(tmp_path):
    batch = scored_batch(tmp_path, "value", ["1", "oops", "0", "1"])
    assert batch.batch["rewards"].tolist() == [1.0, -1.0, 0.0, 1.0]
    assert by_row(batch, "response_mask") == [[1], [1] * 4, [1], [1]]
    assert batch.batch["advantages"][1] < batch.batch["advantages"][2] < 0


@pytest.mark.parametrize("policy", ["drop", "value"])
def test_a_batch_in_which_nothing_can_be_scored_ends_the_run(tmp_path, policy):
    with pytest.raises(RewardError, match="all 3 responses could not be scored"):
        scored_batch(tmp_path, policy, ["a", "b", "c"])


# -- whole runs ---------------------------------------------------------------------------------------------------------

FLAKY = """
def score(data_source, solution_str, ground_truth, extra_info, *, scale):
    print("scored", repr(solution_str))
    if len(solution_str) % 2:
        raise ValueError("odd")
    return {"score": scale * (solution_str.count("1") - len(solution_str)), "ones": solution_str.count("1")}
"""


def test_a_run_on_own_rows_with_own_reward_and_dropped_rows(tmp_path, capfd, caplog):
    """Partial groups are trained on by 'drop', and reported."""
    function = reward_file(tmp_path, FLAKY)
    config = config_of(
        tmp_path,
        sums(30),
        *(f"reward.function={function}", "reward.kwargs.scale=0.5", "reward.on_failure=drop", "trainer.total_steps=2"),
        *("warmup.steps=3", "warmup.batch_rows=8", "trainer.samples_per_step=4"),
    )
    directory = train(config)
    steps = rows(directory)
    assert all(0 < row["reward/failed"] < 16 and 0 < row["reward/incomplete_groups"] <= 4 for row in steps[1:])
    assert all(row["critic/rewards/mean"] < 0 and "reward/ones/mean" in row and "val/score/mean" in row for row in steps[1:])
    assert all(math.isfinite(row["actor/pg_loss"]) and math.isfinite(row["actor/grad_norm"]) for row in steps[1:])
    samples = [json.loads(line) for line in (directory.path / "samples.jsonl").read_text().splitlines()]
    for sample in samples:  # every response can be traced, and a failed one is null, not zero
        assert (sample["reward"] is None) == bool(len(sample["response"]) % 2)
        assert sample["uid"].startswith("mine.jsonl:")
    assert {sample["reward"] is None for sample in samples} == {True, False}
    assert "scored '" in (directory.path / "reward.log").read_text()
    assert "scored '" not in "".join(capfd.readouterr())
    assert "responses could not be scored" in caplog.text
    assert directory.read_report()["after"]["failed"] > 0


def test_a_run_stops_at_a_reward_that_fails_by_default(tmp_path):
    odd_answers_are_fine = FLAKY.replace("if len(", "if solution_str != ground_truth and len(")
    config = config_of(
        tmp_path, sums(30), f"reward.function={reward_file(tmp_path, odd_answers_are_fine)}", "reward.kwargs.scale=1"
    )
    with pytest.raises(RewardError, match=r"the reward raised ValueError: odd on row \d+ \(uid mine\.jsonl:\d+, response '"):
        train(config)


def test_a_run_on_conversations_with_a_chat_model(tmp_path):
    """verl's columns through a tokenizer with a chat template: warm-up, RL, and the model keeps its template."""
    folder = tmp_path / "chat"
    tokenizer = load_tokenizer(ModelConfig(path="char_llama"))
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    tokenizer.save_pretrained(folder)
    save_model(load_model(ModelConfig(path="char_llama"), seed=0), str(folder))
    config = config_of(
        tmp_path,
        list(map(verl_row, range(30))),
        *(f"model={folder}", "warmup.steps=2", "warmup.batch_rows=8", "warmup.targets={answer: 1, copy: 1}"),
    )
    directory = train(config)
    assert [row["step"] for row in rows(directory)] == [0, 1]
    assert AutoTokenizer.from_pretrained(directory.hf).chat_template == tokenizer.chat_template
    sample = json.loads((directory.path / "samples.jsonl").read_text().splitlines()[0])
    assert sample["prompt"].startswith("How much is ")


def test_a_prompt_that_spells_a_special_token_is_a_warning_with_its_row(tmp_path, caplog):
    prepare(config_of(tmp_path, [*sums(20), {"prompt": "<bos>1+2=", "answer": "3"}]))
    assert "1 of 21 prompts spell special tokens of the tokenizer" in caplog.text
    assert "(the first: mine.jsonl:21, '<bos>'); a second '<bos>' at the beginning is left out" in caplog.text


def test_a_dataset_without_right_answers_cannot_teach_them(tmp_path, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "RUNS_IN_THE_DRIVER", {"boxnet"})  # a process takes 3 s
    task = {"name": "boxnet", "num_train": 8, "num_validation": 2, "num_held_out": 2}
    model = {"path": "char_llama", "override_config": {"max_position_embeddings": 8000}}
    settings = {**SETTINGS, "task": task, "model": model, "actor": {"optim": {"lr": 1e-3}, "mini_batch_prompts": 2}}
    with pytest.raises(ConfigError, match=r"warmup\.targets has answer, but boxnet does not give right answers"):
        prepare(resolve(settings, ["warmup.steps=1", "warmup.batch_rows=4"]))


def test_a_reward_function_over_a_dataset_of_reasoning_gym(tmp_path):
    """It gets the dataset's name, the answer and the library's metadata."""
    function = reward_file(
        tmp_path,
        """
        def score(data_source, solution_str, ground_truth, extra_info):
            assert data_source == "spell_backward" and extra_info["word"][::-1] == ground_truth
            return float(len(solution_str) == len(ground_truth))
        """,
    )
    config = small_config(tmp_path, f"reward.function={function}", "warmup.steps=0")
    task = prepare(config)
    with Scorer(task, config.reward) as scorer:
        assert scorer(task.train[:2], [task.train[0].answer, "x"]).values == [1.0, 0.0]


@pytest.mark.parametrize("go_on", [lambda run: training.resume(run, [], dry_run=True), lambda run: training.evaluate(run, None)])
def test_a_run_does_not_go_on_with_other_problems_than_it_began_with(tmp_path, go_on):
    """Rows that were trained on would be held out after a change of the file, and the other way round."""
    config = config_of(tmp_path, sums(30))
    run = train(config)
    fingerprint = run.task.read_text()
    assert json.loads(fingerprint) == {"fingerprint": task_fingerprint(prepare(config))}
    go_on(run.path)
    config_of(tmp_path, [*sums(30), {"prompt": "one more", "answer": "1"}])
    with pytest.raises(ConfigError, match=r"the problems of the task are not those that .* began with"):
        go_on(run.path)
    with pytest.raises(ConfigError, match="changed since"):
        train(config, run)
    assert run.task.read_text() == fingerprint

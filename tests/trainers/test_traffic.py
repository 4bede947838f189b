"""`traffic.json`: what a step moved as the file tells it, and that tokens of a whole run never pass through the driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from podium.errors import ConfigError
from podium.single_controller import Traffic
from podium.trainers import RunDirectory
from podium.trainers.traffic import Edge, StepTraffic, read_traffic, write_traffic
from tests.trainers.builders import small_config, train

pytestmark = pytest.mark.usefixtures("torch_globals_put_back")

TINY = ("warmup.steps=0", "trainer.total_steps=2", "trainer.samples_per_step=8", "trainer.val_freq=1")
TOKENS = ("prompts", "input_ids", "responses", "response_mask", "rollout_log_probs")


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> RunDirectory:
    return train(small_config(tmp_path_factory.mktemp("plain"), *TINY))


@pytest.fixture(scope="module")
def with_kl(tmp_path_factory) -> RunDirectory:
    terms = ("algorithm.use_kl_in_reward=true", "actor.use_kl_loss=true", "actor.recompute_old_log_probs=true")
    return train(small_config(tmp_path_factory.mktemp("kl"), *TINY, *terms))


def moved(run: RunDirectory) -> StepTraffic:
    traffic = read_traffic(run.traffic)
    assert traffic is not None
    return traffic


def ways(run: RunDirectory) -> dict[str, set[tuple[str, str]]]:
    """The (call, way) of each column."""
    found: dict[str, set[tuple[str, str]]] = {}
    for row in moved(run).rows:
        found.setdefault(row.column, set()).add((row.call, row.way))
    return found


def test_tokens_stay_with_the_ranks_in_plain_grpo(plain: RunDirectory) -> None:
    found = ways(plain)
    for column in TOKENS:
        assert {way for _, way in found[column]} <= {"sent", "stayed", "read"}, column
        assert ("generate_sequences", "stayed") in found[column]
    assert {column for column in TOKENS if any(way == "sent" for _, way in found[column])} == {"prompts"}
    assert found["prompts"] == {("generate_sequences", "sent"), ("generate_sequences", "stayed")}
    assert found["responses"] == {("generate_sequences", "stayed"), ("update_actor", "read")}
    assert found["old_log_probs"] == {("update_actor", "read")}
    assert found["advantages"] == {("update_actor", "sent")}


def test_the_driver_fetches_log_probs_where_it_computes_with_them(with_kl: RunDirectory) -> None:
    found = ways(with_kl)
    fetched = {column for column, edges in found.items() if ("driver", "fetched") in edges}
    assert fetched == {"old_log_probs", "ref_log_prob", "response_mask"}
    assert found["input_ids"] == {
        ("generate_sequences", "stayed"),
        *((call, "read") for call in ("compute_ref_log_prob", "compute_log_prob", "update_actor")),
    }
    assert found["ref_log_prob"] >= {("compute_ref_log_prob", "stayed"), ("update_actor", "read")}


def test_the_bytes_of_a_step_are_those_of_its_tokens(plain: RunDirectory) -> None:
    tokenizer = AutoTokenizer.from_pretrained(plain.hf)
    samples = [json.loads(line) for line in (plain.path / "samples.jsonl").read_text().splitlines()]
    prompts = {sample["uid"]: sample["prompt"] for sample in samples if sample["step"] == 2}
    assert len(prompts) == 8
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts.values()]
    metrics = json.loads((plain.path / "metrics.jsonl").read_text().splitlines()[-1])
    counts = {(row.call, row.way, row.column): row.bytes for row in moved(plain).rows}
    generated = {column: counts["generate_sequences", "stayed", column] for column in TOKENS}
    assert counts["generate_sequences", "sent", "prompts"] == 8 * sum(lengths)
    assert generated["prompts"] == 4 * 8 * sum(lengths)  # four samples of each
    assert generated["responses"] == pytest.approx(8 * 32 * metrics["response_length/mean"])
    assert generated["input_ids"] == 8 * metrics["perf/total_num_tokens"] == generated["prompts"] + generated["responses"]
    assert generated["responses"] == generated["response_mask"] == 2 * generated["rollout_log_probs"]  # int64 and float32
    assert counts["update_actor", "sent", "advantages"] == 4 * 8 * 4  # one float32 a row, whatever its tokens
    for column in ("input_ids", "responses", "response_mask"):
        assert counts["update_actor", "read", column] == generated[column]


def test_the_metric_is_what_the_file_says_of_the_last_step(plain: RunDirectory) -> None:
    lines = [json.loads(line) for line in (plain.path / "metrics.jsonl").read_text().splitlines()]
    assert [("perf/driver_mb" in line) for line in lines] == [False, True, True]  # step 0 only validates
    assert moved(plain).step == 2
    assert lines[-1]["perf/driver_mb"] == pytest.approx(moved(plain).through_driver / 1e6)
    assert lines[-1]["perf/driver_mb"] > 0


def test_validation_is_not_counted(plain: RunDirectory, tmp_path: Path) -> None:
    """Every step of `plain` validates; the same step without has the same bytes."""
    silent = train(small_config(tmp_path, *TINY[:-1], "trainer.val_freq=0"))
    assert moved(silent) == moved(plain)


def test_what_is_read_to_log_the_step_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("podium.protocol.blocks.IN_HEADER_BYTES", 0)  # nothing comes to the driver unasked
    found = ways(train(small_config(tmp_path, *TINY, "trainer.total_steps=1")))
    fetched = {column for column, edges in found.items() if ("driver", "fetched") in edges}
    assert fetched >= {"finish_reason", "sample_index", "weight_version"}  # which nothing else reads
    assert not fetched & set(TOKENS)


@pytest.mark.slow
def test_two_workers_on_ray_move_the_same_bytes(tmp_path: Path, ray_cluster: None) -> None:
    """The first step's: later ones have weights that differ by rounding."""
    first = "trainer.total_steps=1"
    one = train(small_config(tmp_path / "one", *TINY, first))
    two = train(small_config(tmp_path / "two", *TINY, first, "num_workers=2"))
    assert moved(two) == moved(one)


def test_edges_are_in_the_order_of_the_step(with_kl: RunDirectory) -> None:
    assert [edge.label for edge in moved(with_kl).edges()] == [
        *("driver -> generate_sequences", "generate_sequences -> driver", "generate_sequences -> stays"),
        *("ranks read for compute_ref_log_prob", "compute_ref_log_prob -> stays"),
        *("ranks read for compute_log_prob", "compute_log_prob -> stays"),
        "driver fetched",
        *("driver -> update_actor", "ranks read for update_actor"),
    ]


def test_what_the_driver_fetched_between_two_calls_is_an_edge_of_its_own(tmp_path: Path) -> None:
    traffic = Traffic()
    traffic.add("f", "stayed", {"a": 10, "b": 20})
    traffic.add("driver", "fetched", {"a": 10})
    traffic.add("g", "sent", {"c": 3})
    traffic.add("g", "read", {"b": 20})
    traffic.add("g", "sent", {"d": 4})
    traffic.add("driver", "fetched", {"b": 20})
    write_traffic(tmp_path / "traffic.json", StepTraffic.of(7, traffic))
    found = read_traffic(tmp_path / "traffic.json")
    assert found is not None
    assert found.step == 7
    assert found.edges() == [
        Edge("f", "stayed", {"a": 10, "b": 20}),
        Edge("driver", "fetched", {"a": 10}),
        Edge("g", "sent", {"c": 3, "d": 4}),
        Edge("g", "read", {"b": 20}),
        Edge("driver", "fetched", {"b": 20}),
    ]
    assert found.by_way() == {"sent": 7, "read": 20, "returned": 0, "stayed": 30, "fetched": 30}
    assert (found.through_driver, found.moved) == (37, 57)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "Expecting property name"),
        ("[]", "an object was expected, got list"),
        ('{"step": 1}', "rows: Field required"),
        ('{"step": 1, "rows": [{"call": "f", "way": "sold", "column": "a", "bytes": 1}]}', "rows.0.way: Input should be 'sent'"),
        ('{"step": 1, "rows": [{"call": "f", "way": "sent", "column": "a", "bytes": -1}]}', "rows.0.bytes: Input should be"),
    ],
)
def test_the_error_of_a_damaged_file_says_what_to_do(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "traffic.json").write_text(content)
    with pytest.raises(ConfigError, match=r"traffic\.json is damaged") as caught:
        read_traffic(tmp_path / "traffic.json")
    assert fault in str(caught.value)
    assert "remove it" in str(caught.value)


def test_a_folder_in_its_place_is_refused_before_anything_starts(plain: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "traffic.json").mkdir()
    (tmp_path / "config.yaml").write_text(plain.config.read_text())
    with pytest.raises(ConfigError, match=r"traffic\.json is not a file"):
        RunDirectory.open(tmp_path)

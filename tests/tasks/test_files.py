"""A user's own files: which rows fit, the errors about the others, and how splits are made."""

from __future__ import annotations

import json
import pickle
import re
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import pytest

from podium.config import TaskConfig
from podium.errors import ConfigError, DataError, MissingExtraError, TaskError
from podium.tasks import Message, RewardInputs, build_task, check_disjoint, task_fingerprint
from podium.tasks.rows import read_rows
from tests.tasks.builders import file_task, sums, verl_row, write_rows


def answers(problems) -> list[str]:
    return [problem.answer for problem in problems]


def test_plain_rows(tmp_path):
    task = file_task(write_rows(tmp_path / "sums.jsonl", sums(40)))
    problem = next(problem for problem in (*task.train, *task.validation, *task.held_out) if problem.answer == "14")
    assert problem.uid == "sums.jsonl:8"  # the file and the line
    assert problem.prompt == "7+7="
    assert task.reward_inputs(problem) == RewardInputs("sums", "14", {})
    assert [task.verify(problem, response) for response in ("14", " 14\n", "15", "")] == [1.0, 1.0, 0.0, 0.0]


def test_rows_in_verls_columns(tmp_path):
    rows = [verl_row(number) for number in range(30)]
    rows[3]["reward_model"]["ground_truth"] = {"target": ["a", "b"]}
    task = file_task(write_rows(tmp_path / "train.jsonl", rows), exact_match=False)
    by_uid = {problem.uid: problem for problem in (*task.train, *task.validation, *task.held_out)}
    problem = by_uid["train.jsonl:3"]
    assert problem.prompt == (Message("user", "How much is 2+1?"),)
    assert task.reward_inputs(problem) == RewardInputs("openai/gsm8k", "3", {"split": "train", "index": 2})
    assert task.reward_inputs(by_uid["train.jsonl:4"]).ground_truth == {"target": ["a", "b"]}
    assert by_uid["train.jsonl:4"].answer == '{"target": ["a", "b"]}'


def test_problems_are_small_hashable_and_picklable(tmp_path):
    """They travel with every row of a batch; what only the reward needs stays behind."""
    long = "x" * 100_000
    rows = [verl_row(number, extra_info={"tests": long}) for number in range(30)]
    task = file_task(write_rows(tmp_path / "train.jsonl", rows))
    assert len(pickle.dumps(task.train)) < 10_000
    assert pickle.loads(pickle.dumps(task.train)) == task.train
    assert len(set(task.train)) == len(task.train)


BAD = [
    ("[1, 2]", "a row must be a JSON object, got [1, 2]"),
    ('{"prompt": "p", "answer"', "not JSON: "),
    (b'{"prompt": "\xff"}', "not JSON: 'utf-8' codec"),
    ({"answer": "a"}, "no prompt; the row has answer"),
    ({"prompt": "p"}, "no ground truth: a row needs answer, or reward_model.ground_truth; it has prompt"),
    ({"prompt": " \n", "answer": "a"}, "the prompt is empty"),
    ({"prompt": "a\ud800", "answer": "a"}, "half of a surrogate pair"),
    ({"prompt": "a", "answer": "\udfff"}, "half of a surrogate pair"),
    ({"prompt": "a", "answer": float("nan")}, "the ground truth (answer) is nan"),
    ({"prompt": 7, "answer": "a"}, "prompt must be text or a list of messages, got 7"),
    ({"prompt": [], "answer": "a"}, "the prompt has no messages"),
    ({"prompt": ["hi"], "answer": "a"}, "message 1 must be an object with role and content, got 'hi'"),
    ({"prompt": [{"role": "user"}], "answer": "a"}, "message 1 has no content"),
    ({"prompt": [{"role": "system", "content": "s"}, {"content": "c"}], "answer": "a"}, "message 2 has no role"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "a"}, "content of message 1 must be text"),
    ({"prompt": [{"role": "user", "content": ""}], "answer": "a"}, "content of message 1 is empty"),
    ({"prompt": [{"role": "assistant", "content": "c"}], "answer": "a"}, "the last message is the assistant's"),
    ({"prompt": [{"role": "user", "content": "c", "tool_calls": [1]}], "answer": "a"}, "message 1 has tool_calls"),
    ({"prompt": "p", "answer": None}, "no ground truth"),
    ({"prompt": "p", "answer": ""}, "the ground truth (answer) is missing or empty"),
    ({"prompt": "p", "reward_model": {"style": "rule"}}, "the ground truth (reward_model.ground_truth) is missing"),
    ({"prompt": "p", "reward_model": "x"}, "reward_model must be an object with ground_truth, got 'x'"),
    ({"prompt": "p", "answer": ["a"]}, "is not text or a number, so exact match cannot compare it: set reward.function"),
    ({"prompt": "p", "answer": 7.0}, "the ground truth 7.0 is a float that can be written in several ways"),
    ({"prompt": "p", "answer": 1e-7}, "store it as text or as an integer, or set reward.function"),
    ({"prompt": '[{"role": "user"}]', "answer": "a"}, "message 1 has no content"),
    ({"prompt": "p", "answer": "a", "data_source": 3}, "data_source must be text, got 3"),
    ({"prompt": "p", "answer": "a", "extra_info": []}, "extra_info must be an object, got []"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_the_error_of_a_row_that_does_not_fit_has_file_row_and_reason(tmp_path, caplog, row, reason):
    lines = [json.dumps(good).encode() for good in sums(20)]
    lines[6] = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(TaskError) as caught:
        file_task(str(path))
    text = str(caught.value)
    assert text.startswith("1 of 20 rows do not fit:")
    assert f"{path} row 7: " in text
    assert reason in text
    assert "task.bad_rows=drop" in text
    task = file_task(str(path), bad_rows="drop")
    assert sum(len(task.split(name)) for name in ("train", "validation", "held_out")) == 19
    assert "1 of 20 rows do not fit" in caplog.text  # left out, and said so
    assert reason in caplog.text


def test_many_bad_rows_are_counted_and_the_first_few_shown(tmp_path):
    path = write_rows(tmp_path / "mine.jsonl", [*sums(5), *({"prompt": "p"} for _ in range(12))])
    with pytest.raises(TaskError, match=r"12 of 17 rows do not fit(.|\n)*row 10: (.|\n)*and 7 more"):
        file_task(path)
    with pytest.raises(TaskError, match="no training row is left"):
        file_task(write_rows(tmp_path / "none.jsonl", ["{}"]), bad_rows="drop")


def test_blank_lines_and_a_byte_order_mark_are_not_rows(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n\n".join(json.dumps(row).encode() for row in sums(20)) + b"\n\n")
    task = file_task(str(path))
    assert {problem.uid for problem in task.train} <= {f"mine.jsonl:{line}" for line in range(1, 41, 2)}


def test_prompts_that_are_too_long_or_cannot_be_encoded_do_not_fit(tmp_path):
    path = write_rows(tmp_path / "mine.jsonl", [*sums(20), {"prompt": "x" * 30, "answer": "a"}])
    with pytest.raises(TaskError, match=r"row 21: the prompt has 30 tokens, task\.max_prompt_tokens is 12"):
        file_task(path, count_tokens=len, max_prompt_tokens=12)
    assert file_task(path, count_tokens=len, max_prompt_tokens=30)

    def refuses(prompt):
        if prompt == "3+3=":
            raise DataError("the chat template refuses the prompt")
        return 1

    with pytest.raises(TaskError, match="row 4: the chat template refuses"):
        file_task(path, count_tokens=refuses)


def test_a_reason_that_all_rows_share_is_given_once_without_advice_to_skip_them(tmp_path):
    path = write_rows(tmp_path / "mine.jsonl", [{"prompt": "p"} for _ in range(12)])
    with pytest.raises(TaskError) as caught:
        file_task(path)
    reason = "no ground truth: a row needs answer, or reward_model.ground_truth; it has prompt"
    assert str(caught.value) == f"12 of 12 rows do not fit, all for one reason: {reason} (the first is {path} row 1)"
    path = write_rows(tmp_path / "mine.jsonl", ["{}", "[]"])
    with pytest.raises(TaskError, match=r"2 of 2 rows do not fit:\n .*row 1: .*\n .*row 2: .*\nmend them$"):
        file_task(path)


def test_repeated_prompts_are_remarked_and_kept(tmp_path, caplog):
    rows = [*sums(40), {"prompt": " 3+3=", "answer": "6"}, {"prompt": "4+4=", "answer": "nine"}]
    path = write_rows(tmp_path / "mine.jsonl", rows)
    task = file_task(path)
    (remark,) = task.remarks
    assert "2 prompts of the train rows occur more than once (1 of them with different answers)" in remark
    assert f"{path} row 4 and {path} row 41" in remark
    assert caplog.text == ""  # to be logged once a run, not whenever the task is built
    assert sum(len(task.split(name)) for name in ("train", "validation", "held_out")) == 42
    check_disjoint(task)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"train_files": ["no/such.jsonl"]}, "task.train_files: no such file: no/such.jsonl (relative to "),
        ({"train_files": ["rows.csv"]}, "task.train_files: rows.csv: a file of rows is named .jsonl"),
        ({"train_files": ["folder.parquet"]}, "task.train_files: folder.parquet is a folder; list the files in it"),
        ({"train_files": ["a.jsonl.gz"]}, "a file of rows is named .jsonl (one JSON object a line) or .parquet, uncompressed"),
        ({"train_files": ["a.jsonl"], "held_out_files": ["b.jsonl"]}, "task.held_out_files: no such file: b.jsonl"),
        ({"train_files": ["a.jsonl"], "validation_files": ["./a.jsonl"]}, "is listed twice"),
        ({"train_files": ["a.jsonl", "a.jsonl"]}, "a.jsonl is listed twice"),
    ],
)
def test_files_that_are_not_there(tmp_path, monkeypatch, settings, expected):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "a.jsonl", sums(20))
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(ConfigError) as caught:
        build_task(TaskConfig(**settings))
    assert expected in str(caught.value)


# -- splits -------------------------------------------------------------------------------------------------------------


def test_splits_taken_off_the_training_rows_share_neither_answer_nor_prompt(tmp_path):
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(20) for b in range(20)]
    path = write_rows(tmp_path / "mine.jsonl", rows)
    task = file_task(path, num_validation=40, num_held_out=30)
    check_disjoint(task)
    assert task.disjoint_by == "answer"
    assert 20 <= len(task.validation) <= 40
    assert 15 <= len(task.held_out) <= 30
    assert len(task.train) + len(task.validation) + len(task.held_out) == 400
    assert [problem.key for problem in task.train] == sorted(problem.key for problem in task.train)  # the file's order
    again, other = (
        file_task(path, num_validation=40, num_held_out=30),
        file_task(path, num_validation=40, num_held_out=30, seed=1),
    )
    assert again.held_out == task.held_out
    assert set(answers(other.held_out)) != set(answers(task.held_out))


def test_rows_of_one_prompt_stay_together_whatever_their_answers(tmp_path):
    rows = [{"prompt": f"p{number // 2}", "answer": f"a{number}"} for number in range(60)]
    task = file_task(write_rows(tmp_path / "mine.jsonl", rows), num_validation=6, num_held_out=6)
    prompts = [{problem.prompt for problem in task.split(name)} for name in ("train", "validation", "held_out")]
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == 30


def test_yes_and_no_are_split_by_prompt_and_a_remark_says_so(tmp_path):
    rows = [{"prompt": f"Is {number} even?", "answer": "no" if number % 2 else "Yes"} for number in range(100)]
    task = file_task(write_rows(tmp_path / "mine.jsonl", rows))
    assert task.disjoint_by == "prompt"
    assert any("2 distinct answers in 100 training rows are too few" in remark for remark in task.remarks)
    assert (len(task.train), len(task.validation), len(task.held_out)) == (80, 10, 10)
    check_disjoint(task)


def test_default_sizes(tmp_path):
    task = file_task(write_rows(tmp_path / "mine.jsonl", sums(3000)))
    assert (len(task.train), len(task.validation), len(task.held_out)) == (3000 - 128 - 256, 128, 256)


def test_files_of_their_own_are_the_splits(tmp_path):
    """Answers may recur in other files (GSM8K's do), prompts may not."""
    train = write_rows(tmp_path / "train.jsonl", [{"prompt": f"t{n}", "answer": str(n % 5)} for n in range(20)])
    validation = write_rows(tmp_path / "val.jsonl", [{"prompt": f"v{n}", "answer": str(n % 5)} for n in range(6)])
    held_out = write_rows(tmp_path / "test.jsonl", [{"prompt": f"h{n}", "answer": str(n % 5)} for n in range(7)])
    task = file_task(train, validation_files=validation, held_out_files=held_out, num_validation=4)
    assert (len(task.train), len(task.validation), len(task.held_out)) == (20, 4, 7)
    assert task.disjoint_by == "prompt"
    check_disjoint(task)
    with pytest.raises(TaskError, match="num_held_out asks for 9 problems, the files leave 7"):
        file_task(train, validation_files=validation, held_out_files=held_out, num_held_out=9)


def test_a_training_prompt_that_is_a_held_out_one_does_not_fit(tmp_path, caplog):
    train = write_rows(tmp_path / "train.jsonl", [*sums(20), {"prompt": "h1 ", "answer": "1"}])
    held_out = write_rows(tmp_path / "test.jsonl", [{"prompt": f"h{n}", "answer": str(n % 5)} for n in range(7)])
    with pytest.raises(TaskError, match=r"train\.jsonl row 21: the prompt is also a held_out one: .*test\.jsonl row 2"):
        file_task(train, held_out_files=held_out)
    task = file_task(train, held_out_files=held_out, bad_rows="drop")
    assert (len(task.train), len(task.validation), len(task.held_out)) == (18, 2, 7)
    assert "also a held_out one" in caplog.text


def test_files_of_the_same_name_in_two_folders_keep_their_rows_apart(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = write_rows(tmp_path / "a" / "rows.jsonl", sums(20))
    other = write_rows(tmp_path / "b" / "rows.jsonl", [{"prompt": f"q{n}", "answer": f"b{n}"} for n in range(20)])
    task = file_task([one, other])
    uids = [problem.uid for name in ("train", "validation", "held_out") for problem in task.split(name)]
    assert len(set(uids)) == 40
    assert f"{other}:3" in uids


@pytest.mark.parametrize(
    ("count", "settings", "expected"),
    [
        (2, {}, "2 training rows are too few to split task.num_held_out=1, task.num_validation=1 off them"),
        (20, {"num_validation": 15, "num_held_out": 5}, "20 training rows are too few"),
        (20, {"num_train": 50}, "task.num_train asks for 50 problems, the files leave 16"),
    ],
)
def test_too_few_rows(tmp_path, count, settings, expected):
    with pytest.raises(TaskError) as caught:
        file_task(write_rows(tmp_path / "mine.jsonl", sums(count)), **settings)
    assert expected in str(caught.value)


# -- parquet ------------------------------------------------------------------------------------------------------------


def test_parquet_rows_are_those_of_the_same_jsonl(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [verl_row(number) for number in range(30)]
    rows[4]["prompt"] = [{"role": "system", "content": "Be brief."}, *rows[4]["prompt"]]
    path = str(tmp_path / "train.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    task, same = file_task(path), file_task(write_rows(tmp_path / "train.jsonl", rows))
    for name in ("train", "validation", "held_out"):
        assert [(p.prompt, p.answer) for p in task.split(name)] == [(p.prompt, p.answer) for p in same.split(name)]
        assert [task.reward_inputs(p) for p in task.split(name)] == [same.reward_inputs(p) for p in same.split(name)]
    assert {p.uid for p in task.train} <= {f"train.parquet:{row}" for row in range(1, 31)}


def parquet_file(path, columns) -> str:
    """A parquet file of these columns."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), str(path))
    return str(path)


def contents(path):
    """Ground truth and extra info of each row of a file, in order."""
    return [(row.ground_truth, row.extra_info) for row in read_rows(path, needs_text_answer=False)]


def test_a_parquet_row_that_does_not_fit_and_a_file_that_is_not_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    rows = [*sums(20), {"prompt": None, "answer": "x"}]
    path = parquet_file(tmp_path / "train.parquet", pa.Table.from_pylist(rows).to_pydict())
    with pytest.raises(TaskError, match=r"row 21: no prompt; the row has answer"):
        file_task(path)
    twice = pa.table([["p"], ["a"], ["b"]], names=["prompt", "answer", "answer"])
    pa.parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(TaskError, match=r"twice\.parquet has 2 columns answer: rename or drop all but one"):
        file_task(str(tmp_path / "twice.parquet"))
    (tmp_path / "bad.parquet").write_text("not parquet")
    with pytest.raises(TaskError, match=r"bad\.parquet cannot be read as parquet"):
        file_task(str(tmp_path / "bad.parquet"))


ANSWERS = [
    ("string", ["é"], ["é"]),
    ("large_string", ["é"], ["é"]),
    ("string_view", ["é"], ["é"]),
    ("dictionary", ["a", "b", "a"], ["a", "b", "a"]),
    ("binary", [b"1", "é".encode()], ["1", "é"]),
    ("large_binary", [b"1"], ["1"]),
    ("binary_view", [b"1"], ["1"]),
    ("fixed", [b"12"], ["12"]),
    ("int8", [-7], [-7]),
    ("uint64", [2**64 - 1], [2**64 - 1]),
    ("bool_", [True, False], [True, False]),
    ("float64", [0.1, 7.0], [0.1, 7.0]),
    ("float32", [0.1, 7.0], [0.1, 7.0]),  # not 0.10000000149011612
    ("decimal", [Decimal("7.50"), Decimal("0.00")], ["7.50", "0.00"]),
    ("date32", [date(2024, 1, 2)], ["2024-01-02"]),
    ("timestamp", [datetime(2024, 1, 2, 3, 4, 5)], ["2024-01-02 03:04:05.000000"]),
    ("time", [time(3, 4, 5)], ["03:04:05.000000"]),
    ("list", [["a", "b"], []], [["a", "b"], []]),
    ("struct", [{"a": b"x", "f": 0.1, "t": date(2024, 1, 2)}], [{"a": "x", "f": 0.1, "t": "2024-01-02"}]),
    ("map", [[("k", 0.1)], []], [{"k": 0.1}, {}]),
]


def arrow_type(name: str):
    """An Arrow type by the name that `ANSWERS` gives it."""
    import pyarrow as pa

    named = {
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
        "fixed": pa.binary(2),
        "decimal": pa.decimal128(10, 2),
        "timestamp": pa.timestamp("us"),
        "time": pa.time64("us"),
        "duration": pa.duration("s"),
        "list": pa.large_list(pa.large_string()),
        "struct": pa.struct({"a": pa.binary(), "f": pa.float32(), "t": pa.date32()}),
        "map": pa.map_(pa.string(), pa.float32()),
    }
    return named[name] if name in named else getattr(pa, name)()


@pytest.mark.parametrize(("kind", "values", "expected"), ANSWERS)
def test_every_arrow_type_is_read_as_a_json_value_or_refused(tmp_path, kind, values, expected):
    pa = pytest.importorskip("pyarrow")
    answers = pa.array(values, arrow_type(kind))
    extra = pa.StructArray.from_arrays([answers], ["value"])
    prompts = [f"p{number}" for number in range(len(values))]
    path = parquet_file(tmp_path / "rows.parquet", {"prompt": prompts, "answer": answers, "extra_info": extra})
    found = contents(path)
    assert found == [(value, {"value": value}) for value in expected]
    assert [type(value) for value, _ in found] == list(map(type, expected))
    json.dumps(found)


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        ("binary", [b"1", b"\xff"], "row 2: {} holds bytes that are not UTF-8 text"),
        ("float64", [0.5, 7.0], "row 2: the ground truth 7.0 is a float that can be written in several ways"),
        ("float64", [0.5, float("nan")], "row 2: the ground truth ({}) is nan"),
        ("float64", [0.5, float("inf")], "row 2: the ground truth ({}) is inf"),
        ("null", [None, None], "no ground truth"),
        ("list", [["a"], ["b"]], "is not text or a number, so exact match cannot compare it"),
        ("decimal", [Decimal("7.50")] * 2, "the column {} is of type decimal128(10, 2), whose values can be written in several"),
        ("timestamp", [datetime(2024, 1, 2)] * 2, "the column {} is of type timestamp[us]"),
        ("date32", [date(2024, 1, 2)] * 2, "the column {} is of type date32[day]"),
        ("duration", [timedelta(seconds=5)] * 2, "the column {} is of type duration[s]"),
    ],
)
def test_an_answer_that_exact_match_cannot_compare_is_refused_with_its_row_or_column(tmp_path, kind, values, reason):
    pa = pytest.importorskip("pyarrow")
    answers = pa.array(values, arrow_type(kind))
    path = parquet_file(tmp_path / "plain.parquet", {"prompt": ["p", "q"], "answer": answers})
    with pytest.raises(TaskError, match=re.escape(reason.format("answer"))):
        file_task(path)
    truths = pa.StructArray.from_arrays([answers], ["ground_truth"])
    path = parquet_file(tmp_path / "verl.parquet", {"prompt": ["p", "q"], "reward_model": truths})
    nested = reason.format("reward_model.ground_truth").replace("no ground truth", "ground_truth) is missing or empty")
    with pytest.raises(TaskError, match=re.escape(nested)):
        file_task(path)


def test_a_column_of_a_type_without_a_json_value_is_refused_only_where_it_is_read(tmp_path):
    pa = pytest.importorskip("pyarrow")
    texts = [f"t{number}" for number in range(20)]
    unfit = pa.array([2**62] * 20, pa.timestamp("us"))  # later than the year 9999
    task = file_task(parquet_file(tmp_path / "a.parquet", {"prompt": texts, "answer": texts, "when": unfit, "took": unfit}))
    assert len(task.train) == 16
    took = pa.StructArray.from_arrays([pa.array([5] * 20, pa.duration("s"))], ["took"])
    path = parquet_file(tmp_path / "b.parquet", {"prompt": texts, "answer": texts, "extra_info": took})
    with pytest.raises(TaskError, match=r"the column extra_info has the type duration\[s\], which is not read: store it as text"):
        file_task(path)


@pytest.mark.parametrize("columns", [("question", "answer"), ("prompt", "label")])
def test_a_parquet_file_without_a_needed_column_lists_those_that_it_has(tmp_path, columns):
    path = parquet_file(tmp_path / "a.parquet", {name: ["a"] for name in columns})
    with pytest.raises(TaskError, match=f"it has {', '.join(sorted(columns))}"):
        file_task(path)


def test_columns_that_the_policy_would_miss_are_remarked_by_name(tmp_path):
    rows = [{**row, "images": [], "tools": None, "ability": "math"} for row in sums(30)]
    assert file_task(write_rows(tmp_path / "a.jsonl", rows)).remarks == ()
    rows[3]["images"], rows[4]["tools"] = ["cat.png"], [{"name": "search"}]
    (remark,) = file_task(path := write_rows(tmp_path / "a.jsonl", rows)).remarks
    assert remark == f"{path}: the policy does not see the columns images, tools"
    texts = [f"t{number}" for number in range(20)]
    path = parquet_file(tmp_path / "a.parquet", {"prompt": texts, "answer": texts, "images": [b"\x89PNG"] * 20, "ability": texts})
    assert file_task(path).remarks == (f"{path}: the policy does not see the columns images",)


def test_messages_and_objects_may_be_given_as_json_text(tmp_path):
    rows = [verl_row(number) for number in range(30)]
    text = [{key: value if key == "data_source" else json.dumps(value) for key, value in row.items()} for row in rows]
    given, same = file_task(write_rows(tmp_path / "a.jsonl", text)), file_task(write_rows(tmp_path / "a.jsonl", rows))
    assert given.train == same.train
    assert [given.reward_inputs(p) for p in given.train] == [same.reward_inputs(p) for p in same.train]
    plain = ["[1, 2]", "[a, 3]", '{"role": "user"}', '[{"content": "x"}]', "[]"]  # JSON, but not messages
    task = file_task(write_rows(tmp_path / "b.jsonl", [{"prompt": p, "answer": str(n)} for n, p in enumerate(plain)] + sums(20)))
    assert set(plain) <= {problem.prompt for name in ("train", "validation", "held_out") for problem in task.split(name)}


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtraError, match=r'pip install -e "\.\[parquet\]"'):
        file_task(str(tmp_path / "train.parquet"))


def test_a_fingerprint_tells_whether_the_files_still_give_the_same_splits(tmp_path):
    """One more row moves others between the splits: rows that were trained on may come to be held out."""
    rows = sums(60)
    before = file_task(write_rows(tmp_path / "rows.jsonl", rows))
    fingerprint = task_fingerprint(before)
    assert task_fingerprint(file_task(write_rows(tmp_path / "rows.jsonl", rows))) == fingerprint
    (tmp_path / "elsewhere").mkdir()
    assert task_fingerprint(file_task(write_rows(tmp_path / "elsewhere" / "rows.jsonl", rows))) == fingerprint
    after = file_task(write_rows(tmp_path / "rows.jsonl", sums(61)))
    assert {problem.prompt for problem in after.held_out} & {problem.prompt for problem in before.train}
    changed = [
        after,
        file_task(write_rows(tmp_path / "rows.jsonl", rows), seed=1),
        file_task(write_rows(tmp_path / "rows.jsonl", [*rows[1:], rows[0]])),
        file_task(write_rows(tmp_path / "rows.jsonl", [*rows[:-1], {**rows[-1], "answer": "x"}])),
        file_task(write_rows(tmp_path / "rows.jsonl", [{**rows[0], "prompt": "0 + 0 ="}, *rows[1:]])),
    ]
    assert len({fingerprint, *map(task_fingerprint, changed)}) == 1 + len(changed)

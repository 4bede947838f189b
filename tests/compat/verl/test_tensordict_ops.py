"""The functions on TensorDicts: they agree with lists of rows, on jagged and non-tensor columns, and say what is wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from podium.compat.verl import tensordict_ops as tu
from podium.errors import ChunkError, DataError
from podium.observability import Max
from podium.protocol import DataProto, jagged_from_rows
from tests.protocol.builders import FOUR, META, ROWS, Row, batch_of, check, lists_of


def table(rows: Any = FOUR) -> TensorDict:
    return batch_of(rows).to_tensordict()


def check_rows(data: TensorDict, rows: Any) -> None:
    assert data.batch_size == (len(rows),)
    proto = DataProto.from_tensordict(data)
    check(DataProto(proto.batch, proto.non_tensor_batch, {key: proto.meta_info[key] for key in META}), rows)


# -- rows ---------------------------------------------------------------------------------------------------------------


@given(ROWS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_row_operations_agree_with_lists(rows: list[Row], rng: random.Random, size: int) -> None:
    data = table(rows)
    chosen = [rng.randrange(len(rows)) for _ in range(3)] if rows else []
    check_rows(tu.index_select_tensor_dict(data, chosen), [rows[number] for number in chosen])
    check_rows(tu.concat_tensordict([data, data]), rows * 2)
    check_rows(tu.contiguous(data), rows)
    for number, part in enumerate(tu.chunk_tensordict(tu.concat_tensordict([data] * size), size)):
        check_rows(part, rows)
        assert number < size
    padded, missing = tu.pad_to_divisor(data, size)
    check_rows(padded, [*rows, *rows[-1:] * missing])
    check_rows(tu.unpad(padded, missing), rows)
    batches = list(tu.make_iterator(data, size, 1, last="short"))
    for start, batch in zip(range(0, len(rows), size), batches, strict=True):
        check_rows(batch, rows[start : start + size])
    check_rows(data, rows)


def test_nothing_selected_of_nothing() -> None:
    assert tu.index_select_tensor_dict(None, [0]) is None
    with pytest.raises(ChunkError, match="4 rows cannot be cut into 3 equal parts"):
        tu.chunk_tensordict(table(), 3)


def test_meta_that_differs_is_an_error_in_every_version() -> None:
    """KD21b: the first value must not win, nor become a list per row."""
    parts = [tu.get_tensordict({"x": torch.ones(1)}, {"m": value}) for value in (1, 2)]
    with pytest.raises(DataError, match="meta 'm' must be equal in all parts, got 1 in part 0 and 2 in part 1"):
        tu.concat_tensordict(parts)
    typed = [DataProto({"x": torch.ones(1)}, meta_info={"m": Max(value)}) for value in (1, 2)]
    assert tu.get(tu.concat_tensordict([part.to_tensordict() for part in typed]), "m").value == 2


def test_union_is_in_place_and_a_conflict_changes_nothing() -> None:
    data, other = table(), table()
    tu.pop_keys(data, ["tokens", "text"])
    assert tu.union_tensor_dict(data, other) is data
    check_rows(data, FOUR)
    with pytest.raises(DataError, match="tensor column 'number' is in both batches with different values: row 0: 0 and 1"):
        tu.union_tensor_dict(data, tu.get_tensordict({"new": torch.ones(4), "number": torch.tensor([1, 1, 2, 3])}))
    check_rows(data, FOUR)
    assert "new" not in data.keys()  # noqa: SIM118
    meta_only = tu.union_tensor_dict(tu.get_tensordict({}, {"m": 1}), tu.get_tensordict({"x": torch.ones(2)}))
    assert (meta_only.batch_size, tu.get(meta_only, "m")) == ((2,), 1)


# -- making -------------------------------------------------------------------------------------------------------------


def test_each_kind_of_value_becomes_its_kind_of_entry() -> None:
    jagged = jagged_from_rows([torch.ones(1), torch.ones(2)])
    stack = NonTensorStack(NonTensorData("a"), NonTensorData("b"))
    data = tu.get_tensordict({"x": torch.ones(2), "j": jagged, "o": [[1], {"k": 2}], "s": stack}, {"m": [1, 2, 3]})
    assert (tu.get(data, "o"), tu.get(data, "s"), tu.get(data, "m")) == ([[1], {"k": 2}], ["a", "b"], [1, 2, 3])
    assert tu.get(data, "j") is jagged
    assert tu.get_tensordict({}, {"m": 1}).batch_size == ()


@pytest.mark.parametrize(
    ("tensors", "meta", "message"),
    [
        ({"x": torch.ones(2), "o": ["a"]}, {}, "'o' has 1 rows, but 'x' has 2"),
        ({"o": 3}, {}, "column 'o' is a int; a value of the whole batch belongs in non_tensor_dict"),
        ({"o": [torch.ones(1)]}, {}, "column 'o' is a list of tensors; make it one by nested_tensor_from_tensor_list"),
        ({"x": torch.ones(2)}, {"x": 1}, r"\['x'\] name two of"),
    ],
)
def test_what_cannot_be_an_entry_is_named(tensors: dict[str, Any], meta: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tu.get_tensordict(tensors, meta)


def test_rows_of_dicts_and_of_tensors() -> None:
    data = tu.list_of_dict_to_tensordict([{"a": 1, "t": torch.tensor([1])}, {"a": 2, "t": torch.tensor([2, 3]), "b": "x"}])
    assert (tu.get(data, "a").tolist(), lists_of(tu.get(data, "t")), tu.get(data, "b")) == ([1, 2], [[1], [2, 3]], [None, "x"])
    positions = tu.nested_tensor_from_tensor_list([torch.ones(4, 2), torch.ones(4, 3)])
    assert [list(row.shape) for row in positions.unbind()] == [[4, 2], [4, 3]]
    first = tu.nested_tensor_from_tensor_list([torch.ones(2, 4), torch.ones(3, 4)], 1)
    joined = tu.concat_nested_tensors([first, first])
    assert [len(row) for row in joined.unbind()] == [2, 3, 2, 3]


# -- single entries -----------------------------------------------------------------------------------------------------


def test_entries_are_set_by_kind() -> None:
    data = table()
    assert tu.assign_non_tensor(data, step=3, names=["w", "x", "y", "z"], whole=NonTensorData([1, 2])) is data
    assert (tu.get(data, "step"), tu.get(data, "names"), tu.get(data, "whole")) == (3, ["w", "x", "y", "z"], [1, 2])
    assert tu.get_non_tensor_data(tu.assign_non_tensor_data(data, "list", [1, 2]), "list") == [1, 2]
    assert isinstance(tu.get_non_tensor_data(data, "names"), NonTensorStack)
    tu.assign_non_tensor_stack(data, "names", NonTensorStack(*map(NonTensorData, "abcd")))
    assert tu.get(data, "names") == list("abcd")
    for part in tu.chunk_tensordict(data, 2):
        assert (tu.get(part, "list"), len(tu.get(part, "names"))) == ([1, 2], 2)
    with pytest.raises(DataError, match=r"column 'names' has 1 rows, but the batch size is \(4,\)"):
        tu.assign_non_tensor_stack(data, "names", ["a"])
    assert (tu.get(data, "none", 5), tu.get_non_tensor_data(data, "none", 5), tu.unwrap_non_tensor_data("v")) == (5, 5, "v")


def test_of_entries_that_do_not_all_fit_none_is_set() -> None:
    data = table()
    with pytest.raises(DataError, match=r"column 'b' has 1 rows, but the batch size is \(4,\)"):
        tu.assign_non_tensor(data, a=list("pqrs"), m=1, b=["only"])
    assert {"a", "b", "m"}.isdisjoint(data.keys())
    check_rows(data, FOUR)


@pytest.mark.parametrize(
    "way",
    [
        lambda data: DataProto.from_tensordict(data).to_tensordict(),
        lambda data: tu.get_keys(data, ["x", "m"]),
        lambda data: tu.concat_tensordict([data]),
        lambda data: tu.union_tensor_dict(tu.get_tensordict({"y": torch.ones(1)}), data),
    ],
)
def test_no_result_shares_meta_with_its_source(way: Any) -> None:
    data = tu.get_tensordict({"x": torch.ones(1)}, {"m": [1, {"deep": [2]}]})
    tu.get(way(data), "m")[1]["deep"].append(3)
    assert tu.get(data, "m") == [1, {"deep": [2]}]


def test_entries_are_taken_out() -> None:
    data = table()
    assert (tu.pop(data, "text"), tu.pop(data, "text", "gone")) == (["a", None, "c", "d"], "gone")
    taken = tu.pop_keys(data, ["tokens", "step"])
    assert (sorted(taken.keys()), tu.get(taken, "step"), taken.batch_size) == (["step", "tokens"], 7, (4,))
    assert {"tokens", "step", "text"}.isdisjoint(data.keys())
    for take in (tu.get_keys, tu.pop_keys):
        with pytest.raises(DataError, match="no entry 'nmber'; did you mean 'number'"):
            take(data, ["square", "nmber"])
    assert "square" in data.keys()  # noqa: SIM118


def test_equality_names_the_entry() -> None:
    tu.assert_tensordict_eq(table(), table())
    with pytest.raises(AssertionError, match=r"entry 'tokens' differs: int64\[4, \*\] and int64\[4, \*\]"):
        tu.assert_tensordict_eq(table(), table([FOUR[0], FOUR[1]._replace(tokens=(9,)), *FOUR[2:]]))
    with pytest.raises(AssertionError, match="entries differ"):
        tu.assert_tensordict_eq(table(), tu.get_keys(table(), ["number"]))

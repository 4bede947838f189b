"""Columns: construction, choosing, joining; conflicts name the column and leave both batches as they were."""

from __future__ import annotations

import copy
import pickle
from collections import UserDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from podium.compat.verl import tensordict_ops as tu
from podium.errors import DataError
from podium.observability import Mean, Metrics, Sum
from podium.protocol import DataProto, Mergeable, object_column
from podium.protocol.blocks import LocalBlock, to_header_and_block
from podium.protocol.jagged import jagged, parts
from podium.protocol.remote_concat import concat_remote_rows
from podium.protocol.remote_rows import RemoteRows
from tests.protocol.builders import FOUR, META, batch_of, check, lists_of, ragged

NAN = float("nan")


# -- construction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "objects", "message"),
    [
        ({"a": torch.ones(2), "b": torch.ones(3)}, {}, "'b' has 3 rows, but 'a' has 2"),
        ({"a": torch.ones(2)}, {"o": ["x"]}, "'o' has 1 rows, but 'a' has 2"),
        ({"a": torch.ones(1)}, {"a": ["x"]}, "'a' is both a tensor column and an object column: give one of them another name"),
        ({"a": torch.ones(2), "j": ragged([[1]])}, {}, "'j' has 1 rows, but 'a' has 2"),
        ({"a": torch.ones(2), "s": torch.tensor(1)}, {}, "'s' has no row dimension.*meta_info"),
        ({"j": jagged(torch.arange(5), torch.tensor([1, 2, 5]))}, {}, r"'j' has 5 values, but its offsets cover 1\.\.5"),
        ({"j": jagged(torch.arange(9), torch.tensor([0, 2, 5]))}, {}, r"'j' has 9 values, but its offsets cover 0\.\.5"),
        ({"j": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, {}, "layout=torch.jagged"),
        ({"j": torch.nested.narrow(torch.ones(2, 5), 1, 1, torch.tensor([2, 3]), layout=torch.jagged)}, {}, "contiguous"),
    ],
)
def test_columns_that_cannot_be_rows_are_refused(tensors: dict[str, Tensor], objects: dict[str, list[str]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataProto(tensors, objects)


def test_torchs_own_jagged_tensors_are_columns() -> None:
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([3.0])]
    data = DataProto(
        {
            "a": torch.nested.nested_tensor(rows, layout=torch.jagged),
            "b": torch.nested.as_nested_tensor(rows, layout=torch.jagged),
        }
    )
    assert lists_of(data.batch["a"] * data.batch["b"]) == [[1.0, 4.0], [], [9.0]]


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2], [3, 4]],
        [(1, 2), (3, 4)],
        ["a", "bc"],
        [None, None],
        [{"a": 1}, {}],
        [np.zeros(2), np.zeros(2)],
        [torch.ones(2), torch.ones(2)],
        [[], []],
    ],
)
def test_an_object_column_keeps_one_object_a_row(rows: list[Any]) -> None:
    """B7: rows of equal length do not become an array of two dimensions."""
    column = object_column(rows)
    assert (column.shape, column.dtype) == ((2,), np.dtype(object))
    assert all(mine is theirs for mine, theirs in zip(column, rows, strict=True))
    data = DataProto(non_tensor_batch={"o": rows})
    assert data.repeat(2).non_tensor_batch["o"].shape == (4,)


def test_arrays_of_strings_hold_pythons_own() -> None:
    column = DataProto(non_tensor_batch={"o": np.array(["a", "bc"])}).non_tensor_batch["o"]
    assert [type(text) for text in column] == [str, str]


def test_rows_of_equal_and_of_different_lengths_join() -> None:
    """B7: [[1,2],[3,4]] and [[1],[2,3,4]] make four rows, each a list."""
    joined = DataProto.concat([DataProto(non_tensor_batch={"o": rows}) for rows in ([[1, 2], [3, 4]], [[1], [2, 3, 4]])])
    assert joined.non_tensor_batch["o"].tolist() == [[1, 2], [3, 4], [1], [2, 3, 4]]
    assert joined.non_tensor_batch["o"].shape == (4,)


def test_offsets_of_32_bits_become_int64_once(tmp_path: Path) -> None:
    """torch makes jagged tensors of them: such a column is saved, joined and compared as any other, and its reader gets int64."""
    narrow = torch.tensor([0, 2, 5], dtype=torch.int32)
    values = torch.arange(5.0)
    j, k = (torch.nested.nested_tensor_from_jagged(one, narrow) for one in (values, -values))
    data = DataProto({"j": j, "k": k})
    offsets = parts(data.batch["j"])[1]
    assert (offsets.dtype, offsets.tolist()) == (torch.int64, [0, 2, 5])
    assert parts(data.batch["k"])[1] is offsets
    assert parts(data.batch["j"])[0].data_ptr() == values.data_ptr()
    assert parts(j)[1] is narrow
    same = DataProto({"j": torch.nested.nested_tensor_from_jagged(values, narrow.long())})
    assert lists_of(data.union(same).batch["j"]) == [[0.0, 1.0], [2.0, 3.0, 4.0]]
    data.save_to_disk(tmp_path / "rows")
    assert lists_of(DataProto.load_from_disk(tmp_path / "rows").batch["k"]) == [[0.0, -1.0], [-2.0, -3.0, -4.0]]
    assigned = DataProto()
    assigned.batch["j"] = j
    assigned.save_to_disk(tmp_path / "rows")
    assert lists_of(DataProto.load_from_disk(tmp_path / "rows").batch["j"]) == [[0.0, 1.0], [2.0, 3.0, 4.0]]
    assigned.union(DataProto({"j": j}))
    assert lists_of(same.union(assigned).batch["j"]) == [[0.0, 1.0], [2.0, 3.0, 4.0]]
    assigned.batch["j"] = j
    ranks = [
        RemoteRows.of(header, LocalBlock(block)) for header, block in map(to_header_and_block, (assigned, same.select(["j"])))
    ]
    assert lists_of(concat_remote_rows(ranks).get().batch["j"]) == [[0.0, 1.0], [2.0, 3.0, 4.0]] * 2


# -- choosing -----------------------------------------------------------------------------------------------------------


def test_select_takes_the_named_columns_and_shares_their_storage() -> None:
    data = batch_of(FOUR)
    chosen = data.select(["number"], [], ["step"])
    assert (list(chosen.batch), list(chosen.non_tensor_batch), chosen.meta_info) == (["number"], [], {"step": 7})
    assert chosen.batch["number"].data_ptr() == data.batch["number"].data_ptr()
    check(data.select(), FOUR)


def test_pop_moves_columns_and_rename_keeps_their_place() -> None:
    data = batch_of(FOUR)
    taken = data.pop(["tokens"], ["text"], ["notes"])
    assert (list(taken.batch), list(taken.non_tensor_batch), list(taken.meta_info)) == (["tokens"], ["text"], ["notes"])
    assert (list(data.batch), list(data.non_tensor_batch), list(data.meta_info)) == (
        ["number", "square", "gains", "pairs", "places", "marks"],
        [],
        ["step"],
    )
    assert data.rename("square", "sq") is data
    assert list(data.batch) == ["number", "sq", "gains", "pairs", "places", "marks"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: data.select(["nmber"]), "no tensor column 'nmber'; did you mean 'number'"),
        (lambda data: data.select("number"), r"names must be a list, got the string 'number'; write \['number'\]"),
        (lambda data: data.pop("number"), "names must be a list, got the string 'number'"),
        (lambda data: DataProto.concat([data], missing="None"), "missing must be 'error' or 'none', got 'None'"),
        (lambda data: data.pop(["number"], ["txt"]), "no object column 'txt'; did you mean 'text'"),
        (lambda data: data.pop(["number"], ["text"], ["stp"]), "no meta key 'stp'; did you mean 'step'"),
        (lambda data: data.rename("x", "y"), "no tensor column 'x'; there are: number, square"),
        (lambda data: data.rename("number", "pairs"), "'pairs' exists already; pop it before renaming 'number'"),
        (lambda data: data.rename(["number", "square"], ["x", "x"]), "'x' exists already; pop it before renaming 'number'"),
        (lambda data: data.rename(["number", "square"], ["x"]), r"as many new names as old ones, got 2 and 1: \['number', 'sq"),
        (lambda data: data.rename(["number", "number"], ["x", "y"]), r"a column twice: \['number', 'number'\] to \['x', 'y'\]"),
        (lambda data: data.rename("number", "text"), "object column 'text' exists already; pop it before renaming 'number'"),
        (lambda data: data.rename(["square", "nmber"], ["x", "y"]), "no tensor column 'nmber'; did you mean 'number'"),
    ],
)
def test_an_unknown_name_changes_nothing(call: Any, message: str) -> None:
    data = batch_of(FOUR)
    with pytest.raises(DataError, match=message):
        call(data)
    check(data, FOUR)


def test_several_columns_are_renamed_at_once_and_may_swap() -> None:
    data = batch_of(FOUR)
    number, square = data.batch["number"], data.batch["square"]
    data.rename(["number", "square", "pairs"], ["square", "number", "p"])
    assert list(data.batch)[:5] == ["square", "number", "tokens", "gains", "p"]
    assert (data.batch["square"] is number, data.batch["number"] is square) == (True, True)


def test_a_deep_selection_copies_the_objects() -> None:
    data = DataProto({"x": torch.ones(1)}, {"o": [[1]]}, {"m": [1]})
    data.select(deepcopy=True).non_tensor_batch["o"][0].append(2)
    assert data.non_tensor_batch["o"][0] == [1]
    data.select().non_tensor_batch["o"][0].append(2)
    assert data.non_tensor_batch["o"][0] == [1, 2]


def test_from_single_dict_sorts_values_by_their_type() -> None:
    meta = {"step": 1}
    data = DataProto.from_single_dict({"x": torch.ones(2), "o": np.array(["a", "b"])}, meta, auto_padding=True)
    assert (list(data.batch), data.non_tensor_batch["o"].tolist(), data.is_padding_enabled()) == (["x"], ["a", "b"], True)
    assert meta == {"step": 1}
    with pytest.raises(DataError, match="column 'o' is a list: make it a tensor or, by object_column, an array"):
        DataProto.from_single_dict({"o": [1]})


@pytest.mark.parametrize("rows", ["ab", {"a": 1}, {1, 2}, 7, None, np.array(3), np.array("ab"), np.array(None)])
def test_values_that_are_not_lists_of_rows_are_not_object_columns(rows: Any) -> None:
    with pytest.raises(DataError, match=f"column 'o': .* one object per row, got {type(rows).__name__} "):
        DataProto(non_tensor_batch={"o": rows})


def test_columns_that_were_assigned_are_checked_when_asked() -> None:
    data = batch_of(FOUR)
    data.check_consistency()
    data.batch["new"] = torch.ones(3)
    with pytest.raises(DataError, match="'new' has 3 rows, but 'number' has 4"):
        data.check_consistency()


# -- union --------------------------------------------------------------------------------------------------------------


def test_union_adds_in_place_and_accepts_equal_values() -> None:
    data = DataProto({"a": torch.tensor([1.0, NAN]), "j": ragged([[1], [2, 3]])}, {"o": [[NAN], None]}, {"x": NAN})
    other = DataProto({"a": torch.tensor([1.0, NAN]), "k": ragged([[4], [5, 6]])}, {"o": [[NAN], None]}, {"x": NAN, "y": 2})
    assert data.union(other) is data
    assert (list(data.batch), data.meta_info["y"]) == (["a", "j", "k"], 2)
    assert lists_of(data.batch["j"] * data.batch["k"]) == [[4], [10, 18]]


EQUAL_PAIRS: list[tuple[Any, Any]] = [
    (torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])),
    (torch.tensor([1.0, NAN], dtype=torch.bfloat16), torch.tensor([1.0, NAN], dtype=torch.bfloat16)),
    (np.array([NAN, 1.0]), np.array([NAN, 1.0])),
    ({"a": [NAN, (1, np.float32("nan"))]}, {"a": [NAN, (1, np.float32("nan"))]}),
    (ragged([[1], []]), ragged([[1], []])),
]


@dataclass
class Measured:
    """A value with tensors in it, whose own `==` raises, and a field that does not count."""

    values: torch.Tensor
    notes: list[Any] = field(default_factory=list)
    at: float = field(default=0.0, compare=False)


@dataclass(eq=False)
class Handle:
    """A value that equals itself alone."""

    number: int


class Tagged(Handle):
    """Of a dataclass, and compares more than its fields; as one that is less strict may compare less."""

    def __init__(self, number: int, tag: str) -> None:
        super().__init__(number)
        self.tag = tag

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tagged) and (self.number % 10, self.tag) == (other.number % 10, other.tag)

    __hash__ = None  # type: ignore[assignment]


class Encoding(UserDict[str, Any]):
    """A mapping that is not a dict, as tokenizers return."""


def acquaintances(count: int) -> list[dict[str, Any]]:
    """Values each of which holds all others: there are a factorial of ways through them."""
    people: list[dict[str, Any]] = [{"name": number} for number in range(count)]
    for person in people:
        person["knows"] = [other for other in people if other is not person]
    return people


def cyclic(*items: Any) -> list[Any]:
    held = [*items]
    held.append(held)
    return held


class Table:
    """As tables of pandas: `==` answers by a table, which is neither true nor false."""

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])

    __hash__ = None  # type: ignore[assignment]


EQUAL_PAIRS += [
    (Encoding(ids=torch.tensor([1, 2]), gain=NAN), Encoding(ids=torch.tensor([1, 2]), gain=NAN)),
    (
        Measured(torch.tensor([1.0, NAN]), [Encoding(x=np.ones(2))], 1.0),
        Measured(torch.tensor([1.0, NAN]), [Encoding(x=np.ones(2))]),
    ),
    (cyclic(torch.ones(2)), cyclic(torch.ones(2))),
    (torch.tensor([complex(NAN, 1), 2j]), torch.tensor([complex(NAN, 1), 2j])),
    (torch.tensor([complex(NAN, 1), 2j]).to(torch.complex32), torch.tensor([complex(NAN, 1), 2j]).to(torch.complex32)),
    (complex(NAN, 1), complex(NAN, 1)),
    (Tagged(1, "a"), Tagged(11, "a")),
    (acquaintances(12), acquaintances(12)),
    (np.array([complex(NAN, 1), 2j]), np.array([complex(NAN, 1), 2j])),
]
DIFFERENT_PAIRS: list[tuple[Any, Any]] = [
    (torch.tensor([1.0, NAN]), torch.tensor([NAN, 1.0])),
    (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
    (torch.tensor([1.0]), torch.tensor([[1.0]])),
    (torch.tensor([1]), np.array([1])),
    (np.array([1.0]), [1.0]),
    (np.array([1, 2]), np.array([1, 3])),
    ([1, 2], (1, 2)),
    ({"a": 1}, {"a": 1, "b": 2}),
    (ragged([[1], [2]]), ragged([[1, 2], []])),
    (NAN, 1.0),
    (None, 0),
    (Encoding(ids=torch.tensor([1, 2])), Encoding(ids=torch.tensor([1, 3]))),
    (Encoding(ids=1), Encoding(ids=1, more=2)),
    (Encoding(ids=1), {"ids": 2}),
    (Measured(torch.tensor([1.0, 2.0])), Measured(torch.tensor([1.0, 3.0]))),
    (Measured(torch.ones(2)), Measured(torch.ones(2, dtype=torch.float64))),
    (Tagged(1, "a"), Tagged(1, "b")),
    (Measured, Handle),
    (Handle(1), Handle(1)),
    (cyclic(1), cyclic(2)),
    (cyclic(1), cyclic(1, 1)),
    (torch.tensor([complex(NAN, 1), 2j]), torch.tensor([complex(NAN, 1), 3j])),
    (torch.tensor([2j]).to(torch.complex32), torch.tensor([3j]).to(torch.complex32)),
    (torch.eye(2).to_sparse(), torch.eye(2).to_sparse().long()),
]


@pytest.mark.parametrize(("mine", "theirs"), EQUAL_PAIRS)
def test_equal_meta_values_do_not_conflict(mine: Any, theirs: Any) -> None:
    assert list(DataProto(meta_info={"m": mine}).union(DataProto(meta_info={"m": theirs})).meta_info) == ["m"]


@pytest.mark.parametrize(("mine", "theirs"), DIFFERENT_PAIRS)
def test_different_meta_values_conflict(mine: Any, theirs: Any) -> None:
    data = DataProto({"a": torch.ones(1)}, meta_info={"m": mine})
    with pytest.raises(DataError, match="union: meta key 'm' is in both batches with different values"):
        data.union(DataProto({"b": torch.ones(1)}, meta_info={"m": theirs}))
    assert (list(data.batch), data.meta_info["m"] is mine) == (["a"], True)


class Unshown:
    """It equals itself alone, and cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(("make", "shown"), [(Unshown, "a Unshown that cannot be shown"), (lambda: 2**20_000, "20001 bits")])
def test_values_that_cannot_be_printed_are_named_all_the_same(make: Any, shown: str, tmp_path: Path) -> None:
    data, other = DataProto(meta_info={"m": make()}), DataProto(meta_info={"m": make() if shown[0] == "a" else 0})
    for join in (data.union, lambda other: DataProto.concat([data, other])):
        with pytest.raises(DataError, match=shown):
            join(other)
    with pytest.raises(DataError, match=shown):
        data.save_to_disk(tmp_path / "rows")


@pytest.mark.parametrize("make", [Table, lambda: torch.eye(2).to_sparse(), lambda: {"deep": [Table()]}])
def test_values_that_cannot_be_compared_are_named(make: Any) -> None:
    one, other = ({"x": torch.ones(2), "m": make()} for _ in range(2))
    data, second = (DataProto({"x": sides["x"]}, meta_info={"m": sides["m"]}) for sides in (one, other))
    with pytest.raises(DataError, match=r"union: meta key 'm' is in both batches: values of .* cannot be compared .*select"):
        data.union(second)
    with pytest.raises(DataError, match=r"concat: meta 'm', parts 0 and 1: values of .* cannot be compared .*merges itself"):
        DataProto.concat([data, second])
    rows, others = (DataProto(non_tensor_batch={"o": ["a", sides["m"]]}) for sides in (one, other))
    with pytest.raises(DataError, match=r"union: object column 'o' is in both batches: row 1: values of .* cannot be compared"):
        rows.union(others)
    with pytest.raises(AssertionError, match=r"entry 'm': values of .* cannot be compared"):
        tu.assert_tensordict_eq(*(tu.get_tensordict({}, {"m": sides["m"]}) for sides in (one, other)))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (DataProto({"new": torch.ones(4), "number": torch.ones(4)}), "tensor column 'number'"),
        (DataProto({"new": torch.ones(4), "tokens": ragged([[1, 2], [3], [4], [5, 6]])}), "tensor column 'tokens'"),
        (DataProto({"new": torch.ones(4)}, {"text": ["a", None, "c", "D"]}), "object column 'text'"),
        (DataProto({"new": torch.ones(4)}, {}, {"step": 8}), "meta key 'step'"),
        (DataProto({"text": torch.ones(4)}), "'text' is of tensors in one batch and of objects in the other; .* select"),
        (DataProto({}, {"number": list("abcd")}), "'number' is of tensors in one batch and of objects in the other"),
        (DataProto({"new": torch.ones(3)}), "equal row counts, got 4 and 3"),
    ],
)
def test_a_conflict_names_the_column_and_changes_nothing(other: DataProto, message: str) -> None:
    data, before = batch_of(FOUR), copy.copy(other.batch)
    with pytest.raises(DataError, match=message):
        data.union(other)
    check(data, FOUR)
    assert other.batch.keys() == before.keys()
    assert len(data.batch.keys()) == 7


# -- concat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"a": torch.ones(1), "b": torch.ones(1)},
            {"a": torch.ones(1), "c": torch.ones(1)},
            r"part 1 .*missing \['b'\], extra \['c'\]",
        ),
        ({"a": torch.ones(1)}, {"a": torch.ones(1, dtype=torch.int64)}, r"'a' differs between parts: float32\[1\], int64\[1\]"),
        (
            {"a": torch.ones(1, 2)},
            {"a": ragged([[1.0, 1.0]], torch.float32)},
            r"'a' differs between parts: float32\[1, 2\], float32\[1, \*\]",
        ),
        ({"a": torch.ones(1, 2)}, {"a": torch.ones(1, 3)}, r"'a' have different shapes: \[\(2,\), \(3,\)\]; make it jagged"),
        (
            {"a": ragged([[[1, 2]]], torch.int64, 2)},
            {"a": ragged([[[1]]], torch.int64, 1)},
            r"'a' differs.*int64\[1, \*, 2\], int64\[1, \*, 1\]",
        ),
    ],
)
def test_parts_that_do_not_fit_are_named(first: dict[str, Tensor], second: dict[str, Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataProto.concat([DataProto(first), DataProto(second)])


def test_concat_of_no_parts_and_of_different_object_columns_is_refused() -> None:
    with pytest.raises(DataError, match="at least one batch"):
        DataProto.concat([])
    with pytest.raises(DataError, match=r"part 1 .* object columns: missing \['o'\], extra \['p'\]"):
        DataProto.concat([DataProto(non_tensor_batch={"o": [1]}), DataProto(non_tensor_batch={"p": [1]})])


def test_missing_columns_are_not_filled_where_one_name_is_two_columns() -> None:
    twice = DataProto({"x": torch.ones(1)})
    twice.non_tensor_batch["x"] = object_column(["a"])
    with pytest.raises(DataError, match="part 1 has a tensor column and an object column 'x'; rename or pop one of them"):
        DataProto.concat([DataProto({"x": torch.ones(1)}), twice], missing="none")


class Steps:
    """A meta value of a user's own, which knows how to merge."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def merge(self, others: Sequence[Steps], /) -> Steps:
        return Steps(*self.numbers, *(number for other in others for number in other.numbers))


def test_metrics_and_other_mergeables_merge_when_batches_are_joined() -> None:
    parts_ = [
        DataProto(meta_info={"metrics": Metrics({"loss": Mean(4, 1), "tokens": Sum(1)}), "steps": Steps(1)}),
        DataProto(meta_info={"metrics": Metrics({"loss": Mean(3, 3), "rows": Sum(5)}), "steps": Steps(2, 3)}),
        DataProto(),
    ]
    meta = DataProto.concat(parts_).meta_info
    assert meta["metrics"].to_floats() == {"loss": 1.75, "tokens": 1.0, "rows": 5.0}
    assert isinstance(meta["steps"], Mergeable)
    assert meta["steps"].numbers == (1, 2, 3)


def test_other_meta_must_agree_but_may_be_missing() -> None:
    data = DataProto.concat(
        [DataProto(meta_info={"a": 1}), DataProto(meta_info={"b": NAN}), DataProto(meta_info={"b": NAN, "a": 1})]
    )
    assert data.meta_info["a"] == 1
    assert data.meta_info.keys() == {"a", "b"}
    with pytest.raises(DataError, match="meta 'a' must be equal in all parts, got 1 in part 1 and 2 in part 2"):
        DataProto.concat([DataProto(), DataProto(meta_info={"a": 1}), DataProto(meta_info={"a": 2})])


# -- copies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [DataProto.clone, copy.deepcopy])
def test_a_clone_shares_nothing(copied: Any) -> None:
    data = batch_of(FOUR)
    clone = copied(data)
    check(clone, FOUR)
    for key in ("number", "square"):
        clone.batch[key].fill_(5)
    for key in ("tokens", "gains", "pairs", "places", "marks"):
        for tensor in parts(clone.batch[key]):
            tensor.fill_(5)
    clone.non_tensor_batch["text"][0] = "changed"
    clone.meta_info["notes"]["seen"].append(2)
    check(data, FOUR)
    assert data.meta_info == META


class Itself:
    """A meta value that merges with no others to itself."""

    def __init__(self) -> None:
        self.seen = [1]

    def merge(self, others: Sequence[Itself], /) -> Itself:
        return self


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_joined_shares_no_meta_with_its_parts(count: int) -> None:
    metrics = [{"lens": np.array([1, 2]), "texts": [["a"]]} for _ in range(count)]
    parts_ = [DataProto({"x": torch.ones(1)}, meta_info={"metrics": one, "own": Itself(), "plain": [1]}) for one in metrics]
    joined = DataProto.concat(parts_).meta_info
    joined["metrics"]["lens"][0][0] = 9
    joined["metrics"]["texts"][0].append("b")
    joined["own"].seen.append(2)
    joined["plain"].append(2)
    assert [(one["lens"].tolist(), one["texts"]) for one in metrics] == [([1, 2], [["a"]])] * count
    assert [(part.meta_info["own"].seen, part.meta_info["plain"]) for part in parts_] == [([1], [1])] * count


def test_a_tensordict_shares_no_meta_with_its_batch() -> None:
    data = DataProto({"x": torch.ones(1)}, meta_info={"m": [1]})
    table = data.to_tensordict()
    table["m"].append(2)
    DataProto.from_tensordict(table).meta_info["m"].append(3)
    assert (data.meta_info["m"], table["m"]) == ([1], [1, 2])


def test_the_constructor_takes_meta_values_as_they_are() -> None:
    """As it takes columns: what is cut from it shares none."""
    meta: dict[str, Any] = {"m": [1]}
    data = DataProto({"x": torch.ones(1)}, meta_info=meta)
    assert data.meta_info is not meta
    assert data.meta_info["m"] is meta["m"]
    data[:].meta_info["m"].append(2)
    assert meta == {"m": [1]}


def test_a_clone_copies_the_objects_of_rows() -> None:
    data = DataProto(non_tensor_batch={"o": [[1], [2]]})
    data.clone().non_tensor_batch["o"][0].append(9)
    assert data.non_tensor_batch["o"].tolist() == [[1], [2]]


def test_repr_shows_columns_and_no_values() -> None:
    assert repr(batch_of(FOUR)) == (
        "DataProto(4 rows; number: int64[4], square: bfloat16[4, 2], tokens: int64[4, *], gains: float32[4, *], "
        "pairs: float64[4, *, 2], places: int64[4, 2, *], marks: float32[4, 2, *], text: objects; meta: step, notes)"
    )
    assert repr(DataProto()) == "DataProto(0 rows; ; meta: none)"


@pytest.mark.parametrize("value", ["no", "", 0, None])
def test_auto_padding_is_true_or_false(value: object) -> None:
    with pytest.raises(DataError, match=f"auto_padding must be True or False, got {value!r}"):
        DataProto({"x": torch.ones(2)}, auto_padding=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_columns_of_which_rows_cannot_be_cut_are_refused(layout: torch.layout) -> None:
    sparse = torch.eye(3).to_sparse(layout=layout)
    message = f"tensor column 's' has layout {layout}, of which rows cannot be cut: use .to_dense"
    with pytest.raises(DataError, match=message):
        DataProto({"s": sparse})
    data = DataProto({"x": torch.ones(3)}, meta_info={"whole": sparse})
    data.batch["s"] = sparse
    with pytest.raises(DataError, match=message):
        pickle.dumps(data)

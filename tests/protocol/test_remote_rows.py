"""`RemoteRows` do what `DataProto` does with the same rows: values, lengths, marks and messages; and blocks are asked for what
is read and nothing else.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.errors import DataError
from podium.protocol import DataProto, equality, object_column
from podium.protocol import jagged as jg
from podium.protocol.blocks import IN_HEADER_BYTES, Block, Header, LocalBlock, Read, selected, to_header_and_block
from podium.protocol.column_types import ColumnType, bytes_of_columns
from podium.protocol.remote_concat import concat_remote_rows
from podium.protocol.remote_rows import RemoteRows
from tests.protocol.builders import ragged, ragged_last

NAN = float("nan")


@dataclass(frozen=True, eq=False)
class Counted:
    """A block that keeps what it was asked for: columns and row numbers."""

    rows: DataProto
    asked: list[tuple[list[str], list[int]]] = field(default_factory=list)

    def begin(self, keys: Sequence[str], rows: Tensor) -> Read:
        self.asked.append((list(keys), rows.tolist()))
        return lambda: selected(self.rows, keys, rows, deepcopy=True)


@dataclass(frozen=True)
class Pair:
    """The same rows twice."""

    remote: RemoteRows
    plain: DataProto

    def __len__(self) -> int:
        return len(self.plain)


MAKES: tuple[Callable[[DataProto], Block], ...] = (LocalBlock, Counted)


def rows_of(lengths: Sequence[int], first: int = 0) -> DataProto:
    """Rows with columns of every kind, NaN among the values; `x` numbers them, from `first` on."""
    numbers = list(range(first, first + len(lengths)))
    tokens = [[100 * n + i for i in range(length)] for n, length in zip(numbers, lengths, strict=True)]
    return DataProto(
        {
            "x": torch.tensor(numbers, dtype=torch.int64),
            "wide": torch.tensor([[n, NAN] for n in numbers], dtype=torch.bfloat16).reshape(-1, 2),
            "flags": torch.tensor([[n % 2 == 0, n % 3 == 0] for n in numbers], dtype=torch.bool).reshape(-1, 2),
            "byte": torch.tensor([n % 100 - 50 for n in numbers], dtype=torch.int8),
            "tokens": ragged(tokens),
            "gains": ragged([[NAN if token % 7 == 3 else token / 4 for token in row] for row in tokens], torch.float32),
            "pairs": ragged([[(token, NAN)] * (token % 3) for token in numbers], torch.float64, 2),
            "places": ragged_last([[row, row] for row in tokens]),
        },
        {"text": [f"row {n}" for n in numbers], "note": [None if n % 2 else {"n": [n, NAN]} for n in numbers]},
        {"step": 7, "seen": [1, {"deep": 2}]},
    )


COLUMNS = (*rows_of([1]).batch, *rows_of([1]).non_tensor_batch)
JAGGED = ("tokens", "gains", "pairs", "places")


def header_of(rows: DataProto, away: Iterable[str]) -> tuple[Header, DataProto]:
    """As `to_header_and_block`, but these columns stay away, whatever their size."""
    block = rows.select([key for key in rows.batch if key in away], [key for key in rows.non_tensor_batch if key in away], [])
    here = rows.select(
        [key for key in rows.batch if key not in block.batch],
        [key for key in rows.non_tensor_batch if key not in block.non_tensor_batch],
    )
    lengths = {key: jg.lengths_of(column) for key, column in block.batch.items() if jg.is_jagged(column)}
    lengths = {key: next(one for one in lengths.values() if torch.equal(one, mine)) for key, mine in lengths.items()}
    types = {key: ColumnType.of(column) for key, column in {**block.batch, **block.non_tensor_batch}.items()}
    return Header(here, len(rows), types, lengths), block


def pair_of(
    lengths: Sequence[int], away: Iterable[str], blocks: int = 1, make: Callable[[DataProto], Block] = LocalBlock
) -> Pair:
    """Rows as so many ranks return them."""
    plain = rows_of(lengths)
    parts = [header_of(part, away) for part in plain.partition(blocks)]
    return Pair(concat_remote_rows([RemoteRows.of(header, make(block)) for header, block in parts]), plain)


pairs = st.builds(
    pair_of,
    st.lists(st.integers(0, 3), max_size=6),
    st.sets(st.sampled_from(COLUMNS)),
    st.integers(1, 3),
    st.sampled_from(MAKES),
)


# -- every operation, in any order -------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[st.DataObject, Pair], Iterable[Pair]]] = {}


def operation(function: Callable[[st.DataObject, Pair], Iterable[Pair]]) -> Callable[[st.DataObject, Pair], Iterable[Pair]]:
    OPERATIONS[function.__name__] = function
    return function


def numbers_of(data: st.DataObject, count: int) -> list[int]:
    return data.draw(st.lists(st.integers(-count, count - 1), max_size=5)) if count else []


@operation
def slice_rows(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    bound = st.one_of(st.none(), st.integers(-7, 7))
    index = slice(data.draw(bound), data.draw(bound), data.draw(st.sampled_from([None, 1, 2, -1])))
    yield Pair(pair.remote[index], pair.plain[index])


@operation
def mask(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    index = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(pair), max_size=len(pair))), dtype=torch.bool)
    yield Pair(pair.remote[index], pair.plain[index])


@operation
def numbers(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    index = numbers_of(data, len(pair))
    yield Pair(pair.remote.select_idxs(index), pair.plain.select_idxs(index))


@operation
def repeat(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    times, interleave = data.draw(st.integers(0, 2)), data.draw(st.booleans())
    yield Pair(pair.remote.repeat(times, interleave), pair.plain.repeat(times, interleave))


@operation
def sample_level_repeat(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    times = data.draw(st.lists(st.integers(0, 2), min_size=len(pair), max_size=len(pair)))
    yield Pair(pair.remote.sample_level_repeat(times), pair.plain.sample_level_repeat(times))


@operation
def partition(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    count = data.draw(st.integers(1, 4))
    return map(Pair, pair.remote.partition(count), pair.plain.partition(count))


@operation
def split(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    size = data.draw(st.integers(1, 4))
    return map(Pair, pair.remote.split(size), pair.plain.split(size))


@operation
def mini_batches(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    how: dict[str, Any] = {
        "seed": data.draw(st.sampled_from([None, 3])),
        "last": data.draw(st.sampled_from(["short", "drop", "pad"])),
    }
    return map(Pair, pair.remote.make_iterator(3, 2, **how), pair.plain.make_iterator(3, 2, **how))


@operation
def fill(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    if len(pair):
        first, size = torch.arange(data.draw(st.integers(0, len(pair)))), len(pair) + data.draw(st.integers(0, 2))
        yield Pair(pair.remote.filled(first, size), pair.plain.filled(first, size))
    yield Pair(pair.remote.unmarked(), pair.plain.unmarked())


@operation
def concat_of_one_source(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    parts = [numbers_of(data, len(pair)) for _ in range(data.draw(st.integers(1, 3)))]
    yield Pair(
        concat_remote_rows([pair.remote[part] for part in parts]),
        DataProto.concat([pair.plain[part] for part in parts]),
    )


@operation
def select(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    tensors = data.draw(st.none() | st.lists(st.sampled_from([*pair.plain.batch]), unique=True)) if pair.plain.batch else None
    objects = data.draw(st.sampled_from([None, [], [*pair.plain.non_tensor_batch][:1]]))
    meta = data.draw(st.sampled_from([None, [], [*pair.plain.meta_info][:1]]))
    yield Pair(pair.remote.select(tensors, objects, meta), pair.plain.select(tensors, objects, meta))


@operation
def drop(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    names = [*pair.plain.batch, *pair.plain.non_tensor_batch]
    dropped = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=2)) if names else []
    kept = [[key for key in table if key not in dropped] for table in (pair.plain.batch, pair.plain.non_tensor_batch)]
    yield Pair(pair.remote.drop(dropped), pair.plain.select(*kept))


@operation
def rename(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    old = data.draw(st.lists(st.sampled_from([*pair.plain.batch]), unique=True, max_size=2)) if pair.plain.batch else []
    new = [f"{key}'" for key in old]
    if not set(new) & pair.plain.batch.keys():
        yield Pair(pair.remote.rename(old, new), pair.plain.clone().rename(old, new))


@operation
def union_of_values(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    added = DataProto({"reward": torch.arange(float(len(pair)))}, {"why": list(range(len(pair)))}, {"rewarded": True})
    if not pair.plain.batch.keys() & added.batch.keys():
        yield Pair(pair.remote.union(added), pair.plain.clone().union(added))


@operation
def union_of_other_rows(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    keys = data.draw(st.lists(st.sampled_from([*pair.plain.batch]), unique=True)) if pair.plain.batch else []
    new = [f"{key}+" for key in keys]
    if len(pair) and keys and not set(new) & pair.plain.batch.keys():
        order = data.draw(st.permutations(range(len(pair))))
        theirs = Pair(
            pair.remote[order].select(keys, [], []).rename(keys, new), pair.plain[order].select(keys, [], []).rename(keys, new)
        )
        theirs = Pair(theirs.remote.unmarked(), theirs.plain.unmarked())
        yield Pair(pair.remote.union(theirs.remote), pair.plain.clone().union(theirs.plain))


@operation
def send(data: st.DataObject, pair: Pair) -> Iterable[Pair]:
    same(pair.remote.narrowed().fetched(), pair.plain)
    return ()


@given(data=st.data(), first=pairs)
def test_any_sequence_of_operations_gives_the_result_of_dataproto(data: st.DataObject, first: Pair) -> None:
    every = [first]
    for _ in range(4):
        pair = data.draw(st.sampled_from(every))
        asked = count_asked(every)
        made = list(OPERATIONS[data.draw(st.sampled_from(sorted(OPERATIONS)), label="operation")](data, pair))
        assert count_asked(every) == asked or not made, "a row operation read rows"
        for one in made:
            check(one)
        every += made
    for pair in every:
        check(pair)


@pytest.mark.slow
@settings(settings.get_profile("long"))
@given(data=st.data(), first=pairs)
def test_any_long_sequence_of_operations(data: st.DataObject, first: Pair) -> None:
    test_any_sequence_of_operations_gives_the_result_of_dataproto.hypothesis.inner_test(data, first)  # type: ignore[attr-defined]


@given(data=st.data(), first=pairs, second=pairs, third=pairs)
def test_local_and_remote_parts_are_joined(data: st.DataObject, first: Pair, second: Pair, third: Pair) -> None:
    """A column may be here in one part and away in another, renamed or not."""
    parts = [first, second, third, Pair(RemoteRows.of_local(first.plain), first.plain)]
    renamed = data.draw(st.lists(st.sampled_from([*first.plain.batch]), unique=True, max_size=3))
    new = [f"{key}'" for key in renamed]
    parts = [Pair(one.remote.rename(renamed, new), one.plain.clone().rename(renamed, new)) for one in parts]
    parts = [Pair(one.remote[rows], one.plain[rows]) for one in parts for rows in [numbers_of(data, len(one))]]
    parts = data.draw(st.permutations(parts))
    joined = Pair(concat_remote_rows([one.remote for one in parts]), DataProto.concat([one.plain for one in parts]))
    check(joined)
    same(joined.remote.narrowed().fetched(), joined.plain)
    for one in parts:
        check(one)


@given(data=st.data(), pair=pairs, away=st.sets(st.sampled_from(COLUMNS)), key=st.sampled_from(["x", "text"]))
def test_union_on_a_local_or_remote_column(data: st.DataObject, pair: Pair, away: set[str], key: str) -> None:
    if not len(pair):
        return
    order = data.draw(st.permutations(range(len(pair))))
    other = pair_of([len(row.batch["tokens"]) for row in pair.plain], away, 2)
    other = Pair(other.remote[order], other.plain[order])
    names = ["tokens", "gains"]
    new = ["tokens+", "gains+"]
    keys = ([*names, "x"], []) if key == "x" else (names, ["text"])
    theirs = Pair(other.remote.select(*keys).rename(names, new), other.plain.select(*keys).rename(names, new))
    check(Pair(pair.remote.union(theirs.remote, on=key), pair.plain.clone().union(theirs.plain, on=key)))
    check(Pair(pair.remote.union(theirs.plain, on=key), pair.plain.clone().union(theirs.plain, on=key)))


# -- what is read ------------------------------------------------------------------------------------------------------


def counted(lengths: Sequence[int], blocks: int, away: Iterable[str] = COLUMNS) -> tuple[RemoteRows, list[Counted]]:
    made: list[Counted] = []

    def make(block: DataProto) -> Counted:
        made.append(Counted(block))
        return made[-1]

    return pair_of(lengths, away, blocks, make).remote, made


def test_get_reads_only_its_rows_and_columns_of_the_blocks_that_have_them() -> None:
    rows, blocks = counted([1, 2, 3, 0, 2, 1], blocks=3)
    found = rows[[4, 0, 5, 0]].get(["tokens", "text"])
    assert found.non_tensor_batch["text"].tolist() == ["row 4", "row 0", "row 5", "row 0"]
    assert [block.asked for block in blocks] == [
        [(["tokens", "text"], [0, 0])],
        [],
        [(["tokens", "text"], [0, 1])],
    ]


def test_row_operations_do_not_read_blocks() -> None:
    rows, blocks = counted([1, 2, 3, 0, 2, 1], blocks=3)
    joined = concat_remote_rows([rows[::-1], rows.repeat(2), *rows.partition(4)]).rename("tokens", "ids").drop(["wide"])
    list(joined.union(rows.select(["gains"], [], []).rename("gains", "g").repeat(4)).make_iterator(5, 1, 3, last="pad"))
    assert joined.lengths("ids").sum() == 36
    assert joined.column_bytes()["ids"] == 36 * 8
    joined.narrowed()
    repr(joined)
    assert [block.asked for block in blocks] == [[], [], []]


@given(data=st.data(), lengths=st.lists(st.integers(0, 3), max_size=6), blocks=st.integers(1, 3))
def test_each_row_is_read_as_often_as_it_occurs(data: st.DataObject, lengths: list[int], blocks: int) -> None:
    away = data.draw(st.sets(st.sampled_from(COLUMNS)))
    rows, held = counted(lengths, blocks, away)
    picked = numbers_of(data, len(lengths))
    key = data.draw(st.sampled_from(COLUMNS))
    rows[picked].get([key])
    asked = [one for block in held for one in block.asked]
    assert sum(len(numbers) for _, numbers in asked) == (len(picked) if key in away else 0)
    assert all(keys == [key] for keys, _ in asked)
    assert all(numbers for _, numbers in asked), "a block was asked for nothing"


def test_only_the_selected_rows_and_columns_of_a_local_block_are_sent() -> None:
    local = RemoteRows.of_local(rows_of([1, 2, 3, 0, 2, 1]))
    away = pair_of([1, 1], COLUMNS, make=lambda block: LocalBlock(block, is_of_rank=True)).remote
    sent = concat_remote_rows([local, away])[[3, 1, 1, 7]].select(["x", "tokens"], [], []).narrowed()
    held = [block.rows for block in sent.blocks if isinstance(block, LocalBlock)]
    assert [sorted(block.batch) for block in held] == [["tokens", "x"]] * 2
    assert [block.batch["x"].tolist() for block in held] == [[1, 3], [1]]
    assert (sent.column_bytes()["x"], sent.local_bytes()["x"]) == (8, 3 * 8)
    assert sent.fetched().batch["x"].tolist() == [3, 1, 1, 1]


# -- nothing changes, nothing is shared --------------------------------------------------------------------------------


@pytest.mark.parametrize("away", [(), COLUMNS], ids=["here", "away"])
def test_get_returns_private_copies(away: Sequence[str]) -> None:
    pair = pair_of([2, 0, 3], away, 2)
    for rows in (pair.remote, pair.remote[1:], pair.remote[[2, 0]], pair.remote[:2]):
        found = rows.get()
        for column in found.batch.values():
            (column.values() if column.is_nested else column).fill_(1)
        found.non_tensor_batch["text"][:] = "mine"
        for note in found.non_tensor_batch["note"]:
            if note is not None:
                note["n"][0] = "mine"
        found.meta_info["seen"][1]["deep"] = "mine"
    check(pair)
    assert pair.remote.get().meta_info["seen"] == [1, {"deep": 2}]


@pytest.mark.parametrize("away", [(), COLUMNS], ids=["here", "away"])
def test_reported_values_of_rows_are_the_callers_own(away: Sequence[str]) -> None:
    pair = pair_of([2, 0, 3], away)
    pair.remote.lengths("tokens").zero_()
    pair.remote.meta_info["seen"].append(3)
    pair.remote.column_names().clear()
    pair.remote.padding_mask.fill_(True)
    check(pair)


def test_a_union_does_not_change_when_its_inputs_do() -> None:
    reward, why = torch.zeros(3), [["because"], [], []]
    joined = pair_of([2, 0, 3], COLUMNS).remote.union(DataProto({"reward": reward}, {"why": why}))
    reward.fill_(9)
    why[0].append("written later")
    found = joined.get(["reward", "why"])
    assert found.batch["reward"].tolist() == [0, 0, 0]
    assert found.non_tensor_batch["why"].tolist() == [["because"], [], []]


def test_a_copy_is_the_rows_themselves() -> None:
    rows = pair_of([2, 0, 3], COLUMNS).remote
    assert copy.deepcopy(rows) is rows


# -- columns beside a header -------------------------------------------------------------------------------------------


def test_small_columns_come_with_the_header_jagged_and_large_ones_stay() -> None:
    few = IN_HEADER_BYTES // 8
    rows = DataProto(
        {
            "small": torch.zeros(2, few // 2, dtype=torch.int64),
            "large": torch.zeros(2, few // 2 + 1, dtype=torch.int64),
            "jagged": ragged([[1], []]),
        },
        {
            "short": ["a", {"b": ["c"]}],
            "long": ["a" * IN_HEADER_BYTES, "b"],
            "array": [torch.zeros(few), {"deep": [torch.zeros(few)]}],
        },
    )
    header, block = to_header_and_block(rows)
    assert sorted(header.column_types) == ["array", "jagged", "large", "long"]
    assert [str(header.column_types[key]) for key in ("array", "jagged", "large")] == [
        "objects",
        "int64[B, *]",
        f"int64[B, {few // 2 + 1}]",
    ]
    assert {*header.local.batch, *header.local.non_tensor_batch} == {"small", "short"}
    found = RemoteRows.of(header, LocalBlock(block))
    same(found.get(["small", "large", "jagged", "short", "long"]), rows.select(None, ["short", "long"]))
    sizes = RemoteRows.of(header, Counted(block)).column_bytes()
    assert (sizes["large"], sizes["jagged"]) == (8 * (few + 2), 8)
    assert sizes["long"] >= IN_HEADER_BYTES
    assert (found.column_bytes(), found.local_bytes()) == (
        {},
        {**bytes_of_columns(header.local), **sizes},
    )  # `LocalBlock` is here


def test_bytes_of_a_column_count_as_local_or_remote_by_row() -> None:
    lengths = [1, 2, 3, 0, 2, 1]
    away, _ = counted(lengths[:3], blocks=2)
    joined = concat_remote_rows([away, RemoteRows.of_local(rows_of(lengths[3:], first=3))])
    sizes, here = joined.column_bytes(), joined.local_bytes()
    assert (sizes["tokens"], here["tokens"]) == (6 * 8, 3 * 8)
    assert ("tokens" in joined[3:].column_bytes(), joined[3:].local_bytes()["tokens"]) == (False, 3 * 8)
    assert (joined[:3].column_bytes()["tokens"], "tokens" in joined[:3].local_bytes()) == (6 * 8, False)
    mixed = joined[[4, 0, 4, 2]]
    assert (mixed.column_bytes()["tokens"], mixed.local_bytes()["tokens"]) == (4 * 8, 4 * 8)


def test_a_tensor_and_an_object_column_of_one_name_are_refused() -> None:
    twice = DataProto({"x": torch.arange(2)})
    twice.non_tensor_batch["x"] = object_column(["a", "b"])
    with pytest.raises(DataError, match="'x' is both a tensor column and an object column"):
        to_header_and_block(twice)


def test_rows_of_a_tensordict_are_read_as_one() -> None:
    header, block = header_of(rows_of([1, 0, 2]), JAGGED)
    rows = RemoteRows.of(Header(header.local, 3, header.column_types, header.lengths, is_tensordict=True), LocalBlock(block))
    found = concat_remote_rows([rows[1:], rows[:1]]).union(DataProto({"r": torch.arange(3)})).get()
    assert type(found).__name__ == "TensorDict"
    assert DataProto.from_tensordict(found).batch["x"].tolist() == [1, 2, 0]


def concat_of(rows: DataProto | RemoteRows) -> Callable[..., Any]:
    return DataProto.concat if isinstance(rows, DataProto) else concat_remote_rows


# -- errors ------------------------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Any], Any]] = {
    "a mask of another length": lambda rows: rows[torch.tensor([True])],
    "a number out of range": lambda rows: rows.select_idxs([0, 3]),
    "numbers that are not ints": lambda rows: rows.select_idxs([0.5]),
    "repeat": lambda rows: rows.repeat(-1),
    "repeat counts": lambda rows: rows.sample_level_repeat([1, 2]),
    "repeat counts below 0": lambda rows: rows.sample_level_repeat([1, -2, 0]),
    "no parts": lambda rows: rows.partition(0),
    "chunks that do not divide": lambda rows: rows.chunk(2),
    "parts of no rows": lambda rows: rows.split(0),
    "mini-batches that do not divide": lambda rows: rows.make_iterator(2, 1),
    "an unknown tensor": lambda rows: rows.select(["tokenz"]),
    "an unknown object": lambda rows: rows.select(None, ["tex"]),
    "objects among tensors": lambda rows: rows.select(["text"]),
    "unknown meta": lambda rows: rows.select(None, None, ["stepp"]),
    "a name for names": lambda rows: rows.select("x"),
    "an unknown name to change": lambda rows: rows.rename("y", "z"),
    "objects under another name": lambda rows: rows.rename("text", "words"),
    "a name that is taken": lambda rows: rows.rename("x", "byte"),
    "names that do not pair": lambda rows: rows.rename(["x", "byte"], ["y"]),
    "fewer rows": lambda rows: rows.union(rows[:1]),
    "more rows": lambda rows: rows.union(rows.repeat(2)),
    "other meta": lambda rows: rows.union(DataProto(meta_info={"step": 8})),
    "rows to join by that are not there": lambda rows: rows.union(rows[[0, 1, 1]], on="x"),
    "nothing to join by": lambda rows: rows.union(rows, on="id"),
    "nothing to concatenate": lambda rows: concat_of(rows)([]),
    "parts without a column": lambda rows: concat_of(rows)([rows, rows.select(["x", "byte"])]),
    "parts without objects": lambda rows: concat_of(rows)([rows, rows.select(None, ["text"])]),
    "parts of other shapes": lambda rows: concat_of(rows)([rows, rows.select(["byte"], []), rows]),
    "parts of other dtypes": lambda rows: concat_of(rows)(
        [rows.select(["x"], []), rows.select(["byte"], []).rename("byte", "x")]
    ),
}


@pytest.mark.parametrize("away", [(), COLUMNS, ("x", "text", "tokens")], ids=["here", "away", "some"])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_calls_have_the_messages_of_dataproto(what: str, away: Sequence[str]) -> None:
    pair = pair_of([1, 2, 0], away, 2)
    messages = []
    for rows in (pair.plain, pair.remote):
        with pytest.raises(DataError) as caught:
            WRONG[what](rows)
        messages.append(str(caught.value))
    assert outline(messages[1]) == outline(messages[0])
    check(pair)


def outline(message: str) -> tuple[str, list[str]]:
    """The message, and what it lists, in any order."""
    head, _, listed = re.sub(r"int(64|8)\[3\]", r"int\1[B]", message).partition("; there are: ")
    return head, sorted(listed.split(", "))


def test_names_are_never_changed_in_some_parts_only() -> None:
    rows = pair_of([1, 2], JAGGED).remote
    swapped = rows.rename(["tokens", "places"], ["places", "tokens"])
    with pytest.raises(DataError, match=r"concat: column '(tokens|places)' differs between parts"):
        concat_remote_rows([rows, swapped])
    one, other = rows.select(["tokens"], []), rows.select(["gains"], []).rename("gains", "tokens")
    with pytest.raises(DataError, match="differs between parts: int64"):
        concat_remote_rows([one, other])
    more = RemoteRows.of(*_as_source("more")).rename("more", "tokens")
    with pytest.raises(DataError, match="'tokens' must have one name in the parts' blocks, got 'tokens', 'more'"):
        concat_remote_rows([one, more])
    twice = rows.union(rows.select(["tokens"], [], []).rename("tokens", "again"))
    here = RemoteRows.of_local(twice.get())  # in the other part both have one name where they lie
    joined = concat_remote_rows([twice, here[::-1]]).get(["tokens", "again"])
    assert joined.batch["tokens"].values().tolist() == joined.batch["again"].values().tolist() == [0, 100, 101, 100, 101, 0]


def _as_source(name: str) -> tuple[Header, Block]:
    header, block = header_of(DataProto({name: ragged([[1], [2]])}, None, {"step": 7, "seen": [1, {"deep": 2}]}), [name])
    return header, LocalBlock(block)


def test_union_of_a_remote_column_with_itself() -> None:
    pair = pair_of([1, 2, 0], JAGGED)
    moved = pair.remote[[2, 1, 0]]
    same(moved.union(moved.select(["tokens", "x"], [])).get(), pair.plain[[2, 1, 0]])
    with pytest.raises(DataError, match="column 'tokens' is in both batches and remote"):
        pair.remote.union(moved.select(["tokens"], []))
    with pytest.raises(DataError, match="column 'tokens' is in both batches and remote"):
        pair.remote.union(pair.plain.select(["tokens"], []))


def test_an_integer_index_is_refused() -> None:
    with pytest.raises(DataError, match=r"\.get\(\)\[1\]"):
        pair_of([1, 2], JAGGED).remote[1]
    with pytest.raises(DataError, match="'x' is not jagged"):
        pair_of([1, 2], JAGGED).remote.lengths("x")


# -- the same rows -----------------------------------------------------------------------------------------------------


def check(pair: Pair) -> None:
    """Whatever is known or read of the rows is what the values say."""
    remote, plain = pair.remote, pair.plain
    assert len(remote) == len(plain)
    assert remote.column_names() == {*plain.batch, *plain.non_tensor_batch}
    assert equality.equal(remote.meta_info, plain.meta_info)
    assert remote.is_padding_enabled() == plain.is_padding_enabled()
    assert remote.padding_mask.tolist() == plain.padding_mask.tolist()
    for key, column in plain.batch.items():
        if jg.is_jagged(column):
            assert remote.lengths(key).tolist() == jg.lengths_of(column).tolist()
    same(remote.get(), plain)
    for key in sorted(remote.column_names())[:2]:
        found = remote.get([key])
        expected = plain.select([key] if key in plain.batch else [], [key] if key in plain.non_tensor_batch else [])
        same(found, expected)


def same(found: DataProto, expected: DataProto) -> None:
    assert found.batch.keys() == expected.batch.keys()
    assert found.non_tensor_batch.keys() == expected.non_tensor_batch.keys()
    for key, column in expected.batch.items():
        mine = found.batch[key]
        assert (mine.dtype, jg.is_jagged(mine), jg.ragged_dim(mine)) == (
            column.dtype,
            jg.is_jagged(column),
            jg.ragged_dim(column),
        )
        for one, other in zip(jg.parts(mine), jg.parts(column), strict=True) if jg.is_jagged(column) else [(mine, column)]:
            assert one.shape == other.shape, key
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), key
    for key, held in expected.non_tensor_batch.items():
        assert repr(found.non_tensor_batch[key].tolist()) == repr(held.tolist())
    assert equality.equal(found.meta_info, expected.meta_info)
    multiply(found)


def multiply(rows: DataProto) -> None:
    """Jagged columns of equal lengths can be multiplied."""
    jagged = [column for column in rows.batch.values() if jg.is_jagged(column) and jg.parts(column)[0].dim() == 1]
    for one in jagged[1:]:
        if torch.equal(jg.lengths_of(one), jg.lengths_of(jagged[0])):
            assert jg.num_rows(jagged[0] * one) == len(rows)


def count_asked(every: Sequence[Pair]) -> int:
    return sum(len(block.asked) for pair in every for block in set(pair.remote.blocks) if isinstance(block, Counted))

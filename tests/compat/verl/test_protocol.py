"""Names and keywords of `verl.protocol`: what its clients write runs here, and does what its name says."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from podium.compat.verl import (
    DataProto,
    DataProtoItem,
    all_gather_data_proto,
    collate_fn,
    deserialize_single_tensor,
    deserialize_tensordict,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    serialize_single_tensor,
    serialize_tensordict,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)
from podium.errors import DataError, UnknownNameError
from podium.protocol import jagged_from_rows, to_padded


def made(count: int = 4) -> DataProto:
    tokens = jagged_from_rows([torch.full((n % 2 + 1,), n) for n in range(count)])
    tensors = {"x": torch.arange(count), "y": torch.arange(2 * count).reshape(count, 2), "tokens": tokens}
    return DataProto(tensors, {"name": list("abcdefgh"[:count]), "ok": np.arange(count) % 2 == 0}, {"notes": [1]})


def test_keywords_of_verls_clients(tmp_path: Path) -> None:
    data = DataProto.from_dict({"x": torch.arange(4)}, {"n": ["a"] * 4}, {"s": 1}, 1, True)
    assert data.is_padding_enabled()
    assert DataProto.from_single_dict(data={"x": torch.arange(2)}, meta_info={"s": 1}, auto_padding=True).meta_info["s"] == 1
    assert len(data.slice(start=1, end=3, step=1)) == len(data.select_idxs(idxs=[0, 1])) == 2
    assert len(DataProto.concat(data=[data, data])) == 8
    assert data.pop(batch_keys=None, non_tensor_batch_keys=["n"], meta_info_keys=None).non_tensor_batch["n"].tolist() == ["a"] * 4
    padded, added = pad_dataproto_to_divisor(data=data, size_divisor=3)
    assert (len(padded), len(unpad_dataproto(data=padded, pad_size=added))) == (6, 4)
    data.save_to_disk(filepath=tmp_path / "rows")
    assert len(DataProto.load_from_disk(filepath=tmp_path / "rows")) == 4
    item = DataProtoItem(batch={"x": torch.tensor(1)}, non_tensor_batch={"n": "a"})
    assert (item.meta_info, DataProtoItem().batch) == ({}, {})
    rows = TensorDict({"x": torch.arange(2)}, batch_size=[2])
    assert DataProto.from_tensordict(tensor_dict=rows, meta_info={"s": 1}, num_batch_dims=1).meta_info == {"s": 1}
    for call in (
        lambda: DataProto.from_dict({"x": torch.zeros(2, 2)}, num_batch_dims=2),
        lambda: DataProto.from_tensordict(rows, {}, 2),
    ):
        with pytest.raises(AssertionError, match="rows have one batch dim, got num_batch_dims=2"):
            call()


def test_unknown_names_are_key_errors_too_and_show_their_message_as_it_is() -> None:
    for call in (lambda: made().select(["z"]), lambda: made().pop(["z"]), lambda: made().batch["z"]):
        with pytest.raises(KeyError):
            call()
    error = pickle.loads(pickle.dumps(UnknownNameError("no 'z'")))
    assert (str(error), isinstance(error, DataError)) == ("no 'z'", True)


def test_an_item_copies_the_meta_when_it_is_asked_for_it() -> None:
    data = DataProto({"x": torch.arange(4096)}, meta_info={"list": list(range(4096))})
    start = time.process_time()
    assert sum(int(row.batch["x"]) for row in data) == 4095 * 2048
    assert time.process_time() - start < 1  # 5.6 s where each row copies it
    row = data[1]
    row.meta_info["list"].append(0)
    assert len(data.meta_info["list"]) == 4096
    assert pickle.loads(pickle.dumps(row)).meta_info == row.meta_info
    row.meta_info = {}
    assert row.meta_info == {}
    padded, _ = pad_dataproto_to_divisor(made(3), 2)
    assert [bool(DataProto({"i": torch.zeros(1)}, meta_info=row.meta_info).padding_mask) for row in padded] == [False] * 3 + [
        True
    ]


def test_copies_of_the_meta_share_among_one_another_what_the_values_shared() -> None:
    shared = [1, 2]
    meta = made(2).select(meta_info_keys=[]).union(DataProto(meta_info={"a": shared, "b": shared, "c": {"d": shared}})).meta_info
    copied = DataProto({"x": torch.zeros(1)}, meta_info=meta).select().meta_info
    assert copied["a"] is copied["b"] is copied["c"]["d"]
    assert copied["a"] is not meta["a"]


def test_reorder_takes_some_rows_or_repeats_them() -> None:
    data = made()
    data.reorder(torch.tensor([3, 1, 1]))
    assert (data.batch["x"].tolist(), data.non_tensor_batch["name"].tolist()) == ([3, 1, 1], ["d", "b", "b"])


@pytest.mark.parametrize(("candidate", "row"), [("", 3), ("last", 3), ("first", 0)])
def test_padding_adds_marked_copies_in_place(candidate: Any, row: int) -> None:
    data = made()
    data.padding(2, candidate)
    assert data.batch["x"].tolist() == [0, 1, 2, 3, row, row]
    assert data.padding_mask.tolist() == [False] * 4 + [True] * 2
    data.padding(0)
    assert len(data) == 6
    for call, message in (
        (lambda: data.padding(-1), "-1 rows of padding"),
        (lambda: data.padding(1, "middle"), "'first' or the 'last'"),
    ):
        with pytest.raises(DataError, match=message):
            call()
    with pytest.raises(DataError, match="1 rows of padding cannot be added to 0 rows"):
        made()[:0].padding(1)


def test_sizes_and_kinds_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    made().print_size("batch")
    assert capsys.readouterr().out == "batch, tensors: 0.000000 GiB, non_tensor_batch: 0.000000 GiB\n"
    assert made().get_data_info().splitlines() == [
        "batch",
        "  x: int64[4] on cpu",
        "  y: int64[4, 2] on cpu",
        "  tokens: int64[4, *] on cpu",
        "non_tensor_batch",
        "  name: objects",
        "  ok: numpy bool[4]",
        "meta_info",
        "  notes: list",
    ]


def test_collated_items_are_rows_again() -> None:
    data = made()
    joined = collate_fn([data[2], data[0], data[1]])
    assert joined.batch["x"].tolist() == [2, 0, 1]
    assert joined.batch["y"].tolist() == [[4, 5], [0, 1], [2, 3]]
    assert to_padded(joined.batch["tokens"]).tolist() == [[2, 0], [0, 0], [1, 1]]
    assert (joined.non_tensor_batch["ok"].dtype, joined.non_tensor_batch["ok"].sum()) == (bool, 2)
    assert joined.non_tensor_batch["name"].tolist() == ["c", "a", "b"]
    with pytest.raises(DataError, match="item 1 does not have 'name'"):
        collate_fn([data[0], DataProtoItem(data[1].batch, {"ok": True})])


def test_folded_rows_unfold_to_what_they_were() -> None:
    data = made().select(["x", "y"])
    folded = fold_batch_dim(data, new_batch_size=2)
    assert (len(folded), folded.batch["y"].shape, folded.batch["x"].tolist()) == (2, (2, 2, 2), [[0, 1], [2, 3]])
    assert folded.non_tensor_batch["name"].tolist() == [["a", "b"], ["c", "d"]]
    folded.reorder([1, 0])
    again = unfold_batch_dim(pickle.loads(pickle.dumps(folded)), batch_dims=2)
    assert again.batch["y"].tolist() == [[4, 5], [6, 7], [0, 1], [2, 3]]
    assert (again.non_tensor_batch["name"].tolist(), again.non_tensor_batch["ok"].dtype) == (["c", "d", "a", "b"], bool)
    assert again.meta_info == {"notes": [1]}
    for call, message in (
        (lambda: fold_batch_dim(data, 3), "4 rows cannot be folded into 3"),
        (lambda: fold_batch_dim(made(), 2), "column 'tokens' is jagged"),
        (lambda: unfold_batch_dim(data), "column 'x' has 1 dims, of which 2"),
    ):
        with pytest.raises(DataError, match=message):
            call()


def test_arrays_are_unfolded_with_the_tensors() -> None:
    data = DataProto({"y": torch.arange(8).reshape(2, 4)}, {"a": np.arange(4).reshape(2, 2), "n": ["p", "q"]})
    found = data.unfold_column_chunks(2, split_keys=["y", "a"])
    assert found.batch["y"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found.non_tensor_batch["a"].tolist() == [[0], [1], [2], [3]]
    assert found.non_tensor_batch["n"].tolist() == ["p", "p", "q", "q"]
    for key, message in (("n", "column 'n' has one object per row"), ("a", "rows of 2 values, which do not divide by 3")):
        with pytest.raises(DataError, match=message):
            data.unfold_column_chunks(3, [key])


@pytest.mark.parametrize("kind", ["batch", "tensordict"])
def test_union_of_tensors_adds_in_place(kind: str) -> None:
    def columns(**tensors: torch.Tensor) -> Any:
        rows = DataProto(tensors)
        return rows.batch if kind == "batch" else rows.to_tensordict()

    mine = columns(x=torch.arange(2))
    assert union_tensor_dict(mine, columns(x=torch.arange(2), y=torch.ones(2))) is mine
    assert mine["y"].tolist() == [1, 1]
    with pytest.raises(AssertionError, match="tensor column 'x' is in both batches with different values: row 1: 1 and 5"):
        union_tensor_dict(mine, columns(x=torch.tensor([0, 5]), z=torch.ones(2)))
    assert "z" not in mine.keys()  # noqa: SIM118 - a TensorDict


def test_union_of_arrays_adds_in_place() -> None:
    mine = {"a": np.array([0.5, np.nan])}
    assert union_numpy_dict(mine, {"a": np.array([0.5, np.nan]), "b": np.arange(3)}) is mine
    assert mine["b"].tolist() == [0, 1, 2]
    with pytest.raises(AssertionError, match="column 'b' is in both batches with different values"):
        union_numpy_dict(mine, {"b": np.arange(4), "c": np.arange(2)})
    assert list(mine) == ["a", "b"]


def test_tensors_become_plain_values_and_back() -> None:
    for tensor in (torch.arange(6).reshape(2, 3), torch.ones(2, dtype=torch.bfloat16), torch.tensor(True)):
        again = deserialize_single_tensor(serialize_single_tensor(tensor))
        assert (again.dtype, again.shape, torch.equal(again, tensor)) == (tensor.dtype, tensor.shape, True)
    rows = made().select(non_tensor_batch_keys=[], meta_info_keys=[]).to_tensordict()
    again = deserialize_tensordict(pickle.loads(pickle.dumps(serialize_tensordict(rows))))
    assert (again.batch_size, again["tokens"].values().tolist()) == (rows.batch_size, [0, 1, 1, 2, 3, 3])


def test_metrics_of_ranks_may_be_lists_of_dicts() -> None:
    parts = [
        DataProto({"x": torch.zeros(1)}, meta_info={"metrics": m}) for m in ([{"a": 1}, {"a": 2}], {"a": 3}, None, [{"a": [4]}])
    ]
    assert DataProto.concat(parts).meta_info["metrics"] == {"a": [1, 2, 3, 4]}


def test_a_dataloaders_drop_last_drops_the_last_rows() -> None:
    data = made()
    kwargs = {"shuffle": False, "drop_last": True}
    assert [batch.batch["x"].tolist() for batch in data.make_iterator(3, 1, 7, kwargs)] == [[0, 1, 2]]
    with pytest.raises(DataError, match="4 rows make no whole mini-batches of 3"):
        data.make_iterator(3, 1, 7, {"drop_last": False})
    with pytest.raises(DataError, match="drops the last rows, but last='pad'"):
        data.make_iterator(3, 1, 7, kwargs, last="pad")


def _gather(rank: int, meeting: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    data = made(rank + 2)
    data.meta_info = {"rank": rank}
    before = copy.copy(data)
    all_gather_data_proto(data, torch.distributed.group.WORLD)
    padded = to_padded(data.batch["tokens"]).tolist()
    results.put((rank, data.batch["x"].tolist(), padded, data.non_tensor_batch["ok"].tolist(), data.meta_info, len(before)))
    torch.distributed.destroy_process_group()


def test_ranks_gather_one_anothers_rows(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    ranks = [context.Process(target=_gather, args=(rank, str(tmp_path / "meeting"), results)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join(60)
    tokens = [[0, 0], [1, 1], [0, 0], [1, 1], [2, 0]]
    ok = [True, False, True, False, True]
    assert found == [(rank, [0, 1, 0, 1, 2], tokens, ok, {"rank": rank}, rank + 2) for rank in range(2)]

"""Padding rows taken out before something is computed, and put back where rows are counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from podium.errors import DataError
from podium.protocol import DataProto, jagged_from_rows, pad_dataproto_to_divisor, unpad_dataproto, with_padding, without_padding
from podium.protocol.jagged import lengths_of
from podium.protocol.remote_rows import RemoteRows

PADDED = pad_dataproto_to_divisor(DataProto({"x": torch.arange(3)}, {"name": ["a", "b", "c"]}, {"step": 7}), 5)[0]


def test_without_padding_keeps_the_real_rows_in_order_and_no_marks() -> None:
    for rows in (PADDED, PADDED[[4, 0, 3, 1, 2]]):
        real = without_padding(rows)
        assert real.batch["x"].tolist() == [0, 1, 2]
        assert real.meta_info == {"step": 7}
    remote = without_padding(RemoteRows.of_local(PADDED))
    assert remote.get(["x"]).batch["x"].tolist() == [0, 1, 2]


def test_rows_without_padding_are_not_copied() -> None:
    rows = DataProto({"x": torch.arange(3)})
    assert without_padding(rows) is rows
    assert with_padding(rows, torch.zeros(3, dtype=torch.bool)) is rows


@pytest.mark.parametrize("places", [[0, 3], [1, 2], [2, 3], []])
def test_padding_comes_back_at_its_places_as_empty_rows(places: list[int]) -> None:
    mask = torch.zeros(2 + len(places), dtype=torch.bool)
    mask[places] = True
    columns = {"x": torch.tensor([[5.0], [6.0]]), "tokens": jagged_from_rows([torch.tensor([1, 2]), torch.tensor([3])])}
    found = with_padding(DataProto(columns, {"name": ["a", "b"]}, {"step": 7}), mask)
    assert found.padding_mask.tolist() == mask.tolist()
    assert found.batch["x"][mask].flatten().tolist() == [0.0] * len(places)
    assert lengths_of(found.batch["tokens"])[mask].tolist() == [0] * len(places)
    assert found.non_tensor_batch["name"][mask.numpy()].tolist() == [None] * len(places)
    assert without_padding(found).batch["x"].flatten().tolist() == [5.0, 6.0]
    assert without_padding(found).batch["tokens"].values().tolist() == [1, 2, 3]
    assert found.meta_info["step"] == 7


def test_rows_of_nothing_but_padding_keep_their_columns() -> None:
    found = with_padding(DataProto({"x": torch.empty(0, 2, dtype=torch.int32)}, {"name": []}), torch.ones(3, dtype=torch.bool))
    assert found.batch["x"].dtype == torch.int32
    assert found.batch["x"].tolist() == [[0, 0]] * 3
    assert found.padding_mask.all()


def test_a_wrong_number_of_real_rows_is_refused() -> None:
    with pytest.raises(DataError, match="4 rows, 1 of them padding, need 3 rows, got 2"):
        with_padding(DataProto({"x": torch.arange(2)}), torch.tensor([True, False, False, False]))


@pytest.mark.parametrize("mask", [[False, True], torch.tensor([0, 1]), torch.tensor([[False, True]])])
def test_a_mask_of_padding_that_is_not_a_tensor_of_bools_is_refused(mask: Any) -> None:
    with pytest.raises(DataError, match=r"is_padding_B must be a tensor \[B\] of bools, got"):
        with_padding(DataProto({"x": torch.arange(1)}), mask)


def test_marks_of_another_number_of_rows_stay_unknown_when_parts_are_joined() -> None:
    """Each rank hands its shard's meta on with two rows for each that it was sent: no one row can be found to be padding."""
    parts = [DataProto({"x": torch.arange(2 * len(shard))}, meta_info=shard.meta_info) for shard in PADDED.split(3)]
    joined = DataProto.concat(parts)
    for use in (lambda: joined.padding_mask, lambda: without_padding(joined)):
        with pytest.raises(DataError, match="which of these 10 rows are padding is not known"):
            use()
    assert unpad_dataproto(joined, 4).padding_mask.tolist() == [False] * 6  # the caller says which they are
    stale = DataProto({"x": torch.arange(0)}, meta_info={"_podium_padding_rows": (1,), "_podium_padding_of": 2})
    real = DataProto({"x": torch.arange(3)})
    assert DataProto.concat([stale, real]).padding_mask.tolist() == [False] * 3

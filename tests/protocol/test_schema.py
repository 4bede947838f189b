"""Columns held against what is known of them by name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from podium.errors import DataError
from podium.protocol import DataProto, Field, check_fields
from podium.protocol.jagged import jagged

TOKENS = Field("tokens", (torch.int64,), ("B", "*"), "")
LOG_PROBS = Field("log_probs", (torch.float32, torch.float64), ("B", "*"), "")
REWARD = Field("reward", (torch.float32,), ("B",), "")
PLACES = Field("places", (torch.int64,), ("B", "epochs"), "")
UID = Field("uid", (), ("B",), "")
OFFSETS = torch.tensor([0, 2, 3])


def batch(**changed: object) -> DataProto:
    columns = {
        "tokens": jagged(torch.arange(3), OFFSETS),
        "log_probs": jagged(torch.zeros(3), OFFSETS),
        "reward": torch.zeros(2),
        "places": torch.zeros(2, 5, dtype=torch.int64),
        "uid": ["a", "b"],
        **changed,
    }
    tensors = {name: column for name, column in columns.items() if isinstance(column, torch.Tensor)}
    return DataProto(tensors, {name: column for name, column in columns.items() if name not in tensors and column is not None})


def message(rows: DataProto, *fields: Field) -> str:
    with pytest.raises(DataError) as caught:
        check_fields(rows, fields)
    return str(caught.value)


def test_columns_that_are_as_they_should_be_pass_whatever_their_sizes():
    check_fields(batch(), [TOKENS, LOG_PROBS, REWARD, PLACES, UID])
    check_fields(batch(log_probs=jagged(torch.zeros(3).double(), OFFSETS)), [LOG_PROBS])
    check_fields(batch()[:0], [TOKENS, LOG_PROBS, REWARD, PLACES, UID])
    check_fields(batch(), [])


@pytest.mark.parametrize(
    ("field", "column", "expected"),
    [
        (REWARD, torch.zeros(2).double(), "column 'reward' is float64[2], it should be float32 [B]"),
        (REWARD, torch.zeros(2, 1), "column 'reward' is float32[2, 1], it should be float32 [B]"),
        (
            REWARD,
            jagged(torch.zeros(3), OFFSETS),
            "column 'reward' is float32[2, *], it should be float32 [B]",
        ),
        (REWARD, [0.0, 1.0], "column 'reward' is objects, it should be float32 [B]"),
        (TOKENS, torch.zeros(2, 3).long(), "column 'tokens' is int64[2, 3], it should be int64 [B, *]"),
        (
            LOG_PROBS,
            jagged(torch.zeros(3).bfloat16(), OFFSETS),
            "column 'log_probs' is bfloat16[2, *], it should be float32 or float64 [B, *]",
        ),
        (TOKENS, jagged(torch.zeros(3, 4).long(), OFFSETS), "is int64[2, *, 4], it should be int64 [B, *]"),
        (PLACES, jagged(torch.zeros(3).long(), OFFSETS), "column 'places' is int64[2, *], it should be int64 [B, epochs]"),
        (UID, torch.zeros(2), "column 'uid' is float32[2], it should be objects"),
    ],
)
def test_an_error_about_a_column_of_another_kind_says_what_it_should_be(field, column, expected):
    assert message(batch(**{field.name: column}), field).endswith(expected)


def test_the_ragged_dim_has_its_place():
    wide = Field("wide", (torch.int64,), ("B", "4", "*"), "")
    check_fields(batch(wide=jagged(torch.zeros(3, 4).long(), OFFSETS, ragged_dim=2)), [wide])
    found = message(batch(wide=jagged(torch.zeros(3, 4).long(), OFFSETS)), wide)
    assert found == "column 'wide' is int64[2, *, 4], it should be int64 [B, 4, *]"


def test_the_error_of_a_missing_column_has_the_nearest_one():
    found = message(batch(reward=None, rewards=torch.zeros(2)), TOKENS, REWARD)
    assert found.startswith("no column 'reward'; did you mean 'rewards'?; it should be float32 [B];")
    assert "there are: tokens, log_probs, places, rewards, uid" in found
    assert message(DataProto(), UID) == "no column 'uid'; it should be objects; there are: none"


def test_the_first_field_that_does_not_fit_is_named():
    assert "'tokens'" in message(batch(tokens=torch.zeros(2), reward=[1, 2]), UID, TOKENS, REWARD)


def test_a_field_says_its_kind_and_cannot_be_changed():
    assert (TOKENS.is_ragged, REWARD.is_ragged, UID.is_ragged) == (True, False, False)
    assert (PLACES.kind, UID.kind) == ("int64 [B, epochs]", "objects")
    with pytest.raises(FrozenInstanceError):
        TOKENS.name = "other"  # type: ignore[misc]

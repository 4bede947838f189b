from __future__ import annotations

import re
from typing import Any

import pytest

from podium.errors import DispatchError
from podium.single_controller import Mesh


def test_collecting_ranks_are_in_shard_order():
    mesh = Mesh.from_rows("m", [(2, True), (0, False), (0, True), (1, True)])
    assert mesh.dp_size == 3
    assert mesh.collecting_ranks == (2, 3, 0)


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ([(0, True), (2, True)], "dp_rank 1 is missing"),
        ([(0, True), (0, True)], "2 ranks collect dp_rank 0"),
        ([(0, True), (1, False)], "no rank collects dp_rank 1"),
        ([(0, True), (-1, True)], "dp_rank -1 is negative"),
        ([(-1, True)], "dp_rank -1 is negative"),
        ([(10**12, True)], "dp_rank 0 is missing"),
        ([], "it has no ranks"),
    ],
)
def test_a_table_that_cannot_route_is_shown(table: list[tuple[int, bool]], fault: str):
    with pytest.raises(DispatchError, match=fault) as caught:
        Mesh.from_rows("actor", table)
    lines = str(caught.value).splitlines()
    assert "'actor'" in lines[0]
    assert lines[1].split() == ["rank", "dp_rank", "collects"]
    assert [line.split() for line in lines[2:]] == [
        [str(rank), str(dp_rank), "yes" if collects else "no"] for rank, (dp_rank, collects) in enumerate(table)
    ]


@pytest.mark.parametrize("row", [None, 3, (0,), (0, True, 1), ("0", True), (0.0, True), (True, True), (0, "no"), (0, None)])
def test_a_rank_with_an_invalid_mesh_report_is_named(row: Any):
    with pytest.raises(DispatchError, match=f"rank 1 must report .* for mesh 'actor'.*, got {re.escape(repr(row))}"):
        Mesh.from_rows("actor", [(0, True), row])

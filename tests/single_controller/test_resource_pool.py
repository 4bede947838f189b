from __future__ import annotations

from typing import Any, cast

import pytest

from podium.errors import ResourceError
from podium.single_controller import ResourcePool


def test_ranks_are_numbered_node_by_node():
    pool = ResourcePool([1, 3, 2])
    assert pool.world_size == 6
    assert pool.local_rank_list() == [0, 0, 1, 2, 0, 1]
    assert pool.local_world_size_list() == [1, 3, 3, 3, 2, 2]


def test_the_callers_list_is_copied():
    counts = [2, 2]
    pool = ResourcePool(counts)
    counts.append(2)
    assert pool.world_size == 4
    assert pool == ResourcePool((2, 2))


@pytest.mark.parametrize("counts", [[], [0], [2, -1], [1.5], [True]])
def test_counts_that_make_no_sense(counts: list[Any]):
    with pytest.raises(ResourceError, match="1 or more"):
        ResourcePool(cast("list[int]", counts))


def test_colocate_count_is_checked():
    with pytest.raises(ResourceError, match="max_colocate_count"):
        ResourcePool([1], max_colocate_count=0)

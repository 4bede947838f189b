from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.protocol import interleave_groups


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_every_shard_holds_its_share_of_each_group_in_order(size, num_groups, num_shards, random):
    groups = [group for group in range(num_groups) for _ in range(size)]
    random.shuffle(groups)
    order = interleave_groups(torch.tensor(groups, dtype=torch.int64)).tolist()
    assert sorted(order) == list(range(len(groups)))
    for group in range(num_groups):
        rows = [row for row in order if groups[row] == group]
        assert rows == sorted(rows)
        cuts = [len(order) * shard // num_shards for shard in range(num_shards + 1)]
        shares = [sum(groups[row] == group for row in order[a:b]) for a, b in itertools.pairwise(cuts)]
        assert not shares or max(shares) - min(shares) <= 2


def test_groups_of_different_sizes_keep_every_row():
    assert interleave_groups(torch.tensor([2, 0, 2, 2, 0])).tolist() == [1, 0, 4, 2, 3]

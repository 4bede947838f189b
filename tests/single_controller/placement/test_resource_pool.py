from __future__ import annotations

import copy
import dataclasses
import re
from functools import reduce
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.compat.verl import RayResourcePool
from podium.errors import ResourceError
from podium.single_controller.placement.resource_pool import (
    ResourcePool,
    merge_resource_pool,
    split_resource_pool,
)

FIELDS = {
    "max_colocate_count": 5,
    "use_gpu": False,
    "name_prefix": "p",
    "detached": True,
    "accelerator_type": "accelerator_type:X",
}
"""A value other than the default for every field but those that say where the ranks are."""


def same(a: ResourcePool, b: ResourcePool) -> bool:
    """Equal in every field, also those that `==` leaves out."""
    return type(a) is type(b) and all(getattr(a, f.name) == getattr(b, f.name) for f in dataclasses.fields(a))


def test_ranks_are_numbered_node_by_node():
    pool = ResourcePool([1, 3, 2])
    assert pool.world_size == 6
    assert pool.local_rank_list() == [0, 0, 1, 2, 0, 1]
    assert pool.local_world_size_list() == [1, 3, 3, 3, 2, 2]


def test_nodes_with_different_counts():
    pool = ResourcePool([4, 2])
    assert pool.local_rank_list() == [0, 1, 2, 3, 0, 1]
    assert pool.local_world_size_list() == [4, 4, 4, 4, 2, 2]
    assert pool.n_gpus_per_node == 4


def test_the_callers_list_is_copied_and_so_is_the_store():
    counts = [2, 2]
    pool = ResourcePool(counts)
    counts.append(2)
    pool.store.append(2)
    pool().append(2)
    assert pool.store == pool() == [2, 2]
    assert pool.process_on_nodes == (2, 2)


@pytest.mark.parametrize("make", [ResourcePool, RayResourcePool])
@pytest.mark.parametrize("counts", [[], [0], [2, -1], [1.5], [True], 0, 2, "11", b"11", {2: 1}, {2}, [None], [[2]]])
def test_counts_that_make_no_sense(make: type[ResourcePool], counts: Any):
    with pytest.raises(ResourceError, match=f"1 or more.*got {re.escape(repr(counts))}"):
        make(counts)


def test_no_counts_at_all():
    with pytest.raises(ResourceError, match=r"1 or more.*got None"):
        ResourcePool(cast(Any, None))


@pytest.mark.parametrize("make", [ResourcePool, RayResourcePool])
def test_a_pool_without_nodes_says_that_they_are_given_when_it_is_made(make: type[ResourcePool]):
    with pytest.raises(ResourceError, match=r"got \[\]; .*when it is made"):
        make()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_colocate_count", value) for value in (0, 1.5, True, None, "2")),
        *(("use_gpu", value) for value in ("no", 0, 1, "")),
        *(("detached", value) for value in ("x", None, 1)),
        *(("name_prefix", value) for value in (3, b"p", ["p"])),
        *(("accelerator_type", value) for value in ("", 3, ["accelerator_type:X"])),
    ],
)
@pytest.mark.parametrize("make", [ResourcePool, RayResourcePool])
def test_a_field_of_another_type_is_named_with_its_value(make: type[ResourcePool], name: str, value: Any):
    with pytest.raises(ResourceError, match=f"^{name} (is|must be) .*, got {re.escape(repr(value))}$"):
        make([1], **{name: value})


def test_ray_resource_pool_has_verls_order_of_arguments_and_defaults():
    pool = RayResourcePool([8], False, "actor", 3, True, "accelerator_type:A100")
    expected = {"use_gpu": False, "name_prefix": "actor", "max_colocate_count": 3, "detached": True}
    assert {name: getattr(pool, name) for name in expected} == expected
    assert pool.accelerator_type == "accelerator_type:A100"
    default = RayResourcePool([8])
    assert (default.use_gpu, default.max_colocate_count, default.detached, default.n_gpus_per_node) == (True, 10, False, 8)
    assert pool.n_gpus_per_node == 0


def test_pools_made_apart_are_not_on_the_same_devices_and_differ():
    one, other = ResourcePool([2]), ResourcePool([2])
    assert len({one, other, copy.copy(one)}) == 2
    assert set(one.bundles).isdisjoint(other.bundles)
    assert copy.deepcopy(one).bundles == one.bundles
    assert dataclasses.replace(one, use_gpu=True).reservations != one.reservations


def test_a_parts_counts_are_its_own():
    assert [part.store for part in split_resource_pool(ResourcePool([4]), [1, 3])] == [[1], [3]]
    part = ResourcePool([4, 2]).sub_pool(3, 3)
    assert (part.store, part.world_size) == ([1, 2], 3)
    assert (part.local_rank_list(), part.local_world_size_list()) == ([0, 0, 1], [1, 2, 2])


def test_a_part_is_on_the_pools_devices():
    pool = RayResourcePool([4, 2])
    first, second = split_resource_pool(pool, 3)
    assert (first.store, second.store) == ([3], [1, 2])
    assert first.bundles + second.bundles == pool.bundles
    assert second.reservations == pool.reservations
    assert [(bundle.node, bundle.index) for bundle in second.bundles] == [(0, 3), (1, 0), (1, 1)]
    assert type(first) is RayResourcePool


def test_a_part_is_split_again():
    pool = ResourcePool([4, 4])
    quarter = split_resource_pool(split_resource_pool(pool, 4)[1], [1, 3])[1]
    assert quarter.bundles == pool.bundles[5:]
    assert quarter.store == [3]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (4, "split_size 4 does not divide the pool's 6 ranks"),
        (0, "split_size 0 does not divide"),
        (-2, "split_size -2 does not divide"),
        ([2, 2], r"split_size \[2, 2\] is 4 ranks, the pool has 6"),
        *(
            (size, f"a list of sizes of 1 or more that adds up to 6, got {re.escape(repr(size))}")
            for size in ([6, 0], [7, -1], 1.0, None, "33", True, [3, "3"], [3.0, 3], [True] * 6, {3: 3}, {6})
        ),
    ],
)
def test_sizes_that_do_not_fit_the_pool(size: Any, message: str):
    with pytest.raises(ResourceError, match=message):
        split_resource_pool(ResourcePool([4, 2]), size)


@pytest.mark.parametrize(
    ("start", "count"), [(-1, 2), (0, 0), (5, 2), ("0", 1), (0, "1"), (0.0, 1), (0, None), (False, 1), (0, True)]
)
def test_a_part_outside_the_pool(start: Any, count: Any):
    with pytest.raises(ResourceError, match=f"ranks 0 to 5, got start {start!r}, count {count!r}"):
        ResourcePool([4, 2]).sub_pool(start, count)


def test_the_sample_below_has_no_field_at_its_default():
    found = {f.name for f in dataclasses.fields(ResourcePool)} - {"process_on_nodes", "bundles"}
    assert found == set(FIELDS), "a new field needs a value in FIELDS, so that the next test sees that it is kept"
    default = ResourcePool([1])
    assert all(getattr(default, name) != value for name, value in FIELDS.items())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_merging_what_was_split_gives_the_pool_in_every_field(counts: list[int], data: st.DataObject):
    for make in (ResourcePool, RayResourcePool):
        pool = make(counts, **cast("Any", FIELDS))
        cuts = sorted(data.draw(st.sets(st.integers(1, pool.world_size))) | {0, pool.world_size})
        parts = split_resource_pool(pool, [stop - start for start, stop in pairwise(cuts)])
        assert all(getattr(part, name) == value for part in parts for name, value in FIELDS.items())
        assert same(reduce(merge_resource_pool, data.draw(st.permutations(parts))), pool)


def test_a_subclass_with_a_field_of_its_own_keeps_it():
    @dataclasses.dataclass(frozen=True, init=False)
    class Labelled(ResourcePool):
        label: str

        def __init__(self, counts: list[int], label: str) -> None:
            super().__init__(counts)
            object.__setattr__(self, "label", label)

    pool = Labelled([4], "x")
    assert [part.label for part in split_resource_pool(pool, 2)] == ["x", "x"]
    assert same(merge_resource_pool(*split_resource_pool(pool, 2)), pool)
    with pytest.raises(ResourceError, match="same label, got 'x' and 'y'"):
        merge_resource_pool(pool, Labelled([4], "y"))


def test_pools_made_apart_are_joined_in_the_order_given():
    a, b = RayResourcePool([4], name_prefix="a"), RayResourcePool([2, 1], name_prefix="b")
    merged = merge_resource_pool(a, b)
    assert (merged.store, merged.bundles, merged.name_prefix) == ([4, 2, 1], a.bundles + b.bundles, "a_b")
    assert [reservation.name_prefix for reservation in merged.reservations] == ["a", "b"]
    again = split_resource_pool(merged, [4, 3])
    assert [part.bundles for part in again] == [a.bundles, b.bundles]
    assert merge_resource_pool(ResourcePool([1]), ResourcePool([1])).name_prefix is None


def test_parts_with_a_gap_between_them_count_as_one_node():
    first, _, third = split_resource_pool(ResourcePool([4]), [1, 1, 2])
    assert merge_resource_pool(third, first).local_rank_list() == [0, 1, 2]


@pytest.mark.parametrize("name", sorted(FIELDS.keys() - {"name_prefix"}))
def test_a_field_that_differs_is_named_with_both_values(name: str):
    one, other = ResourcePool([2]), ResourcePool([2], **cast("Any", {name: FIELDS[name]}))
    with pytest.raises(ResourceError, match=f"same {name}, got {getattr(one, name)!r} and {FIELDS[name]!r}"):
        merge_resource_pool(one, other)


def test_pools_of_two_types_are_not_merged():
    with pytest.raises(ResourceError, match="got ResourcePool and RayResourcePool"):
        merge_resource_pool(ResourcePool([1]), RayResourcePool([1], use_gpu=None, max_colocate_count=1))


@pytest.mark.parametrize("other", [None, 2, [2], RayResourcePool])
def test_an_object_that_is_not_a_pool_is_neither_split_nor_merged(other: Any):
    got = re.escape(f"got {other!r}")
    with pytest.raises(ResourceError, match=got):
        split_resource_pool(other, 1)
    for pair in ((other, ResourcePool([1])), (ResourcePool([1]), other), (other, other)):
        with pytest.raises(ResourceError, match=got):
            merge_resource_pool(*pair)


def test_a_rank_is_not_merged_twice():
    pool = ResourcePool([4])
    with pytest.raises(ResourceError, match="must not share a rank, got 1 in both"):
        merge_resource_pool(pool.sub_pool(0, 2), pool.sub_pool(1, 2))

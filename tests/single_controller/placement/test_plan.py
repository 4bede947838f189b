from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ResourceError
from podium.single_controller.placement.packing import pack, pour
from podium.single_controller.placement.plan import (
    Node,
    bundle_resources,
    idle,
    needs_gpus,
    node_order,
    plan_placement,
    sort_by_node_ip,
)
from podium.single_controller.placement.rank_order import Spot, declared_order, rank_order
from podium.single_controller.placement.resource_pool import ResourcePool, merge_resource_pool, split_resource_pool

E1_ADDRESSES = ["10.0.0.2", "10.0.0.9", "10.0.0.10", "10.0.0.66"]
CPU = {"CPU": 1.0}
CPU_GPU = {"CPU": 1.0, "GPU": 1.0}


def node(address: str, total: dict[str, float], free: dict[str, float] | None = None, *, alive: bool = True) -> Node:
    return Node(f"id-{address}", address, total, total if free is None else free, alive)


def cpus(**counts: int) -> list[Node]:
    return [node(name, {"CPU": count}) for name, count in counts.items()]


def addresses(
    counts: list[int], nodes: list[Node], *, bin_pack: bool = True, bundle: dict[str, float] | None = None
) -> list[str]:
    plan = plan_placement(counts, bundle or CPU, nodes, bin_pack=bin_pack)
    return [",".join(dict.fromkeys(node.address for node in entry)) for entry in plan]


# -- order of nodes ----------------------------------------------------------------------------------------------------


def test_addresses_are_ordered_by_number():
    shuffled = [node(address, CPU) for address in sorted(E1_ADDRESSES)]
    assert [n.address for n in shuffled] == ["10.0.0.10", "10.0.0.2", "10.0.0.66", "10.0.0.9"]
    assert [n.address for n in node_order(shuffled)] == E1_ADDRESSES


def test_two_ranks_on_each_of_four_nodes():
    spots = [Spot(address, address) for address in sorted(E1_ADDRESSES) for _ in range(2)]
    order = rank_order([2, 2, 2, 2], spots)
    assert [spots[position].address.split(".")[-1] for position in order.positions] == [
        "2",
        "2",
        "9",
        "9",
        "10",
        "10",
        "66",
        "66",
    ]


def test_ipv6_and_host_names_have_a_place_too():
    expected = [
        "10.0.0.9",
        "::ffff:10.0.0.10",
        "fe80::2",
        "fe80::10",
        "fe80::10%eth0",
        "gpu-2",
        "gpu-10",
        "gpu-10-b",
        "localhost",
    ]
    for seed in range(20):
        mixed = random.Random(seed).sample(expected, len(expected))
        assert sort_by_node_ip(mixed, lambda address: address) == expected


def test_nodes_of_one_address_are_ordered_by_id_and_items_keep_their_order():
    nodes = [Node(name, "10.0.0.1", CPU, CPU) for name in "cab"]
    assert [n.node_id for n in node_order(nodes)] == ["a", "b", "c"]
    assert sort_by_node_ip([("x", "10.0.0.9"), ("b", "10.0.0.1"), ("a", "10.0.0.1")], lambda item: item[1]) == [
        ("b", "10.0.0.1"),
        ("a", "10.0.0.1"),
        ("x", "10.0.0.9"),
    ]


# -- need --------------------------------------------------------------------------------------------------------------


def test_a_bundle_counts_one_cpu_whatever_the_colocation_count():
    pool = ResourcePool([2], max_colocate_count=4)
    assert bundle_resources(pool, use_gpu=False) == {"CPU": 1}
    assert bundle_resources(pool, use_gpu=True) == {"CPU": 1, "GPU": 1}
    typed = ResourcePool([2], accelerator_type="accelerator_type:X")
    assert bundle_resources(typed, use_gpu=True) == {"CPU": 1, "GPU": 1, "accelerator_type:X": 1e-4}


def test_gpus_are_used_where_there_are_any_unless_the_pool_says_so():
    without, dead, having = node("a", {"CPU": 4}), node("b", {"GPU": 8}, alive=False), node("c", {"GPU": 1})
    assert not needs_gpus(ResourcePool([1]), [without, dead])
    assert needs_gpus(ResourcePool([1]), [without, having])
    assert needs_gpus(ResourcePool([1], use_gpu=True), [without])
    assert not needs_gpus(ResourcePool([1], use_gpu=False), [having])


def test_a_cpu_pool_starts_with_no_gpu_anywhere():
    pool, nodes = ResourcePool([2], use_gpu=False), [node("a", {"CPU": 2})]
    assert addresses(pool.store, nodes, bundle=bundle_resources(pool, use_gpu=needs_gpus(pool, nodes))) == ["a"]


@pytest.mark.parametrize("bundle", [{}, {"CPU": 1.0, "special": 0.0}, {"CPU": -1.0}, {"CPU": float("nan")}])
def test_a_resource_of_zero_is_refused_and_not_dropped(bundle: dict[str, float]):
    with pytest.raises(ResourceError, match="more than 0"):
        plan_placement([1], bundle, cpus(a=4))


# -- plan --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "nodes", "expected"),
    [
        ([4, 2], {"a": 8, "b": 8}, ["a", "b"]),
        ([2, 4], {"a": 8, "b": 8}, ["a", "b"]),
        ([2, 2], {"a": 1, "b": 2, "c": 2}, ["b", "c"]),
        ([4, 2], {"a": 2, "b": 4}, ["b", "a"]),  # only the other order has a node for each
        ([4, 2], {"a": 2, "b": 8}, ["b", "a"]),  # nodes apart come before nodes in order
        ([2, 2], {"a": 4}, ["a", "a"]),
        ([3, 3, 2, 2, 2], {"a": 6, "b": 6}, ["a", "a", "b", "b", "b"]),
        ([4, 3, 3, 2], {"a": 6, "b": 6}, ["a", "b", "b", "a"]),
        ([5, 4, 3, 3], {"a": 9, "b": 6}, ["a", "a", "b", "b"]),
        ([3, 2, 2], {"a": 4, "b": 3}, ["b", "a", "a"]),  # first fit puts 3 on a, and has no room for the last 2
    ],
)
def test_each_entry_is_on_one_node_that_can_hold_it(counts: list[int], nodes: dict[str, int], expected: list[str]):
    assert addresses(counts, cpus(**nodes)) == expected


def test_a_plan_has_a_node_for_each_bundle_and_knows_no_order_of_the_table():
    nodes = [node(address, {"CPU": 2}) for address in sorted(E1_ADDRESSES)]
    for seed in range(10):
        plan = plan_placement([2, 1, 2], CPU, random.Random(seed).sample(nodes, 4))
        assert [[n.address for n in entry] for entry in plan] == [["10.0.0.2"] * 2, ["10.0.0.9"], ["10.0.0.10"] * 2]


def test_free_amounts_that_miss_a_bundle_by_rounding_hold_it():
    assert addresses([3], [node("a", {"CPU": 3}, {"CPU": 0.1 * 3 + 2.7 - 1e-9})]) == ["a"]
    with pytest.raises(ResourceError, match=r"2\.99/3"):
        addresses([3], [node("a", {"CPU": 3}, {"CPU": 2.99})])


def test_without_bin_pack_an_entry_spans_nodes_only_where_it_must():
    assert addresses([3, 3], cpus(a=4, b=4), bin_pack=False) == ["a", "b"]
    assert addresses([6, 2], cpus(a=4, b=4), bin_pack=False) == ["a,b", "b"]
    with pytest.raises(
        ResourceError, match=r"an entry may lie on several nodes.*\n(.*\n)*.*room for at most 4 on one node, 8 in"
    ):
        addresses([9], cpus(a=4, b=4), bin_pack=False)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_a_layout_is_found_where_there_is_one_and_holds(sizes: list[int], rooms: list[int]):
    def holds(chosen: tuple[int, ...] | list[int]) -> bool:
        return all(
            room >= sum(size for size, at in zip(sizes, chosen, strict=True) if at == node) for node, room in enumerate(rooms)
        )

    chosen = pack(sizes, rooms)
    possible = [layout for layout in product(range(len(rooms)), repeat=len(sizes)) if holds(layout)]
    assert (chosen is not None) == bool(possible)
    if chosen is not None:
        assert holds(chosen)
        assert len(set(chosen)) == len(sizes) or all(len(set(layout)) < len(sizes) for layout in possible)
    poured = pour(sizes, rooms)
    assert (poured is not None) == (sum(sizes) <= sum(rooms))
    if poured is not None:
        assert [len(entry) for entry in poured] == sizes
        flat = [at for entry in poured for at in entry]
        assert all(flat.count(node) <= room for node, room in enumerate(rooms))


@pytest.mark.timeout(20)
def test_a_thousand_nodes_are_planned_or_refused_in_seconds():
    assert pack([8] * 1000, [8] * 1000) == list(range(1000))
    assert pack([1, 2] * 500, [3] * 500) is not None
    assert pack([8] * 1000, [8] * 999 + [7]) is None
    assert pack([5, 4, 3] * 300, [11] * 327) is None


# -- refusal -----------------------------------------------------------------------------------------------------------


def refusal(counts: list[int], bundle: dict[str, float], nodes: list[Node]) -> str:
    with pytest.raises(ResourceError) as caught:
        plan_placement(counts, bundle, nodes)
    return str(caught.value)


def test_more_cpus_per_bundle_than_are_free():
    busy = Node("n1", "127.0.0.1", {"CPU": 4}, {"CPU": 1}, held_by={"group 'critic'": {"CPU": 3}})
    assert refusal([2], {"CPU": 4}, [busy]).splitlines() == [
        "process_on_nodes [2] needs 2 bundles of CPU 4 (each entry on one node), which do not fit:",
        "  address    node  state  CPU free/total  bundles that fit",
        "  127.0.0.1  n1    alive  1/4             0",
        "  held on 127.0.0.1: group 'critic' has CPU 3",
        "Lower process_on_nodes: with nothing held there is room for at most 1 on one node, 1 in all",
        "CPU is too little: each rank counts as one logical CPU; start the cluster with a larger num_cpus",
    ]


def test_the_total_fits_and_no_node_does():
    message = refusal([4], CPU_GPU, [node(address, {"CPU": 8, "GPU": 2}) for address in ("10.0.0.1", "10.0.0.2")])
    assert "room for at most 2 on one node, 4 in all" in message
    assert "The total fits, but no node for each entry: use smaller entries, or bin_pack=False" in message
    assert "GPU is too little: use_gpu=False" in message
    assert "CPU is too little" not in message


def test_the_table_has_every_node_and_what_it_lacks():
    nodes = [
        node("10.0.0.10", {"CPU": 8, "GPU": 4}, {"CPU": 4, "GPU": 2}),
        node("10.0.0.1", {"GPU": 8}),
        node("10.0.0.2", {"CPU": 8}),
        node("10.0.0.3", {"CPU": 8, "GPU": 8}, alive=False),
    ]
    assert addresses([2], nodes, bundle=CPU_GPU) == ["10.0.0.10"]
    lines = refusal([4], CPU_GPU, nodes).splitlines()
    assert [line.split() for line in lines[2:6]] == [
        ["10.0.0.1", "id-10.0.0.1", "alive", "0/0", "8/8", "0"],
        ["10.0.0.2", "id-10.0.0.2", "alive", "8/8", "0/0", "0"],
        ["10.0.0.3", "id-10.0.0.3", "dead", "8/8", "8/8", "0"],
        ["10.0.0.10", "id-10.0.0.10", "alive", "4/8", "2/4", "2"],
    ]
    assert lines[6:] == [
        "It fits once what is held is given back: close other groups or pools, or lower process_on_nodes (free now: at most 2 on "
        "one node, 2 in all)"
    ]
    assert [[n.address for n in entry] for entry in plan_placement([4], CPU_GPU, idle(nodes))] == [["10.0.0.10"] * 4]


def test_eight_available_and_sixteen_desired():
    message = refusal([8, 8], CPU_GPU, [node("a", {"CPU": 64, "GPU": 8}), node("b", {"CPU": 64})])
    assert "needs 16 bundles of CPU 1 + GPU 1" in message
    assert "room for at most 8 on one node, 8 in all" in message


def test_an_accelerator_type_that_no_node_has():
    bundle = {"CPU": 1.0, "accelerator_type:X": 1e-4}
    message = refusal([1], bundle, cpus(a=4))
    assert "accelerator_type:X is too little: give another accelerator_type, or none" in message
    assert addresses([4], [node("a", {"CPU": 4, "accelerator_type:X": 1})], bundle=bundle) == ["a"]


def test_a_cluster_without_a_node():
    assert "room for at most 0 on one node, 0 in all" in refusal([1], CPU, [])


# -- order of ranks ----------------------------------------------------------------------------------------------------


def spots(*places: tuple[str, str]) -> list[Spot]:
    return [Spot(address, address, device) for address, device in places]


def test_four_and_two_on_nodes_in_reverse_order():
    order = rank_order([4, 2], [Spot("10.0.0.10", "b")] * 4 + [Spot("10.0.0.9", "a")] * 2)
    assert order.positions == (4, 5, 0, 1, 2, 3)
    assert order.process_on_nodes == (2, 4)
    assert order.local_rank_list() == [0, 1, 0, 1, 2, 3]
    assert order.local_world_size_list() == [2, 2, 4, 4, 4, 4]


def test_four_and_two_on_one_machine_stay_as_declared():
    order = rank_order([4, 2], [Spot("127.0.0.1", "a")] * 6)
    assert order.positions == (0, 1, 2, 3, 4, 5)
    assert order.local_rank_list() == [0, 1, 2, 3, 0, 1]


def test_ranks_of_a_node_go_by_device_number():
    order = rank_order([2, 2], spots(("b", "0"), ("b", "1"), ("a", "10"), ("a", "9")))
    assert order.positions == (3, 2, 0, 1)
    shared = rank_order([1, 2], spots(("a", "7"), ("a", "1"), ("a", "0")))
    assert (shared.positions, shared.process_on_nodes) == ((2, 1, 0), (2, 1))


def test_an_entry_on_several_nodes_counts_on_each():
    order = rank_order([3, 1], spots(("b", ""), ("a", ""), ("b", ""), ("c", "")))
    assert order.positions == (1, 0, 2, 3)
    assert order.process_on_nodes == (1, 2, 1)


def test_one_spot_for_each_bundle():
    with pytest.raises(ResourceError, match="has 3 bundles, got 1 spots"):
        rank_order([2, 1], [Spot("a", "a")])


def test_groups_in_reverse_node_order_serve_pool_and_parts_alike():
    pool = ResourcePool([2, 2, 2])
    made = spots(
        ("10.0.0.10", "1"), ("10.0.0.10", "0"), ("10.0.0.9", "0"), ("10.0.0.9", "1"), ("10.0.0.2", "0"), ("10.0.0.2", "1")
    )
    serves = declared_order(pool.store, made)
    assert serves == declared_order(pool.store, made) == (4, 5, 2, 3, 1, 0)

    def ranks(part: ResourcePool) -> list[Spot]:
        where = [made[serves[pool.bundles.index(bundle)]] for bundle in part.bundles]
        return [where[position] for position in rank_order(part.store, where).positions]

    parts = split_resource_pool(pool, [1, 3, 2])
    assert ranks(pool) == [spot for part in parts for spot in ranks(part)]
    assert [spot.address for spot in ranks(pool)] == ["10.0.0.2"] * 2 + ["10.0.0.9"] * 2 + ["10.0.0.10"] * 2
    assert ranks(merge_resource_pool(parts[0], merge_resource_pool(parts[1], parts[2]))) == ranks(pool)


def test_entries_of_other_sizes_keep_the_group_of_their_size():
    made = spots(("c", ""), ("b", ""), ("b", ""), ("a", ""))
    assert declared_order([1, 2, 1], made) == (3, 1, 2, 0)

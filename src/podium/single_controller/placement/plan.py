"""Which node holds which ranks: pure functions of a table of nodes.

Nothing here asks a cluster or holds anything: a runtime makes the table and acts on the plan. A plan that cannot be is
refused before anything is made, with a table of need and supply for each node and what to lower.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from podium.errors import NoRoomError, ResourceError
from podium.single_controller.placement.packing import pack, pour
from podium.single_controller.placement.resource_pool import ResourcePool

CPU, GPU = "CPU", "GPU"
ACCELERATOR_SHARE = 1e-4
"""What a bundle takes of its accelerator type: only a mark of the node, so the least that Ray counts."""
ROUNDING = 1e-6
"""Free resources are sums and differences of floats: what misses a whole bundle by less than this holds it."""
NODE_ID_SHOWN = 12
"""Characters of a node's id in a message; Ray's have 56."""

Item = TypeVar("Item")
AddressKey: TypeAlias = tuple[int, tuple[str | int, ...], str]


@dataclass(frozen=True)
class Node:
    """A machine of the cluster as its runtime sees it. A resource that is not named is not there."""

    node_id: str
    address: str
    resources_total: Mapping[str, float]
    resources_free: Mapping[str, float]
    alive: bool = True
    held_by: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Who has what of the node (a group's name -> its resources), for error messages; may be left out."""


Plan: TypeAlias = tuple[tuple[Node, ...], ...]
"""For each entry of process_on_nodes, the node of each of its bundles."""


def address_key(address: str) -> AddressKey:
    """Sorts IPv4 addresses by number, then IPv6, then host names with the numbers in them read as numbers.

    >>> sorted(["node-10", "10.0.0.10", "node-9", "10.0.0.2", "fe80::1"], key=address_key)
    ['10.0.0.2', '10.0.0.10', 'fe80::1', 'node-9', 'node-10']
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return 9, natural(address), address
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    return ip.version, (int(ip),), address


def natural(text: str) -> tuple[str | int, ...]:
    """Sorts texts by the numbers in them: "gpu-9" before "gpu-10"."""
    return tuple(int(part) if n % 2 else part for n, part in enumerate(re.split(r"([0-9]+)", text)))


def node_order(nodes: Iterable[Node]) -> list[Node]:
    """The nodes by address, ties by node id."""
    return sorted(nodes, key=_node_key)


def sort_by_node_ip(items: Iterable[Item], address_of: Callable[[Item], str]) -> list[Item]:
    """The items (placement groups, say) by the address of their node; those of one node keep their order."""
    return sorted(items, key=lambda item: address_key(address_of(item)))


def needs_gpus(pool: ResourcePool, nodes: Iterable[Node]) -> bool:
    """Whether each rank of the pool takes a GPU: what the pool says, else whether any node alive has one."""
    return pool.use_gpu if pool.use_gpu is not None else any(node.alive and node.resources_total.get(GPU, 0) for node in nodes)


def bundle_resources(pool: ResourcePool, *, use_gpu: bool) -> dict[str, float]:
    """What one rank's bundle takes of its node. The groups that share it divide this: nothing grows with their number."""
    bundle = {CPU: 1.0}
    if use_gpu:
        bundle[GPU] = 1.0
    if pool.accelerator_type is not None:
        bundle[pool.accelerator_type] = ACCELERATOR_SHARE
    return bundle


def idle(nodes: Iterable[Node]) -> list[Node]:
    """The same nodes if everything held were given back: a plan on these may come to fit, others never will."""
    return [replace(node, resources_free=node.resources_total) for node in nodes]


def plan_placement(
    process_on_nodes: Sequence[int], bundle: Mapping[str, float], nodes: Iterable[Node], *, bin_pack: bool = True
) -> Plan:
    """A node, alive and with enough free, for each bundle: `process_on_nodes[n]` bundles for entry n.

    Entries go to nodes of their own, in the declared order along the nodes' order, as far as that fits; else in another
    order, else several to a node. With `bin_pack` an entry is on one node, without it an entry may lie on several where
    no other plan fits. NoRoomError with a table of the nodes and what to lower where nothing fits.

    >>> nodes = [Node(ip, ip, {"CPU": n}, {"CPU": n}) for ip, n in [("10.0.0.10", 4), ("10.0.0.9", 2)]]
    >>> [[node.address for node in entry] for entry in plan_placement([2, 3], {"CPU": 1}, nodes)]
    [['10.0.0.9', '10.0.0.9'], ['10.0.0.10', '10.0.0.10', '10.0.0.10']]
    """
    if not bundle or any(not amount > 0 for amount in bundle.values()):
        raise ResourceError(
            f"a bundle takes more than 0 of each resource that it names, got {dict(bundle)}: leave the others out"
        )
    ordered = node_order(nodes)
    chosen = _choose(process_on_nodes, _capacities(ordered, bundle), bin_pack=bin_pack)
    if chosen is None:
        raise _refusal(process_on_nodes, bundle, ordered, bin_pack=bin_pack)
    return tuple(tuple(ordered[n] for n in entry) for entry in chosen)


def _node_key(node: Node) -> tuple[AddressKey, str]:
    return address_key(node.address), node.node_id


def _capacities(nodes: Sequence[Node], bundle: Mapping[str, float]) -> list[int]:
    """How many bundles each node can hold in what it has free."""
    return [_capacity(node, bundle) if node.alive else 0 for node in nodes]


def _capacity(node: Node, bundle: Mapping[str, float]) -> int:
    return max(0, int(min((node.resources_free.get(name, 0) + ROUNDING) / amount for name, amount in bundle.items())))


def _choose(process_on_nodes: Sequence[int], rooms: Sequence[int], *, bin_pack: bool) -> list[list[int]] | None:
    """For each entry the numbers of its bundles' nodes."""
    whole = pack(process_on_nodes, rooms)
    if whole is not None:
        return [[node] * count for node, count in zip(whole, process_on_nodes, strict=True)]
    return None if bin_pack else pour(process_on_nodes, rooms)


def _refusal(
    process_on_nodes: Sequence[int], bundle: Mapping[str, float], nodes: Sequence[Node], *, bin_pack: bool
) -> NoRoomError:
    need = " + ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    how = "each entry on one node" if bin_pack else "an entry may lie on several nodes"
    wanted = f"process_on_nodes {list(process_on_nodes)} needs {sum(process_on_nodes)} bundles of {need} ({how})"
    table = "\n".join([*_table(nodes, bundle), *_holders(nodes)])
    free, total = (tuple(_capacities(where, bundle)) for where in (nodes, idle(nodes)))
    scarce = tuple(name for name in bundle if _is_scarce(name, process_on_nodes, bundle, nodes, bin_pack=bin_pack))
    advice = _advice(process_on_nodes, free, total, scarce, bin_pack=bin_pack)
    message = "\n".join([f"{wanted}, which do not fit:", table, *advice])
    return NoRoomError(message, need=need, table=table, free=free, total=total, scarce=scarce)


def _table(nodes: Sequence[Node], bundle: Mapping[str, float]) -> list[str]:
    head = ["address", "node", "state", *(f"{name} free/total" for name in bundle), "bundles that fit"]
    rows = [head]
    for node, room in zip(nodes, _capacities(nodes, bundle), strict=True):
        supply = [f"{node.resources_free.get(name, 0):g}/{node.resources_total.get(name, 0):g}" for name in bundle]
        rows.append([node.address, node.node_id[:NODE_ID_SHOWN], "alive" if node.alive else "dead", *supply, str(room)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _holders(nodes: Sequence[Node]) -> list[str]:
    return [
        f"  held on {node.address}: {holder} has {' + '.join(f'{name} {amount:g}' for name, amount in held.items())}"
        for node in nodes
        for holder, held in node.held_by.items()
    ]


def _advice(
    process_on_nodes: Sequence[int], free: Sequence[int], total: Sequence[int], scarce: Sequence[str], *, bin_pack: bool
) -> list[str]:
    if _choose(process_on_nodes, total, bin_pack=bin_pack) is not None:
        now = f"or lower process_on_nodes (free now: {_room(free)})"
        return [f"It fits once what is held is given back: close other groups or pools, {now}"]
    lines = [f"Lower process_on_nodes: with nothing held there is room for {_room(total)}"]
    if bin_pack and sum(total) >= sum(process_on_nodes):
        lines.append("The total fits, but no node for each entry: use smaller entries, or bin_pack=False to let one span nodes")
    return [*lines, *map(_remedy, scarce)]


def _room(rooms: Sequence[int]) -> str:
    return f"at most {max(rooms, default=0)} on one node, {sum(rooms)} in all"


def _is_scarce(
    name: str, process_on_nodes: Sequence[int], bundle: Mapping[str, float], nodes: Sequence[Node], *, bin_pack: bool
) -> bool:
    """Whether this resource would not suffice even if it were the only one needed."""
    return _choose(process_on_nodes, _capacities(idle(nodes), {name: bundle[name]}), bin_pack=bin_pack) is None


def _remedy(name: str) -> str:
    if name == CPU:
        return "CPU is too little: each rank counts as one logical CPU; start the cluster with a larger num_cpus"
    if name == GPU:
        return "GPU is too little: use_gpu=False runs the ranks on the CPU"
    return f"{name} is too little: give another accelerator_type, or none"

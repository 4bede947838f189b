"""How a pool's ranks are numbered, given the places of its bundles: by node address, then device.

Pure: the same cluster gives the same ranks at every start, in whatever order its placement groups were made or listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from podium.errors import ResourceError
from podium.single_controller.placement.plan import AddressKey, address_key, natural
from podium.single_controller.placement.resource_pool import local_ranks, local_world_sizes

SpotKey: TypeAlias = tuple[AddressKey, str, tuple[str | int, ...]]


@dataclass(frozen=True)
class Spot:
    """The place of a bundle. `device` is its index or id on the node, "" where there is none."""

    address: str
    node_id: str
    device: str = ""


@dataclass(frozen=True)
class RankOrder:
    """How the ranks of a pool are counted once its bundles are placed: rank r is the pool's `bundles[positions[r]]`."""

    positions: tuple[int, ...]
    process_on_nodes: tuple[int, ...]
    """Ranks per node in rank order; a permutation of the pool's own unless an entry lies on several nodes."""

    def local_rank_list(self) -> list[int]:
        """For each rank, its number within its node."""
        return local_ranks(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of ranks on its node."""
        return local_world_sizes(self.process_on_nodes)


def declared_order(process_on_nodes: Sequence[int], spots: Sequence[Spot]) -> tuple[int, ...]:
    """For each bundle of a reservation as declared, the number of the made bundle that serves it.

    `spots` are the made bundles, entry by entry. Entries of equal size, and bundles of one entry, are interchangeable, so
    they are counted by node address and device: the parts of a pool then have the ranks that the pool has.
    """
    made = _entries(process_on_nodes, spots)
    by_size = {
        size: iter(sorted((e for e in made if len(e) == size), key=lambda e: _keys(e, spots))) for size in process_on_nodes
    }
    return tuple(n for size in process_on_nodes for n in next(by_size[size]))


def rank_order(process_on_nodes: Sequence[int], spots: Sequence[Spot]) -> RankOrder:
    """The order of a pool's ranks: by node address, then device. `spots` are its bundles' places, in the pool's order.

    An entry's ranks on a node stay together, also where several entries share the node.

    >>> spots = [Spot("10.0.0.9", "b")] * 2 + [Spot("10.0.0.2", "a")]
    >>> rank_order([2, 1], spots)
    RankOrder(positions=(2, 0, 1), process_on_nodes=(1, 2))
    """
    pieces = [
        list(piece)
        for entry in _entries(process_on_nodes, spots)
        for _, piece in groupby(entry, lambda position: (spots[position].address, spots[position].node_id))
    ]
    pieces.sort(key=lambda piece: _spot_key(spots[piece[0]]))
    return RankOrder(tuple(position for piece in pieces for position in piece), tuple(len(piece) for piece in pieces))


def _spot_key(spot: Spot) -> SpotKey:
    return address_key(spot.address), spot.node_id, natural(spot.device)


def _keys(entry: list[int], spots: Sequence[Spot]) -> list[SpotKey]:
    return [_spot_key(spots[position]) for position in entry]


def _entries(process_on_nodes: Sequence[int], spots: Sequence[Spot]) -> list[list[int]]:
    """The positions of each entry, by node and device."""
    if len(spots) != sum(process_on_nodes):
        raise ResourceError(
            f"process_on_nodes {list(process_on_nodes)} has {sum(process_on_nodes)} bundles, got {len(spots)} spots"
        )
    positions = iter(range(len(spots)))
    return [sorted((next(positions) for _ in range(count)), key=lambda p: _spot_key(spots[p])) for count in process_on_nodes]

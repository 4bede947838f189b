"""What is held of the Ray cluster for resource pools: one placement group for each entry of a reservation.

Holders come and go: groups, and pools whose placement groups were asked for. The first one makes a reservation's placement
groups, the last one gives them back, unless the pool is detached.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from podium.errors import NoRoomError, ResourceError
from podium.single_controller.placement.plan import GPU, Node, Plan, bundle_resources, needs_gpus, plan_placement
from podium.single_controller.placement.rank_order import RankOrder, Spot, declared_order, rank_order
from podium.single_controller.placement.resource_pool import Bundle, Reservation, ResourcePool
from podium.single_controller.runtime.ray import cluster

UNUSED_WITHIN_S = 5.0
"""How long Ray may take to notice that killed actors have left a placement group."""


@dataclass(frozen=True)
class Seat:
    """Where a rank's actor goes, and what it takes there."""

    spot: Spot
    strategy: PlacementGroupSchedulingStrategy
    num_cpus: float
    num_gpus: float


@dataclass(frozen=True)
class Use:
    """What a holder has of a reservation."""

    name: str
    bundles: tuple[Bundle, ...]
    """Those that its ranks run in; none for a holder without ranks."""


@dataclass(frozen=True)
class Placed:
    """The placement groups of a reservation, and where its bundles came to be, as declared."""

    groups: tuple[PlacementGroup, ...]
    made: dict[Bundle, tuple[int, int]]
    """For each bundle, the number of its placement group and its index there."""
    spots: dict[Bundle, Spot]
    bundle: dict[str, float]
    """What each bundle has."""
    outlives_driver: bool


@dataclass
class Holding:
    """A reservation and who holds it."""

    stays: bool
    """Whether it is kept without a holder."""
    users: dict[Hashable, Use] = field(default_factory=dict)
    placed: Placed | None = None
    placing: threading.Lock = field(default_factory=threading.Lock)


_holdings: dict[tuple[str, Reservation], Holding] = {}
"""By session too: after a shutdown and another `ray.init` nothing is held any more."""
_table = threading.Lock()


def hold(
    holder: Hashable,
    name: str,
    pool: ResourcePool,
    *,
    runs_ranks: bool = True,
    detached: bool = False,
    bin_pack: bool = True,
    wait: bool = False,
    within_s: float | None = None,
) -> None:
    """Make the pool's placement groups, or share those that are there, until `release(holder)`.

    `detached` ones outlive the driver, as those of a detached pool do. `wait` for their places even on a cluster of one
    node, where that tells nothing new; `within_s` None is PLACEMENT_TIMEOUT_S. ResourceError, holding nothing, when there is
    no room, or when the pool's devices are shared by max_colocate_count holders with ranks already.
    """
    within_s = cluster.PLACEMENT_TIMEOUT_S if within_s is None else within_s
    outlives_driver = detached or pool.detached
    try:
        for reservation in pool.reservations:
            bundles = tuple(bundle for bundle in pool.bundles if bundle.reservation is reservation)
            holding = _join(holder, Use(name, bundles if runs_ranks else ()), reservation, pool)
            with holding.placing:
                if holding.placed is None or _was_removed(holding.placed):
                    holding.placed = _place(
                        name,
                        pool,
                        reservation,
                        outlives_driver=outlives_driver,
                        bin_pack=bin_pack,
                        wait=wait,
                        within_s=within_s,
                    )
                elif detached and not holding.placed.outlives_driver:
                    raise ResourceError(
                        f"group {name!r} is detached, but its pool is held already and ends with this driver: make the pool with "
                        "detached=True, or give the group a pool of its own"
                    )
    except BaseException:
        release(holder)
        raise


def release(holder: Hashable) -> None:
    """Give back what `hold` took; the last one to do so frees it, unless the pool is detached. Harmless when repeated."""
    with _table:
        left = [key for key, holding in _holdings.items() if holding.users.pop(holder, None)]
        ended = [key for key in left if not _holdings[key].users and not _holdings[key].stays]
        freed = {key: _holdings.pop(key) for key in ended}
    _remove(freed)


def keep(pool: ResourcePool, *, bin_pack: bool = True) -> list[PlacementGroup]:
    """Hold the pool until `drop`, group or no group, and give its placement groups, in the order of its ranks."""
    cluster.connect(pool.world_size)
    hold(_Keeper(pool.bundles), "pool", pool, runs_ranks=False, bin_pack=bin_pack, wait=True)
    return _groups(pool)


def held(pool: ResourcePool) -> list[PlacementGroup] | None:
    """The placement groups of a pool that is held, in the order of its ranks; None where it is not."""
    if not ray.is_initialized():
        return None
    with _table:
        holdings = [_holdings.get((cluster.session(), reservation)) for reservation in pool.reservations]
    return None if any(holding is None or holding.placed is None for holding in holdings) else _groups(pool)


def _groups(pool: ResourcePool) -> list[PlacementGroup]:
    placed = {reservation: _placed(reservation) for reservation in pool.reservations}
    order = order_of(pool)
    bundles = [pool.bundles[position] for position in order.positions]
    groups = [placed[bundle.reservation].groups[placed[bundle.reservation].made[bundle][0]] for bundle in bundles]
    return list(dict.fromkeys(groups))


def drop(pool: ResourcePool) -> None:
    """End `keep`, also of a detached pool, unless a group still uses it; harmless when there was none."""
    release(_Keeper(pool.bundles))
    with _table:
        left = [key for key in _holdings if key[1] in pool.reservations and not _holdings[key].users]
        freed = {key: _holdings.pop(key) for key in left}
    _remove(freed)


def remove_if_unused(groups: Iterable[PlacementGroup]) -> None:
    """Remove those that no actor is in any more, once Ray has noticed that."""
    left, give_up = set(groups), time.monotonic() + UNUSED_WITHIN_S
    while left:
        unused = {group for group in left if cluster.is_unused(group)}
        for group in unused:
            remove_placement_group(group)
        left -= unused
        if not left or time.monotonic() > give_up:
            return
        time.sleep(0.1)


def order_of(pool: ResourcePool) -> RankOrder:
    """How the ranks of a pool that is held are counted on the nodes that it came to be on."""
    return rank_order(pool.process_on_nodes, [_placed(bundle.reservation).spots[bundle] for bundle in pool.bundles])


def seats(pool: ResourcePool, order: RankOrder) -> list[Seat]:
    """For each rank of a pool that is held, its place and its share of it."""
    return [_seat(pool.bundles[position], 1 / pool.max_colocate_count) for position in order.positions]


def must_hide_gpus(seats: Sequence[Seat]) -> bool:
    """Whether a rank that takes no GPU goes to a node that has some: Ray would leave them all in its sight."""
    without = {seat.spot.node_id for seat in seats if not seat.num_gpus}
    return any(node.node_id in without and node.resources_total.get(GPU, 0) > 0 for node in cluster.nodes())


def no_room(pool: ResourcePool, name: str, within_s: float | None = None) -> ResourceError:
    """The error for ranks that got no process in time: the pool has no place, or its places are taken."""
    within_s = cluster.PLACEMENT_TIMEOUT_S if within_s is None else within_s
    for reservation in pool.reservations:
        placed = _placed(reservation)
        if any(cluster.state_of(group) != "CREATED" for group in placed.groups):
            return _no_place(_Request(reservation, placed.bundle, True, within_s), placed.groups)
    return ResourceError(
        f"the {pool.world_size} ranks of group {name!r} got no process within {within_s:g} s, though their pool has its "
        "place: is Ray able to start processes there, or still installing their environment? start_timeout_s gives them more "
        f"time; the pool's max_colocate_count is {pool.max_colocate_count}"
    )


@dataclass(frozen=True)
class _Keeper:
    """Who holds a pool whose placement groups were asked for."""

    bundles: tuple[Bundle, ...]


def _join(holder: Hashable, use: Use, reservation: Reservation, pool: ResourcePool) -> Holding:
    with _table:
        holding = _holdings.setdefault((cluster.session(), reservation), Holding(stays=pool.detached))
        count = Counter(bundle for other in holding.users.values() for bundle in other.bundles)
        if any(count[bundle] >= pool.max_colocate_count for bundle in use.bundles):
            raise ResourceError(_all_shares_taken(use, holding, pool))
        holding.users[holder] = use
        return holding


def _all_shares_taken(use: Use, holding: Holding, pool: ResourcePool) -> str:
    wanted = set(use.bundles)
    names = ", ".join(repr(other.name) for other in holding.users.values() if wanted & set(other.bundles))
    return (
        f"group {use.name!r} has no place: max_colocate_count={pool.max_colocate_count} is how many groups may share the pool's "
        f"devices, and they are taken by {names}. Raise the pool's max_colocate_count, close one of these groups, or give this "
        "one a pool of its own"
    )


def _seat(bundle: Bundle, share: float) -> Seat:
    placed = _placed(bundle.reservation)
    number, index = placed.made[bundle]
    strategy = PlacementGroupSchedulingStrategy(placed.groups[number], placement_group_bundle_index=index)
    return Seat(placed.spots[bundle], strategy, share, share if GPU in placed.bundle else 0)


def _placed(reservation: Reservation) -> Placed:
    with _table:
        holding = _holdings.get((cluster.session(), reservation))
    if holding is None or holding.placed is None:
        raise ResourceError(
            f"the pool {list(reservation.process_on_nodes)} is not held any more: it was closed, or ray.shutdown() was called, "
            "while it was asked for"
        )
    return holding.placed


class _Request(NamedTuple):
    """What is asked of the cluster for a reservation."""

    reservation: Reservation
    bundle: dict[str, float]
    bin_pack: bool
    within_s: float

    def plan(self, nodes: Sequence[Node]) -> Plan:
        """A node for each bundle. NoRoomError where there is none."""
        return plan_placement(self.reservation.process_on_nodes, self.bundle, nodes, bin_pack=self.bin_pack)


def _place(
    name: str, pool: ResourcePool, reservation: Reservation, *, outlives_driver: bool, bin_pack: bool, wait: bool, within_s: float
) -> Placed:
    nodes = cluster.nodes()
    request = _Request(reservation, bundle_resources(pool, use_gpu=needs_gpus(pool, nodes)), bin_pack, within_s)
    plan = request.plan(nodes)  # what never fits is refused before anything is made
    alive = [node for node in nodes if node.alive]
    if len(alive) > 1:
        with suppress(NoRoomError):  # first some of it must be given back
            plan = request.plan(cluster.nodes_now())
    # Ray wants the names of placement groups to differ.
    prefix = f"{reservation.name_prefix or f'podium_{name}'}_{secrets.token_hex(3)}"
    groups: list[PlacementGroup] = []
    try:
        for entry, on in enumerate(plan):
            group = placement_group(
                [request.bundle] * len(on),
                strategy="STRICT_PACK" if bin_pack else "PACK",
                name=f"{prefix}:{entry}",
                lifetime="detached" if outlives_driver else None,
                # Left to itself, Ray may place a small entry on the only node that is large enough for another one.
                _soft_target_node_id=on[0].node_id if bin_pack else None,
            )
            groups.append(group)
        if wait or len(alive) > 1:
            _await(request, groups)
        made_at = _spots(groups, reservation.process_on_nodes, alive)
    except BaseException:
        for group in groups:
            remove_placement_group(group)
        raise
    places = [(number, index) for number, count in enumerate(reservation.process_on_nodes) for index in range(count)]
    declared = list(zip(reservation.bundles(), declared_order(reservation.process_on_nodes, made_at), strict=True))
    return Placed(
        groups=tuple(groups),
        made={one: places[position] for one, position in declared},
        spots={one: made_at[position] for one, position in declared},
        bundle=request.bundle,
        outlives_driver=outlives_driver,
    )


def _await(request: _Request, groups: Sequence[PlacementGroup]) -> None:
    give_up = time.monotonic() + request.within_s
    for group in groups:
        while not group.wait(1):  # whole seconds; short ones, since Ctrl-C is noticed in between only
            if time.monotonic() > give_up:
                raise _no_place(request, groups)


def _no_place(request: _Request, groups: Sequence[PlacementGroup]) -> ResourceError:
    waited = f"Ray placed not all of {list(request.reservation.process_on_nodes)} within {request.within_s:g} s"
    try:
        request.plan(cluster.nodes_now(besides=groups))
    except NoRoomError as error:
        error.args = (f"{waited}: {error}",)
        return error
    return ResourceError(f"{waited}, though they fit: is the cluster busy or starting? start_timeout_s gives a group more time")


def _spots(groups: Sequence[PlacementGroup], counts: Sequence[int], alive: Sequence[Node]) -> list[Spot]:
    """Where every bundle of the groups is; on a cluster of one node that needs no asking."""
    if len(alive) == 1:
        return [Spot(alive[0].address, alive[0].node_id)] * sum(counts)
    address = {node.node_id: node.address for node in cluster.nodes()}
    where = [(cluster.node_ids(group), count) for group, count in zip(groups, counts, strict=True)]
    return [Spot(address[on[index]], on[index]) for on, count in where for index in range(count)]


def _was_removed(placed: Placed) -> bool:
    """Whether another driver has ended what outlives this one."""
    return placed.outlives_driver and any(cluster.state_of(group) == "REMOVED" for group in placed.groups)


def _remove(freed: Mapping[tuple[str, Reservation], Holding]) -> None:
    now = cluster.session() if ray.is_initialized() else None  # of an earlier session nothing is left
    for (session, _), holding in freed.items():
        for group in holding.placed.groups if holding.placed and session == now else ():
            remove_placement_group(group)

"""`ResourcePool`: how many ranks on which nodes, and whose devices they are. A value: nothing is held until a group starts.

Making a pool names a new `Reservation`. Parts of the pool (`sub_pool`, `split_resource_pool`) and unions
(`merge_resource_pool`) speak of the same one, so groups on them share its devices. Two pools made apart share none, even
when all their numbers are equal. Which node serves which rank is `placement`'s work; holding it is a runtime's.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from types import NoneType
from typing import Self, TypeGuard, TypeVar

from podium.errors import ResourceError, UnsupportedByRuntime, check_kind

AnyPool = TypeVar("AnyPool", bound="ResourcePool")
ACCELERATOR_TYPE = "the name of a resource, or None for any node"


@dataclass(frozen=True, eq=False)
class Reservation:
    """The devices of one pool as it was made. Compared by identity: a runtime keys what it holds by this object."""

    process_on_nodes: tuple[int, ...]
    name_prefix: str | None

    def bundles(self) -> tuple[Bundle, ...]:
        """All of it, node by node."""
        return tuple(Bundle(self, node, index) for node, count in enumerate(self.process_on_nodes) for index in range(count))

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # a copied pool is on the same devices


@dataclass(frozen=True)
class Bundle:
    """What one rank has of a reservation, as declared: number `index` of those on entry `node` of its process_on_nodes."""

    reservation: Reservation
    node: int
    index: int


@dataclass(frozen=True, init=False)
class ResourcePool:
    """`process_on_nodes[n]` ranks on node n; ranks are numbered node by node. ResourceError for counts below 1.

    Pools are equal when all their fields are, and they are on the same devices: two pools made apart differ.

    >>> pool = ResourcePool([2, 1])
    >>> pool.world_size, pool.local_rank_list(), pool.local_world_size_list()
    (3, [0, 1, 0], [2, 2, 1])
    """

    process_on_nodes: tuple[int, ...]
    max_colocate_count: int
    """How many groups share the pool's devices; each rank takes 1/max_colocate_count of one."""
    use_gpu: bool | None
    """None uses GPUs where the machine has enough of them."""
    name_prefix: str | None
    """What the runtime's names for the reservation begin with; None lets the runtime choose."""
    detached: bool
    """Whether the reservation outlives its groups and the driver."""
    accelerator_type: str | None
    """The name of a resource that a node must offer, as the cluster spells it; None takes any node."""
    bundles: tuple[Bundle, ...] = field(init=False, repr=False)
    """Rank r of the pool, as declared, is on `bundles[r]`."""

    def __init__(
        self,
        process_on_nodes: Sequence[int] = (),
        *,
        max_colocate_count: int = 1,
        use_gpu: bool | None = None,
        name_prefix: str | None = None,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        counts = _checked_counts(process_on_nodes)
        if not _is_count(max_colocate_count):
            raise ResourceError(f"max_colocate_count must be a whole number, 1 or more, got {max_colocate_count!r}")
        kinds: tuple[tuple[str, object, tuple[type, ...], str], ...] = (
            ("use_gpu", use_gpu, (bool, NoneType), "True, False, or None for wherever there are GPUs"),
            ("name_prefix", name_prefix, (str, NoneType), "a string, or None to let the runtime choose"),
            ("detached", detached, (bool,), "True or False"),
            ("accelerator_type", accelerator_type, (str, NoneType), ACCELERATOR_TYPE),
        )
        for name, value, kind, expected in kinds:
            check_kind(name, value, kind, expected, ResourceError)
        if accelerator_type == "":
            raise ResourceError(f"accelerator_type must be {ACCELERATOR_TYPE}, got ''")
        self._set(
            process_on_nodes=counts,
            max_colocate_count=max_colocate_count,
            use_gpu=use_gpu,
            name_prefix=name_prefix,
            detached=detached,
            accelerator_type=accelerator_type,
            bundles=Reservation(counts, name_prefix).bundles(),
        )

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def store(self) -> list[int]:
        """`process_on_nodes` as a list of the caller's own."""
        return list(self.process_on_nodes)

    def __call__(self) -> list[int]:
        return self.store

    @property
    def reservations(self) -> list[Reservation]:
        """What has to be held for the pool: one, or after a merge several."""
        return list(dict.fromkeys(bundle.reservation for bundle in self.bundles))

    @property
    def n_gpus_per_node(self) -> int:
        """GPUs on the fullest node, one for each rank there; 0 for a pool without GPUs."""
        return 0 if self.use_gpu is False else max(self.process_on_nodes)

    def local_world_size_list(self) -> list[int]:
        """For each rank, the number of ranks on its node."""
        return local_world_sizes(self.process_on_nodes)

    def local_rank_list(self) -> list[int]:
        """For each rank, its number within its node."""
        return local_ranks(self.process_on_nodes)

    def sub_pool(self, start: int, count: int) -> Self:
        """The ranks from `start` to `start + count` of this pool as a pool, on the same devices.

        >>> ResourcePool([4, 2]).sub_pool(3, 3).store
        [1, 2]
        """
        if type(start) is not int or not _is_count(count) or start < 0 or start + count > self.world_size:
            raise ResourceError(
                f"a sub-pool must be 1 or more of ranks 0 to {self.world_size - 1}, got start {start!r}, count {count!r}"
            )
        return self._on(self.bundles[start : start + count])

    def on_device(self, device_name: str) -> Self:
        """The same ranks, for "cpu" without GPUs, for "cuda" as the pool says. UnsupportedByRuntime for any other name."""
        if device_name not in ("cuda", "cpu"):
            raise UnsupportedByRuntime(f"device_name must be 'cuda' or 'cpu', got {device_name!r}: ranks run on no other devices")
        return self if device_name == "cuda" else self._on(self.bundles, use_gpu=False)

    def _on(self, bundles: tuple[Bundle, ...], **changes: object) -> Self:
        """This pool with all its fields, on these bundles."""
        pool = copy.copy(self)
        per_node = Counter((bundle.reservation, bundle.node) for bundle in bundles)
        pool._set(process_on_nodes=tuple(per_node.values()), bundles=bundles, **changes)
        return pool

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)  # frozen for everyone else


def split_resource_pool(resource_pool: AnyPool, split_size: int | Sequence[int]) -> list[AnyPool]:
    """Consecutive parts of a pool, on its devices: of `split_size` ranks each, or of the sizes in the list.

    The parts have the pool's fields; where a part begins or ends inside a node, its own counts say so. ResourceError when
    the size does not divide the pool, or the sizes do not add up to it.

    >>> [part.store for part in split_resource_pool(ResourcePool([4]), [1, 3])]
    [[1], [3]]
    """
    _check_pool(resource_pool)
    sizes = _split_sizes(resource_pool.world_size, split_size)
    return [resource_pool.sub_pool(stop - size, size) for size, stop in zip(sizes, accumulate(sizes), strict=True)]


def merge_resource_pool(rp1: AnyPool, rp2: AnyPool) -> AnyPool:
    """One pool on the devices of both, losing nothing: joining the parts of a pool again gives that pool.

    Ranks of one reservation stand together in its own order, reservations in the order in which they appear. Differing name
    prefixes are joined by "_". ResourceError naming the field and both values where another one differs, and where the
    pools overlap.
    """
    _check_pool(rp1)
    _check_pool(rp2)
    if type(rp1) is not type(rp2):
        raise ResourceError(f"pools that are merged must have one type, got {type(rp1).__name__} and {type(rp2).__name__}")
    for name in (f.name for f in fields(rp1) if f.name not in {"process_on_nodes", "bundles", "name_prefix"}):
        ours, theirs = getattr(rp1, name), getattr(rp2, name)
        if ours != theirs:
            raise ResourceError(f"pools that are merged must have the same {name}, got {ours!r} and {theirs!r}: make them alike")
    prefixes = dict.fromkeys(prefix for prefix in (rp1.name_prefix, rp2.name_prefix) if prefix is not None)
    return rp1._on(_union(rp1.bundles, rp2.bundles), name_prefix="_".join(prefixes) if prefixes else None)


def local_ranks(process_on_nodes: Sequence[int]) -> list[int]:
    """For each rank, its number within its node."""
    return [local_rank for count in process_on_nodes for local_rank in range(count)]


def local_world_sizes(process_on_nodes: Sequence[int]) -> list[int]:
    """For each rank, the number of ranks on its node."""
    return [count for count in process_on_nodes for _ in range(count)]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1  # a bool is an int, but not a count


def _are_counts(values: object) -> TypeGuard[Sequence[int]]:
    """Whether it is a sequence of counts; not a string or bytes, though Python could iterate over one."""
    return isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray) and all(map(_is_count, values))


def _checked_counts(process_on_nodes: object) -> tuple[int, ...]:
    if not _are_counts(process_on_nodes) or not process_on_nodes:
        got = list(process_on_nodes) if isinstance(process_on_nodes, tuple) else process_on_nodes
        raise ResourceError(
            f"process_on_nodes must be a list with the number of ranks (1 or more) of each node, got {got!r}; a pool is a value: "
            "give all its nodes when it is made"
        )
    return tuple(process_on_nodes)


def _check_pool(pool: object) -> None:
    check_kind("what is split or merged", pool, ResourcePool, "an object of ResourcePool", ResourceError)


def _split_sizes(world_size: int, split_size: object) -> list[int]:
    if type(split_size) is int:
        if split_size < 1 or world_size % split_size:
            raise ResourceError(
                f"split_size {split_size} does not divide the pool's {world_size} ranks: use a divisor, or a list of sizes "
                f"that adds up to {world_size}"
            )
        return [split_size] * (world_size // split_size)
    if not _are_counts(split_size):
        raise ResourceError(
            f"split_size must be a whole number of ranks that divides {world_size}, or a list of sizes of 1 or more that adds up "
            f"to {world_size}, got {split_size!r}"
        )
    if sum(split_size) != world_size:
        raise ResourceError(
            f"split_size {list(split_size)} is {sum(split_size)} ranks, the pool has {world_size}: use sizes that add up"
        )
    return list(split_size)


def _union(first: tuple[Bundle, ...], second: tuple[Bundle, ...]) -> tuple[Bundle, ...]:
    together = first + second
    shared = len(together) - len(set(together))
    if shared:
        raise ResourceError(f"pools that are merged must not share a rank, got {shared} in both: merge parts that do not overlap")
    turn = {reservation: n for n, reservation in enumerate(dict.fromkeys(bundle.reservation for bundle in together))}
    return tuple(sorted(together, key=lambda bundle: (turn[bundle.reservation], bundle.node, bundle.index)))

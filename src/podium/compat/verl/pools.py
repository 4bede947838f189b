"""verl's pools: thin layers over `ResourcePool`, with verl's arguments, defaults and placement groups.

Ray is imported where placement groups are asked for: `import podium.compat.verl` does not need it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from podium.errors import ResourceError, check_kind, unknown_name
from podium.single_controller.placement.resource_pool import ResourcePool

Item = TypeVar("Item")
Role = TypeVar("Role", bound=Hashable)
PACKING = {"STRICT_PACK": True, "PACK": False}
"""Ray's strategies for the ranks of an entry, and whether they share a node."""


class RayResourcePool(ResourcePool):
    """A `ResourcePool` with verl's arguments and defaults: GPUs are needed unless use_gpu=False, ten groups share a device.

    >>> RayResourcePool([4], use_gpu=False).n_gpus_per_node
    0
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool | None = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(
            () if process_on_nodes is None else process_on_nodes,
            max_colocate_count=max_colocate_count,
            use_gpu=use_gpu,
            name_prefix=name_prefix,
            detached=detached,
            accelerator_type=accelerator_type,
        )

    def get_placement_groups(self, strategy: str = "STRICT_PACK", *, device_name: str = "cuda") -> list[Any]:
        """Ray's placement groups of the pool, by node address. They are held until `close()`, group or no group.

        strategy: STRICT_PACK for the ranks of an entry on one node, PACK where they may be on several; ignored for a pool that
        is held already. device_name: see `on_device`. ResourceError for any other strategy and, with need and supply per node,
        where there is no room.
        """
        if strategy not in PACKING:
            raise ResourceError(unknown_name("placement strategy", strategy, PACKING))
        from podium.single_controller.runtime.ray import reservations

        return reservations.keep(self.on_device(device_name), bin_pack=PACKING[strategy])

    @property
    def pgs(self) -> list[Any] | None:
        """Ray's placement groups of the pool, by node address; None unless it is held."""
        from podium.single_controller.runtime.ray import reservations

        return reservations.held(self)

    def close(self) -> None:
        """Give back what `get_placement_groups` holds, and what a detached pool keeps; groups that still use it keep it."""
        from podium.single_controller.runtime.ray import reservations

        reservations.drop(self)


class ResourcePoolManager(Generic[Role]):
    """Named pools and the role that runs on each, such as global_pool, reward_pool, teacher_pool.

    `resource_pool_spec` is pool name -> ranks per node, `mapping` is role -> pool name, None for no roles; roles are strings or
    an enum's members. ResourceError where one of them is not such a table, and for a role mapped to a pool that is not in the
    spec.

    >>> manager = ResourcePoolManager({"global_pool": [2]}, {"actor": "global_pool", "critic": "global_pool"})
    >>> manager.get_resource_pool("actor") is manager.get_resource_pool("critic")
    True
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[Role, str] | None = None,
        max_colocate_count: int = 3,
        *,
        use_gpu: bool | None = True,
    ) -> None:
        _check_table("resource_pool_spec", resource_pool_spec, "pool name -> ranks per node, such as {'global_pool': [2]}")
        mapping = {} if mapping is None else mapping
        _check_table("mapping", mapping, "role -> pool name, such as {'actor': 'global_pool'}")
        self.resource_pool_dict: dict[str, RayResourcePool] = {
            name: _named_pool(name, counts, max_colocate_count, use_gpu) for name, counts in resource_pool_spec.items()
        }
        self.resource_pool_spec = {name: pool.store for name, pool in self.resource_pool_dict.items()}
        self.mapping = dict(mapping)
        for role, name in self.mapping.items():
            if not isinstance(name, str) or name not in self.resource_pool_dict:
                unknown = unknown_name("resource pool", _spelled(name), self.resource_pool_dict)
                raise ResourceError(f"role {_spelled(role)!r}: {unknown}")

    def create_resource_pool(self) -> dict[str, RayResourcePool]:
        """The pools by name: the same ones at each call, and nothing is held until a group starts on one."""
        return dict(self.resource_pool_dict)

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The role's pool. ResourceError with the nearest name for a role that is not mapped."""
        try:
            name = self.mapping[role]
        except (KeyError, TypeError):  # TypeError: the role cannot be hashed
            raise ResourceError(unknown_name("role", _spelled(role), map(_spelled, self.mapping))) from None
        return self.resource_pool_dict[name]

    def get_n_gpus(self) -> int:
        """GPUs that all pools ask for together: one for each rank, 0 with use_gpu=False."""
        return sum(pool.world_size for pool in self.resource_pool_dict.values() if pool.use_gpu is not False)


def extract_groups(available: Iterable[tuple[Item, int]], requested: Sequence[int]) -> list[Item]:
    """One existing group for each requested number of bundles, in the order of the request, the largest for the largest.

    `available` are groups and their numbers of bundles. ResourceError where there are too few, or too small ones.

    >>> extract_groups([("a", 2), ("b", 4)], [1, 3])
    ['a', 'b']
    """
    groups = sorted(available, key=lambda group: group[1], reverse=True)
    entries = sorted(range(len(requested)), key=lambda entry: requested[entry], reverse=True)
    sizes = [size for _, size in groups]
    if len(groups) < len(entries) or any(size < requested[entry] for entry, size in zip(entries, sizes, strict=False)):
        raise ResourceError(
            f"a group for each of process_on_nodes {list(requested)} is needed, the existing ones have {sizes} bundles: lower "
            "the counts, or take larger pools as the source"
        )
    found = dict(zip(entries, (group for group, _ in groups), strict=False))
    return [found[entry] for entry in range(len(requested))]


def _check_table(name: str, table: object, expected: str) -> None:
    check_kind(name, table, Mapping, f"a dict of {expected}", ResourceError)


def _named_pool(name: str, counts: Sequence[int], max_colocate_count: int, use_gpu: bool | None) -> RayResourcePool:
    check_kind("a resource pool", name, str, "named by a string", ResourceError)
    try:
        return RayResourcePool(counts, use_gpu=use_gpu, name_prefix=name, max_colocate_count=max_colocate_count)
    except ResourceError as error:
        raise ResourceError(f"resource pool {name!r}: {error}") from error


def _spelled(role: object) -> str:
    """An enum's member by its name, which is what a reader of the message would write."""
    return str(getattr(role, "name", role))

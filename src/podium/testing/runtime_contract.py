"""What every runtime must do, as checks of behaviour that a driver sees.

A request that a runtime does not support, by its capabilities, must be refused with UnsupportedByRuntime. A check of
`CALL_CHECKS` takes a healthy group of four ranks and leaves it healthy. A check of `LIFECYCLE_CHECKS` takes the runtime's name
and makes groups of its own, which may end badly. `check_runtime` runs them all.
"""

from __future__ import annotations

from podium.single_controller import Init, ResourcePool, WorkerGroup
from podium.testing.call_checks import CALL_CHECKS, ContractGroup
from podium.testing.contract_workers import MESH, THREADS, WORLD_SIZE, ContractWorker
from podium.testing.lifecycle_checks import LIFECYCLE_CHECKS


def check_runtime(runtime: str) -> None:
    """Run the whole suite on a runtime of that name. The first check that does not hold raises."""
    with contract_group(runtime) as group:
        for check in CALL_CHECKS:
            check(group)
    for lifecycle_check in LIFECYCLE_CHECKS:
        lifecycle_check(runtime)


def contract_group(runtime: str) -> ContractGroup:
    """The group that `CALL_CHECKS` share: four ranks of two threads."""
    made = Init(ContractWorker, MESH)
    return WorkerGroup(ResourcePool([WORLD_SIZE]), made, runtime=runtime, name="contract", threads_per_rank=THREADS)

"""A script of `test_ray_resources.py`: what does and does not fit on a cluster with 4 CPUs."""

from __future__ import annotations

import ray

from podium.compat.verl import RayResourcePool
from podium.errors import ResourceError
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register
from podium.single_controller.runtime.ray import cluster


class Plain(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whoami(self) -> int:
        return self.rank


def check(holds: bool, got: object = None) -> None:
    if not holds:
        raise SystemExit(f"not so: {got}")


def refusal(pool: RayResourcePool) -> str:
    try:
        pool.get_placement_groups()
    except ResourceError as error:
        return str(error)
    raise SystemExit(f"{pool} was not refused")


def main() -> None:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20)
    pool = ResourcePool([2], max_colocate_count=4, name_prefix="mine")
    group = WorkerGroup(pool, Plain, runtime="ray")
    check(group.whoami() == [0, 1])
    print("shared")

    limit_s, cluster.PLACEMENT_TIMEOUT_S = cluster.PLACEMENT_TIMEOUT_S, 1.0
    message = refusal(RayResourcePool([3], use_gpu=False))
    check("process_on_nodes [3] needs 3 bundles of CPU 1" in message, message)
    check("2/4" in message and "mine_" in message and "has CPU 2" in message and "lower process_on_nodes" in message, message)
    message = refusal(RayResourcePool([5], use_gpu=False))
    check("CPU is too little" in message and "larger num_cpus" in message, message)
    print("refused")

    cluster.PLACEMENT_TIMEOUT_S = limit_s
    ray.shutdown()  # without a word to the group
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20)
    group.close()
    again = WorkerGroup(pool, Plain, runtime="ray")
    check(again.whoami() == [0, 1])
    again.close()
    print("again")


if __name__ == "__main__":
    main()

"""A script of `test_ray_resources.py`: a Ray cluster of two nodes on one machine, by two of its loopback addresses."""

from __future__ import annotations

import os
import time

import ray
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster

from podium.errors import ResourceError, WorkerLostError
from podium.single_controller import (
    Dispatch,
    RayResourcePool,
    Worker,
    WorkerGroup,
    merge_resource_pool,
    register,
    split_resource_pool,
)
from podium.single_controller.runtime.ray import cluster, reservations


class Prober(Worker):
    def __init__(self) -> None:
        self.init_process_group("gloo")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[str, tuple[int, ...], tuple[str, ...], str]:
        names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "WORLD_SIZE")
        mine = (self.rank, self.local_rank, self.local_world_size)
        return ray.util.get_node_ip_address(), mine, tuple(os.environ[name] for name in names), self.get_master_addr_port()[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        value = torch.tensor([float(self.rank)])
        dist.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        if self.rank == rank:
            print("the last word", flush=True)
            os._exit(3)


def check(holds: bool, told: object = None) -> None:
    if not holds:
        raise SystemExit(f"not so: {told}")


def addresses(pool: RayResourcePool) -> list[str]:
    return [seat.spot.address for seat in reservations.seats(pool, reservations.order_of(pool))]


def main() -> None:
    nodes = Cluster()  # by number 2 is before 10; as text, and in the order of their start, it is after
    nodes.add_node(num_cpus=3, node_ip_address="127.0.0.10", object_store_memory=80 * 2**20, include_dashboard=False)
    nodes.add_node(num_cpus=4, node_ip_address="127.0.0.2", object_store_memory=80 * 2**20)
    ray.init(address=nodes.address, log_to_driver=False)

    pool = RayResourcePool([2, 4], use_gpu=False, max_colocate_count=2)
    first = pool.get_placement_groups()
    check(pool.get_placement_groups() == first and [group.bundle_count for group in first] == [4, 2], first)
    with WorkerGroup(pool, Prober, runtime="ray", threads_per_rank=1) as group:
        told = group.place()
        check([address for address, *_ in told] == ["127.0.0.2"] * 4 + ["127.0.0.10"] * 2, told)
        check([mine for _, mine, *_ in told] == [(r, r % 4, 4 if r < 4 else 2) for r in range(6)], told)
        sizes = ["4"] * 4 + ["2"] * 2
        check([env for *_, env, _ in told] == [(str(r), str(r % 4), sizes[r], sizes[r], "6") for r in range(6)], told)
        check({master for *_, master in told} == {"127.0.0.2"}, told)
        print("places")

        parts = split_resource_pool(pool, [1, 3, 2])
        check(
            [addresses(part) for part in parts] == [["127.0.0.10"], ["127.0.0.2"] * 2 + ["127.0.0.10"], ["127.0.0.2"] * 2], parts
        )
        joined = merge_resource_pool(parts[2], merge_resource_pool(parts[1], parts[0]))
        check(addresses(joined) == addresses(pool) and joined == pool, joined)
        print("parts")

        check(group.sum_of_ranks() == [15.0] * 6)
        print("sum")

        napping = group.nap(8.0)
        for _ in range(10):  # a rank may not have started the call yet
            status = group.status(stacks=True)
            if all("nap" in status.ranks[rank].stacks for rank in range(6)):
                break
            time.sleep(0.5)
        check(all("nap" in status.ranks[rank].stacks for rank in range(6)), status)
        napping.get()
        print("stacks")

        try:
            group.die(1)
            raise SystemExit("rank 1 did not die")
        except WorkerLostError as error:
            check(error.origin.rank == 1 and "the last word" in str(error), error)
        print("death")

    cluster.PLACEMENT_TIMEOUT_S = 1.0
    try:
        RayResourcePool([4], use_gpu=False).get_placement_groups()
        raise SystemExit("there was room")
    except ResourceError as error:
        check(
            "127.0.0.2" in str(error) and "0/4" in str(error) and "1/3" in str(error) and "held on 127.0.0.2" in str(error), error
        )
    pool.close()
    print("full")


if __name__ == "__main__":
    main()

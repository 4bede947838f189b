"""A script of `test_ray_resources.py`: a Ray cluster of two nodes on one machine, by two of its loopback addresses."""

from __future__ import annotations

import os
import time

import ray
import torch
import torch.distributed as dist
from ray._private import internal_api
from ray.cluster_utils import Cluster

from podium.compat.verl import RayResourcePool
from podium.errors import DataError, ResourceError, WorkerLostError
from podium.protocol import DataProto
from podium.single_controller import (
    DataProtoFuture,
    Dispatch,
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
        interfaces = os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]
        check(interfaces == ("lo", "=lo"), interfaces)  # of both nodes' addresses, here
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


class Maker(Worker):
    """Its rows are 4 MB each."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def make(self, rows: DataProto) -> DataProto:
        wide = rows.batch["x"].float()[:, None].expand(-1, 2**20).contiguous()
        return DataProto({"x": rows.batch["x"], "wide": wide}, {"name": [str(x) * 2**17 for x in rows.batch["x"].tolist()]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def ends(self, rows: DataProto) -> DataProto:
        return DataProto({"ends": rows.batch["wide"][:, [0, -1]], "rank": torch.full((len(rows),), self.rank)})


def check(holds: bool, got: object = None) -> None:
    if not holds:
        raise SystemExit(f"not so: {got}")


def addresses(pool: RayResourcePool) -> list[str]:
    return [seat.spot.address for seat in reservations.seats(pool, reservations.order_of(pool))]


def stored_bytes(address: str) -> int:
    """What the object store of that node holds."""
    state = internal_api.get_state_from_address(ray.get_runtime_context().gcs_address)
    node = next(node for node in ray.nodes() if node["NodeManagerAddress"] == address)
    reply = internal_api.get_memory_info_reply(state, node["NodeManagerAddress"], node["NodeManagerPort"])
    return int(reply.store_stats.object_store_bytes_used)


def check_rows(made: DataProtoFuture) -> None:
    """Rows 0, 1 and 2 are one block on the other node: the driver, at 127.0.0.10, reads parts of it, and then the whole."""
    before = stored_bytes("127.0.0.10")
    for part in (made[1:2], made[[2, 0]], made[[2, 1, 0]].select(None, [])):
        found = part.get(keys=["wide"]).batch["wide"]
        check(found[:, -1].tolist() == part.get(keys=["x"]).batch["x"].tolist(), found)
        found.fill_(-1)  # the reader's own
        check(part[:1].get().batch["wide"][0, 0].item() == part.get(keys=["x"]).batch["x"][0].item())
    for _ in range(50):  # the store lets go of the parts a little later
        if (grown := stored_bytes("127.0.0.10") - before) < 4 * 2**20:
            break
        time.sleep(0.1)
    check(grown < 4 * 2**20, grown)
    whole = made[:3].get()
    check(whole.batch["wide"][:, 5].tolist() == [0, 1, 2] and whole.non_tensor_batch["name"][2] == "2" * 2**17, whole)
    check(stored_bytes("127.0.0.10") - before >= 12 * 2**20, stored_bytes("127.0.0.10") - before)


def check_lost(nodes: Cluster, node: object) -> None:
    """Rows on a node that is gone are reported as lost; columns in the header are still there."""
    with WorkerGroup(RayResourcePool([4], use_gpu=False), Maker, runtime="ray", threads_per_rank=1) as group:
        made = group.make(DataProto({"x": torch.arange(4)}))
        check(made[3:].get(keys=["wide"]).batch["wide"][0, 9].item() == 3)
        nodes.remove_node(node)
        for read in (made.get, made[3:].get):
            try:
                read(keys=["wide"])
                raise SystemExit("rows of a lost node were read")
            except DataError as error:
                check("are lost, make them anew" in str(error), error)
        check(made.get(keys=["x"]).batch["x"].tolist() == [0, 1, 2, 3])


def main() -> None:
    nodes = Cluster()  # by number 2 is before 10; as text, and in the order of their start, it is after
    nodes.add_node(num_cpus=3, node_ip_address="127.0.0.10", object_store_memory=80 * 2**20, include_dashboard=False)
    other = nodes.add_node(num_cpus=4, node_ip_address="127.0.0.2", object_store_memory=80 * 2**20)
    ray.init(address=nodes.address, log_to_driver=False)

    pool = RayResourcePool([2, 4], use_gpu=False, max_colocate_count=2)
    first = pool.get_placement_groups()
    check(pool.get_placement_groups() == first and [group.bundle_count for group in first] == [4, 2], first)
    with WorkerGroup(pool, Prober, runtime="ray", threads_per_rank=1) as group:
        found = group.place()
        check([address for address, *_ in found] == ["127.0.0.2"] * 4 + ["127.0.0.10"] * 2, found)
        check([mine for _, mine, *_ in found] == [(r, r % 4, 4 if r < 4 else 2) for r in range(6)], found)
        sizes = ["4"] * 4 + ["2"] * 2
        check([env for *_, env, _ in found] == [(str(r), str(r % 4), sizes[r], sizes[r], "6") for r in range(6)], found)
        check({master for *_, master in found} == {"127.0.0.2"}, found)
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

    with WorkerGroup(pool, Maker, runtime="ray", threads_per_rank=1) as group:
        made = group.make(DataProto({"x": torch.arange(15)}))
        check_rows(made)
        order = list(range(14, -1, -1))
        ends = group.ends(made.select(["wide"], [])[order])
        check(ends.batch["ends"].tolist() == [[x, x] for x in order], ends)
        check(ends.batch["rank"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3, 3, 4, 4, 5, 5], ends)
        del made
        print("rows")

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

    cluster.PLACEMENT_TIMEOUT_S = 60.0
    check_lost(nodes, other)
    print("lost")


if __name__ == "__main__":
    main()

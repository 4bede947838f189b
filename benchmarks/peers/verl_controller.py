"""verl's side of the controller benchmark: its own single-controller layer beside bare Ray actors, one JSON line out.

    python verl_controller.py [--workers 1,2,4,8] [--blocks 10] [--starts 2]

The work of `podium_controller.py`. Runs in an environment of its own: CPU torch, ray, tensordict<0.11, numpy, omegaconf,
hydra-core, codetiming, transformers, and `pip install --no-deps verl` (its dependencies would bring CUDA).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from statistics import median

os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")

import ray
import torch
import verl
from ray_calls import Bare, Case, bare_actors, bare_call, end, in_turns, loaded_modules, ratio, start_ray, start_times
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

ROWS = 8
RANKS_OF_START = 4


class Echo(Worker):
    """Does nothing, and gives back what it gets; two ranks share a shard of the mesh, the even one collects."""

    def __init__(self) -> None:
        super().__init__()
        self._register_dispatch_collect_info("pairs", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="pairs"))
    def mesh_rows(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def modules(self) -> list[str]:
        """The modules of verl that a rank has loaded."""
        return loaded_modules("verl")


def group_of(ranks: int) -> RayWorkerGroup:
    """A group of Echo on CPUs."""
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=4)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Echo)), use_gpu=False)


def close(group: RayWorkerGroup) -> None:
    """End the ranks and give their places back."""
    end(group.workers)
    for placement_group in group.resource_pool.get_placement_groups():
        ray.util.remove_placement_group(placement_group)


def call_ratios(ranks: int, blocks: int) -> dict[str, float]:
    """Group calls as ratios to the bare call."""
    group, bare = group_of(ranks), bare_actors(Bare, ranks)
    columns = {"input_ids": torch.zeros(ROWS, 16, dtype=torch.int64), "advantages": torch.zeros(ROWS, 16)}
    data = DataProto.from_dict(columns)
    cases: dict[str, Case] = {
        "bare": bare_call(bare),
        "one_to_all": group.empty,
        "dp": lambda: group.rows(data),
        "mesh": lambda: group.mesh_rows(data),
    }
    times = in_turns(cases, blocks)
    close(group)
    end(bare)
    found = {f"bare_us_{ranks}": median(times["bare"])}
    return {**found, **{f"{name}_ratio_{ranks}": ratio(times[name], times["bare"]) for name in cases if name != "bare"}}


def start_ratio(rounds: int) -> dict[str, float]:
    """A group's start to its first answer, beside bare actors that import the modules which a rank imports."""

    def start() -> tuple[Case, Case]:
        group = group_of(RANKS_OF_START)
        return group.empty, lambda: close(group)

    group = group_of(1)
    modules = group.modules()[0]
    close(group)
    return start_times(start, modules, RANKS_OF_START, rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4,8")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--starts", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start_ray()
    found: dict[str, float] = {}
    for ranks in map(int, arguments.workers.split(",")):
        found |= call_ratios(ranks, arguments.blocks)
        print(f"verl: {ranks} workers measured", file=sys.stderr, flush=True)
    found |= start_ratio(arguments.starts)
    print(json.dumps({"peer": f"verl {verl.__version__}", **{name: round(value, 3) for name, value in found.items()}}))


if __name__ == "__main__":
    main()

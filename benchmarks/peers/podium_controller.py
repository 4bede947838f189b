"""Podium's side of the controller benchmark: group calls beside bare Ray actors, one JSON line out.

    python podium_controller.py [--workers 1,2,4,8] [--blocks 10] [--starts 2]

Times are medians; a ratio is to the empty call of as many bare actors of the same kind, measured in turns in this process.
Needs Podium with the extra `ray`. `verl_controller.py` does the same work.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median

import torch
from instant_runtime import offer_instant_runtime
from ray_calls import (
    AsyncBare,
    Bare,
    Case,
    bare_actors,
    bare_call,
    cpu_microseconds,
    end,
    in_turns,
    loaded_modules,
    ratio,
    start_ray,
    start_times,
)
from tensordict import TensorDict

import podium
from podium.protocol import DataProto
from podium.single_controller import (
    Dispatch,
    ResourcePool,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

ROWS = 8
RANKS_OF_START = 4
DRIVER_RANKS = (256, 1024)


class Echo(Worker):
    """Does nothing, and gives back what it gets; two ranks share a shard of the mesh, the even one collects."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("pairs", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def empty(self) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def rows(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def table(self, data: TensorDict) -> TensorDict:
        return data

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="pairs"))
    def mesh_rows(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def modules(self) -> list[str]:
        """The modules of Podium that a rank has loaded."""
        return loaded_modules("podium")


class AsyncEcho(Worker):
    """The empty call of a class with async methods."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def empty(self) -> None:
        pass


def tiny_batch(rows: int = ROWS) -> DataProto:
    """Two columns of 16 numbers a row."""
    return DataProto.from_dict({"input_ids": torch.zeros(rows, 16, dtype=torch.int64), "advantages": torch.zeros(rows, 16)})


def group_of(cls: type[Worker], ranks: int, runtime: str = "ray") -> WorkerGroup[Worker]:
    """A group of the class, of single-threaded ranks."""
    return WorkerGroup(ResourcePool([ranks], use_gpu=False), cls, runtime=runtime, threads_per_rank=1)


def call_ratios(ranks: int, blocks: int) -> dict[str, float]:
    """Group calls on Ray, sync and async, as ratios to the bare call."""
    bare, async_bare, data = bare_actors(Bare, ranks), bare_actors(AsyncBare, ranks), tiny_batch()
    table = data.to_tensordict()
    with group_of(Echo, ranks) as group, group_of(AsyncEcho, ranks) as async_group:
        cases: dict[str, Case] = {
            "bare": bare_call(bare),
            "one_to_all": group.empty,
            "dp": lambda: group.rows(data),
            "tensordict": lambda: group.table(table),
            "mesh": lambda: group.mesh_rows(data),
            "async_bare": bare_call(async_bare),
            "async": async_group.empty,
        }
        times = in_turns(cases, blocks)
    end([*bare, *async_bare])
    found = {f"{name}_us_{ranks}": median(times[name]) for name in ("bare", "async_bare")}
    found |= {f"{name}_ratio_{ranks}": ratio(times[name], times["bare"]) for name in ("one_to_all", "dp", "tensordict", "mesh")}
    return {**found, f"async_ratio_{ranks}": ratio(times["async"], times["async_bare"])}


def start_ratio(rounds: int) -> dict[str, float]:
    """A group's start to its first answer, beside bare actors that import the modules of Podium which a rank imports."""

    def start() -> tuple[Case, Case]:
        group = group_of(Echo, RANKS_OF_START)
        return group.empty, group.close

    with group_of(Echo, 1) as group:
        modules = group.modules()[0]
    return start_times(start, modules, RANKS_OF_START, rounds)


def inline_cost() -> dict[str, float]:
    """An empty call in the driver's own process, in microseconds."""
    with group_of(Echo, 1, "inline") as one, group_of(Echo, 4, "inline") as four:
        times = in_turns({"inline_us": one.empty, "inline_us_4": four.empty}, blocks=20)
    return {name: median(blocks) for name, blocks in times.items()}


def driver_cost() -> dict[str, float]:
    """The CPU time of the driver in a call, in microseconds per rank, when the transport answers at once."""
    runtime, found = offer_instant_runtime(), {}
    for ranks in DRIVER_RANKS:
        data = tiny_batch(2 * ranks)
        with group_of(Echo, ranks, runtime) as group:
            cases: dict[str, Case] = {"": group.empty, "dp_": lambda: group.rows(data)}  # noqa: B023 - called in this turn
            for name, blocks in in_turns(cases, 5, cpu_microseconds).items():
                found[f"driver_{name}us_per_rank_{ranks}"] = median(blocks) / ranks
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4,8")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--starts", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {**inline_cost(), **driver_cost()}
    start_ray()
    for ranks in map(int, arguments.workers.split(",")):
        found |= call_ratios(ranks, arguments.blocks)
        print(f"podium: {ranks} workers measured", file=sys.stderr, flush=True)
    found |= start_ratio(arguments.starts)
    rounded = {name: round(value, 3) for name, value in found.items()}
    print(json.dumps({"peer": f"podium {podium.__version__}", **rounded}))


if __name__ == "__main__":
    main()

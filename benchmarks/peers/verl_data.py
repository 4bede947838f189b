"""verl's side of the data benchmark: its DataProto through its own worker groups beside bare Ray actors, one JSON line out.

    python verl_data.py [--sizes 1,16,128,512] [--workers 2,4] [--quick]

The dense part of the work of `podium_data.py`, with verl's default way to serialise and with its other, `numpy`. Runs in the
environment of `verl_controller.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")

import payloads as load
import ray
import torch
import verl
from ray_calls import Case, bare_actors, end, start_ray
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

METHOD = "VERL_DATAPROTO_SERIALIZATION_METHOD"


class DataWorker(Worker):
    """Takes rows and gives them back."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def serialise_by(self, method: str) -> None:
        os.environ[METHOD] = method

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def send(self, data: DataProto) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data


def group_of(ranks: int) -> RayWorkerGroup:
    """A group of DataWorker on CPUs."""
    pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=4)
    return RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(DataWorker)), use_gpu=False)


def call_figures(group: RayWorkerGroup, bare: list[Any], mib: int, *, quick: bool) -> dict[str, float]:
    """Echo and send of dense rows of this size, by either method."""
    ranks, columns = len(bare), load.dense(mib)
    data, suffix = DataProto.from_dict(columns), f"{mib}mb_x{len(bare)}"
    arrays = {key: column.numpy() for key, column in columns.items()}
    found: dict[str, float] = {}
    for method, prefix in (("", ""), ("numpy", "numpy_")):
        os.environ[METHOD] = method
        group.serialise_by(method)
        cases = {f"{prefix}{name}": _bound(getattr(group, name), data) for name in ("echo", "send")}
        raw = load.raw_cases(bare, lambda: load.cut_rows(arrays, ranks))
        times = load.timed_in_turns({**raw, **cases}, min(3, load.repeats_of(mib, quick)))
        found |= load.echo_figures(times, "dense", suffix)
        found |= load.memory_figures({f"{prefix}echo": cases[f"{prefix}echo"]}, "dense", mib, suffix)
    return found


def _bound(call: Callable[[DataProto], Any], data: DataProto) -> Case:
    return lambda: call(data)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,16,128,512")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes = load.sizes_with_room(list(map(int, arguments.sizes.split(","))))
    found: dict[str, float] = {}
    if sizes:
        start_ray(load.store_bytes(sizes))
    for ranks in map(int, arguments.workers.split(",")) if sizes else ():
        bare, group = bare_actors(load.BareData, ranks), group_of(ranks)
        for mib in sizes:
            found |= call_figures(group, bare, mib, quick=arguments.quick)
            print(f"verl: {mib} MB over {ranks} workers measured", file=sys.stderr, flush=True)
        end([*group.workers, *bare])
        for placement_group in group.resource_pool.get_placement_groups():
            ray.util.remove_placement_group(placement_group)
    print(json.dumps({"peer": f"verl {verl.__version__}", **{name: round(value, 3) for name, value in found.items()}}))


if __name__ == "__main__":
    main()

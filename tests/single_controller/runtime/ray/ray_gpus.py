"""A script of `test_ray_resources.py`: a Ray cluster that counts four GPUs, also on a machine without GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import ray
import torch

from podium.engines import get_device_name, pick_device
from podium.errors import ResourceError
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register
from podium.single_controller.rank.context import current_context
from podium.single_controller.rank.devices import own_device

NOSET = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


class Seer(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def shown(self) -> tuple[str | None, str | None, bool]:
        at_start = Path("/proc/self/environ").read_text().split("\0")
        return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["LOCAL_RANK"], "CUDA_VISIBLE_DEVICES=" in at_start

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device(self, num_gpus: int) -> tuple[str, str]:
        """What the rank takes where torch sees so many GPUs."""
        torch.cuda.is_available, torch.cuda.device_count = lambda: num_gpus > 0, lambda: num_gpus
        try:
            return str(own_device(current_context())), get_device_name()
        except ResourceError as error:
            return str(error), get_device_name()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self) -> str:
        return str(pick_device())


def check(holds: bool, got: object = None) -> None:
    if not holds:
        raise SystemExit(f"not so: {got}")


def group(ranks: int, use_gpu: bool, env: dict[str, str] | None = None) -> WorkerGroup[Seer]:
    return WorkerGroup(ResourcePool([ranks], use_gpu=use_gpu), Seer, runtime="ray", worker_env=env, threads_per_rank=1)


def main() -> None:
    ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False, object_store_memory=80 * 2**20)
    with group(1, use_gpu=False) as ranks:
        check(ranks.shown() == [("", "0", True)], ranks.shown())
        check(ranks.device(4) == [("cpu", "cpu")] and ranks.take() == ["cpu"], ranks.device(4))
    print("hidden")
    with group(1, use_gpu=False, env={"CUDA_VISIBLE_DEVICES": "2"}) as ranks:
        check(ranks.shown() == [("2", "0", False)] and ranks.device(1) == [("cpu", "cpu")], ranks.shown())
    print("asked")
    with group(1, use_gpu=True) as first:  # so that the next ranks' GPUs are not those of their local ranks
        check(first.device(1) == [("cuda:0", "cuda")], first.device(1))
        check("has a GPU reserved, but torch" in first.device(0)[0][0], first.device(0))
        with group(2, use_gpu=True) as ranks:
            check(ranks.shown() == [("1", "0", False), ("2", "1", False)], ranks.shown())
            check(ranks.device(1) == [("cuda:0", "cuda")] * 2, ranks.device(1))
        print("own")
        with group(2, use_gpu=True, env=NOSET) as ranks:
            check([shown for shown, _, _ in ranks.shown()] == [None, None], ranks.shown())
            check(ranks.device(4) == [("cuda:1", "cuda"), ("cuda:2", "cuda")], ranks.device(4))
    print("noset")


if __name__ == "__main__":
    main()

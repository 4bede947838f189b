"""Which device a rank computes on, from what is reserved for it and what its process sees; no GPU is needed here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from podium.engines import get_device_name, get_nccl_backend, pick_device
from podium.errors import ResourceError
from podium.single_controller.rank.context import RankContext, running_as
from podium.single_controller.rank.devices import choose_device, device_index, use_device
from podium.single_controller.worker import join_peers

CPU = RankContext(device_type="cpu")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A torch that sees four GPUs; what is done to them, in order."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"set {device}"))
    monkeypatch.setattr(torch.cuda, "init", lambda: done.append("init"))
    return done


@pytest.mark.parametrize(
    ("context", "num_gpus", "device"),
    [
        (RankContext(), 0, "cpu"),
        (RankContext(), 8, "cuda:0"),
        (CPU, 0, "cpu"),
        (CPU, 8, "cpu"),  # a GPU that torch sees is not reserved for it
        (RankContext(local_rank=3, device_type="cuda", device_index=0), 1, "cuda:0"),
        (RankContext(local_rank=3, device_type="cuda"), 1, "cuda:0"),
        (RankContext(local_rank=3), 8, "cuda:3"),
        (RankContext(local_rank=0, device_type="cuda", device_index=5), 8, "cuda:5"),  # another group has 0 to 4
    ],
)
def test_a_rank_takes_the_gpu_that_is_reserved_for_it(context: RankContext, num_gpus: int, device: str):
    assert choose_device(context, num_gpus) == torch.device(device)


@pytest.mark.parametrize(
    ("context", "num_gpus", "message"),
    [
        (RankContext("actor", rank=2, device_type="cuda"), 0, "rank 2 of group 'actor' has a GPU reserved, but torch"),
        (RankContext("actor", rank=9, local_rank=3), 2, "rank 9 of group 'actor' needs GPU 3 of its node, but torch sees 2"),
        (RankContext("actor", device_type="cuda", device_index=7), 4, "rank 0 of group 'actor' needs GPU 7 .* sees 4"),
    ],
)
def test_a_missing_gpu_is_an_error_that_names_the_rank(context: RankContext, num_gpus: int, message: str):
    with pytest.raises(ResourceError, match=message):
        choose_device(context, num_gpus)


@pytest.mark.parametrize(
    ("reserved", "shown", "index"),
    [
        ([], None, None),
        ([], "", None),
        (["3"], "3", 0),  # what Ray sets
        (["3"], None, 3),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES
        (["6"], "4,5,6,7", 2),  # the same on a node where the cluster has half of the GPUs
        (["6"], "4, 5, 6, 7", 2),
        (["GPU-5f", "GPU-7a"], "GPU-00,GPU-5f,GPU-7a", 1),
        (["MIG-1"], None, None),
        (["3"], "0,1", None),  # the user shows others
    ],
)
def test_the_index_of_a_reserved_gpu_among_those_that_are_shown(reserved: list[str], shown: str | None, index: int | None):
    assert device_index(reserved, shown) == index


def test_code_on_a_cpu_rank_sees_no_gpu(four_gpus: list[str]):
    with running_as(CPU):
        assert (pick_device(), get_device_name(), get_nccl_backend()) == (torch.device("cpu"), "cpu", "gloo")
    assert (get_device_name(), get_nccl_backend(), four_gpus) == ("cuda", "nccl", [])


def test_a_picked_gpu_is_current_and_in_use_so_that_local_rank_cannot_choose_another(four_gpus: list[str]):
    with running_as(RankContext(local_rank=1, device_type="cuda", device_index=2)):
        assert pick_device() == torch.device("cuda:2")
    assert four_gpus == ["set cuda:2", "init"]
    assert (use_device(torch.device("cpu")), four_gpus[2:]) == (torch.device("cpu"), [])


@pytest.mark.parametrize(
    ("context", "backend", "joined"),
    [
        (RankContext(device_type="cuda", device_index=2), None, ("cpu:gloo,cuda:nccl", "cuda:2")),
        (RankContext(device_type="cuda", device_index=2), "nccl", ("nccl", "cuda:2")),
        (RankContext(device_type="cuda", device_index=2), "gloo", ("gloo", "None")),
        (CPU, None, ("gloo", "None")),
    ],
)
def test_a_process_group_with_nccl_is_bound_to_the_ranks_own_gpu(
    context: RankContext, backend: str | None, joined: tuple[str, str], four_gpus: list[str], monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[str, str]] = []

    def init(backend: str, *, device_id: torch.device | None = None, **_: Any) -> None:
        asked.append((backend, str(device_id)))

    monkeypatch.setattr(dist, "init_process_group", init)
    join_peers(context, backend, None)
    assert asked == [joined]
    assert four_gpus == ([] if joined[1] == "None" else ["set cuda:2", "init"])

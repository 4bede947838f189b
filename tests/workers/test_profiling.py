"""Profilers of ranks: who records, what is written, what runs afterwards, and that nothing changes where none records."""

from __future__ import annotations

import asyncio
import gc
import gzip
import inspect
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from podium.config import ProfilerConfig
from podium.engines import device
from podium.errors import ConfigError, ProfilerError, WorkerError
from podium.single_controller import Dispatch, Execute, Init, ResourcePool, Worker, WorkerGroup, register
from podium.single_controller.routing.registration import registration_of
from podium.workers import DistProfiler, DistProfilerExtension


def config(folder: Path | str, **changes: Any) -> ProfilerConfig:
    return ProfilerConfig(**{"tool": "torch", "save_path": str(folder), **changes})


class Computes(Worker, DistProfilerExtension):
    def __init__(self, profiler: ProfilerConfig) -> None:
        DistProfilerExtension.__init__(self, DistProfiler(self.rank, profiler))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.ALL)
    @DistProfiler.annotate(role="summed up")
    def total(self, number: int, *, scale: float = 1.0) -> float:
        """The sum."""
        if number < 0:
            raise ValueError(f"negative: {number}")
        return float(torch.full((4,), float(number)).sum()) * scale

    @DistProfiler.annotate("awaited by hand", color="red")
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def total_later(self, number: int) -> float:
        await asyncio.sleep(0)
        return self.total(number)


class NoProfiler(Worker, DistProfilerExtension):
    pass


def group_of(profiler: ProfilerConfig, ranks: int = 2) -> WorkerGroup[Computes]:
    return WorkerGroup(ResourcePool([ranks]), Init(Computes, profiler))


def trace_in(path: Path) -> set[str]:
    """The names of what was recorded."""
    return {event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ({}, [0]),
        ({"ranks": (1, 3)}, [1, 3]),
        ({"all_ranks": True}, [0, 1, 2, 3]),
        ({"all_ranks": True, "ranks": (1,)}, [0, 1, 2, 3]),
        ({"tool": "none", "all_ranks": True}, []),
    ],
)
def test_who_records(changes: dict[str, Any], ranks: list[int]):
    assert [rank for rank in range(4) if DistProfiler(rank, config("x", **changes)).is_enabled] == ranks
    assert not DistProfiler(0).is_enabled


def test_a_rank_leaves_a_trace_with_the_methods_by_their_names(tmp_path: Path):
    with group_of(config(tmp_path / "traces", ranks=(1,))) as group:
        group.start_profile(profile_step=3, role="actor")
        assert group.total(2, scale=2.0) == [16.0, 16.0]
        group.step_profile()
        assert group.total(1) == [4.0, 4.0]
        group.stop_profile()
    assert files(tmp_path / "traces") == ["step-3-rank-1.json.gz"]
    names = trace_in(tmp_path / "traces" / "step-3-rank-1.json.gz")
    assert {"summed up", "aten::sum"} <= names
    assert "awaited by hand" not in names
    assert any(name.startswith("ProfilerStep") for name in names)


def test_stretches_without_a_step_are_counted_and_a_prefix_begins_the_name(tmp_path: Path):
    profiler = DistProfiler(0, config(tmp_path), save_file_prefix="critic")
    for _ in range(2):
        profiler.start()
        profiler.stop()
    assert files(tmp_path) == ["critic-part-1-rank-0.json.gz", "critic-part-2-rank-0.json.gz"]


def test_the_tools_options_take_effect_and_are_checked(tmp_path: Path):
    profiler = DistProfiler(0, config(tmp_path), {"record_shapes": True})
    profiler.start(profile_step=1)
    torch.ones(3, 5).sum()
    profiler.stop()
    assert b"Input Dims" in gzip.decompress((tmp_path / "step-1-rank-0.json.gz").read_bytes())
    with pytest.raises(ConfigError, match="'record_shape'; did you mean 'record_shapes'"):
        DistProfiler(0, config(tmp_path), {"record_shape": True})
    with pytest.raises(ConfigError, match=r"tool_config\.with_stack must be true or false, got 1"):
        DistProfiler(0, config(tmp_path, tool_config={"with_stack": 1}))
    assert not DistProfiler(1, config(tmp_path, tool_config={"with_stack": 1})).is_enabled  # which will not use them


@pytest.mark.skipif(device.has_gpu(), reason="says what a machine without a GPU says")
@pytest.mark.parametrize("tool", ["torch_memory", "nsys"])
def test_tools_that_need_cuda_say_so_when_they_are_made(tool: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"profiler.tool={tool} needs CUDA, and torch sees no GPU: use profiler.tool=torch"):
        DistProfiler(0, config(tmp_path, tool=tool))
    with pytest.raises(WorkerError, match="needs CUDA"):
        group_of(config(tmp_path, tool=tool))


@pytest.mark.parametrize("tool", ["npu", "precision_debugger"])
def test_tools_of_other_devices_are_refused_with_those_that_there_are(tool: str):
    with pytest.raises(ValidationError, match=f"{tool} is for devices that .*; the tools are torch, torch_memory, nsys, none"):
        ProfilerConfig(tool=tool)


def test_annotated_methods_stay_what_they_are():
    assert inspect.signature(Computes.total) == inspect.signature(inspect.unwrap(Computes.total))
    assert str(inspect.signature(Computes.total)) == "(self, number: 'int', *, scale: 'float' = 1.0) -> 'float'"
    assert Computes.total.__doc__ == "The sum."
    for method, is_async in ((Computes.total, False), (Computes.total_later, True)):
        registration = registration_of(method)
        assert registration is not None
        assert registration.is_async is is_async
        assert inspect.iscoroutinefunction(method) is is_async
    with group_of(ProfilerConfig()) as group:
        assert group.total_later(1) == [4.0, 4.0]
        with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
            group.total(1, scales=2)


@pytest.mark.parametrize("records", [False, True])
def test_what_a_body_raises_comes_out(records: bool, tmp_path: Path):
    worker = Computes(config(tmp_path))
    if records:
        worker.start_profile(profile_step=1)
    with pytest.raises(ValueError, match="negative: -1"):
        worker.total(-1)
    with pytest.raises(ValueError, match="negative: -1"):
        asyncio.run(worker.total_later(-1))
    if records:
        worker.stop_profile()
        assert "awaited by hand" in trace_in(tmp_path / "step-1-rank-0.json.gz")


def test_a_body_runs_as_it_is_where_nothing_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def no_range(self: object, name: str) -> None:
        raise AssertionError(f"{name} was recorded")

    monkeypatch.setattr("podium.workers.profiler_tools.TorchTool.range", no_range)
    worker = Computes(config(tmp_path))
    assert worker.total(1) == 4.0
    assert Computes(ProfilerConfig()).total(1) == 4.0


def test_the_finish_command_runs_once_on_each_recorded_rank_with_its_variables(tmp_path: Path):
    command = "env | grep PODIUM_PROFILE_ | sort > variables-$PODIUM_PROFILE_RANK; echo x >> runs; ls step-2-rank-1.json.gz"
    with group_of(config(tmp_path, ranks=(1,), finish_command=command)) as group:
        for step in (1, 2):
            group.start_profile(role="actor", profile_step=step)
            group.stop_profile(run_command=step == 2)
    assert files(tmp_path) == ["runs", "step-1-rank-1.json.gz", "step-2-rank-1.json.gz", "variables-1"]
    assert (tmp_path / "runs").read_text() == "x\n"
    variables = dict(line.split("=", 1) for line in (tmp_path / "variables-1").read_text().splitlines())
    pid = variables.pop("PODIUM_PROFILE_PID")
    assert pid.isdigit()
    assert variables == {
        "PODIUM_PROFILE_RANK": "1",
        "PODIUM_PROFILE_ROLE": "actor",
        "PODIUM_PROFILE_SAVE_PATH": str(tmp_path),
        "PODIUM_PROFILE_TOOL": "torch",
    }


def test_a_finish_command_that_fails_is_logged_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    worker = Computes(config(tmp_path, finish_command="echo no such bucket >&2; exit 3"))
    worker.start_profile(profile_step=1)
    with pytest.raises(ProfilerError, match=r"ended with 3 on rank 0: 'echo .*The command wrote: no such bucket$"):
        worker.stop_profile()
    assert files(tmp_path) == ["step-1-rank-0.json.gz"]
    monkeypatch.setattr("podium.workers.profiling.FINISH_TIMEOUT_S", 0.2)
    worker = Computes(config(tmp_path, finish_command="echo begun; sleep 30"))
    worker.start_profile(profile_step=2)
    with pytest.raises(ProfilerError, match=r"was ended after 0\.2 s on rank 0: .* wrote: begun$"):
        worker.stop_profile()


def test_one_profiler_of_a_process_runs_at_a_time(tmp_path: Path):
    first, second = (DistProfiler(rank, config(tmp_path, all_ranks=True)) for rank in range(2))
    first.start(profile_step=1)
    with pytest.raises(ProfilerError, match="rank 1 cannot be profiled: in its process the profiler of rank 0 runs"):
        second.start(profile_step=1)
    assert not second.is_running
    with pytest.raises(ProfilerError, match=r"no profile runs on rank 1: start_profile\(\) comes before"):
        second.stop()
    first.stop()
    second.start(profile_step=1)
    del second  # with its worker: it cannot be stopped any more
    gc.collect()
    first.start(profile_step=2)
    first.stop()
    assert files(tmp_path) == ["step-1-rank-0.json.gz", "step-2-rank-0.json.gz"]


def test_without_a_folder_nothing_is_recorded(tmp_path: Path):
    (tmp_path / "file").touch()
    homeless, other = DistProfiler(0, config(tmp_path / "file" / "folder")), DistProfiler(0, config(tmp_path / "folder"))
    with pytest.raises(ProfilerError, match=r"cannot make the folder profiler\.save_path: .*Not a directory"):
        homeless.start(profile_step=1)
    assert not homeless.is_running
    other.start(profile_step=1)
    other.stop()
    assert files(tmp_path / "folder") == ["step-1-rank-0.json.gz"]


def test_another_thread_cannot_stop_it_and_ends_nothing(tmp_path: Path):
    profiler = DistProfiler(0, config(tmp_path))
    profiler.start(profile_step=1)
    with ThreadPoolExecutor(1) as pool, pytest.raises(ProfilerError, match="was started on another thread: it goes on"):
        pool.submit(profiler.stop).result()
    assert profiler.is_running
    profiler.stop()
    assert files(tmp_path) == ["step-1-rank-0.json.gz"]


def test_a_worker_that_was_given_no_profiler_says_so():
    for method in (NoProfiler().start_profile, NoProfiler().stop_profile, NoProfiler().step_profile):
        with pytest.raises(
            ProfilerError, match=r"NoProfiler has no profiler: its constructor calls DistProfilerExtension\.__init__"
        ):
            method()


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_every_rank_of_its_own_process_leaves_a_trace(tmp_path: Path, ray_cluster: None):
    made = Init(Computes, config(tmp_path, all_ranks=True))
    with WorkerGroup(ResourcePool([2], use_gpu=False), made, runtime="ray") as group:
        group.start_profile(profile_step=3)
        assert group.total(2) == [8.0, 8.0]
        group.stop_profile()
    assert files(tmp_path) == ["step-3-rank-0.json.gz", "step-3-rank-1.json.gz"]
    assert all("summed up" in trace_in(path) for path in tmp_path.iterdir())

"""Which steps of a run are recorded, and that a recording that fails costs nothing but itself."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.config import ProfilerConfig, RunConfig, check, explain
from podium.errors import ConfigError
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, create_colocated_worker_cls, register
from podium.trainers.preflight import prepare
from podium.trainers.profiling import StepProfiler
from tests.trainers.builders import small_config, train

TORCH = ("profiler.tool=torch", "profiler.steps=[2]")
CALLS: list[tuple[int, str, Any]] = []
"""(rank, method, argument) in the order of the calls; the ranks are in this process."""


class Noted(Worker):
    def __init__(self) -> None:
        CALLS.clear()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self, role: str, profile_step: int) -> None:
        CALLS.append((self.rank, "start", profile_step))
        if profile_step == 4:
            raise OSError("disk full")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self, run_command: bool) -> None:
        CALLS.append((self.rank, "stop", run_command))


def two_steps(*overrides: str) -> RunConfig:
    return small_config(Path("runs"), "warmup.steps=0", "trainer.total_steps=2", *overrides)


def test_the_steps_of_the_config_are_enclosed_and_the_command_follows_the_last():
    with WorkerGroup(ResourcePool([1]), Noted) as group:
        profiler = StepProfiler(ProfilerConfig(tool="torch", steps=(5, 2)), [group])
        for step in range(1, 7):
            profiler.before(step)
            profiler.after(step)
    assert CALLS == [(0, "start", 2), (0, "stop", False), (0, "start", 5), (0, "stop", True)]


def test_groups_of_the_same_processes_are_driven_once():
    roles = create_colocated_worker_cls({"actor": Noted, "ref": Noted})
    with WorkerGroup(ResourcePool([1]), roles) as both, WorkerGroup(ResourcePool([1]), Noted) as other:
        groups = both.spawn()
        StepProfiler(ProfilerConfig(tool="torch", steps=(1,)), [groups["actor"], other, groups["ref"]]).before(1)
        assert len(CALLS) == 2


def test_without_a_tool_nothing_is_called():
    with WorkerGroup(ResourcePool([1]), Noted) as group:
        StepProfiler(ProfilerConfig(steps=(1,)), [group]).before(1)
    assert CALLS == []


def test_what_fails_is_logged_and_the_run_goes_on(caplog: pytest.LogCaptureFixture):
    with WorkerGroup(ResourcePool([1]), Noted, name="policy") as group, caplog.at_level(logging.ERROR):
        StepProfiler(ProfilerConfig(tool="torch", steps=(4,)), [group]).before(4)
    assert "step 4: start_profile of group 'policy' failed: OSError: disk full" in caplog.text


def test_a_run_leaves_the_trace_of_the_step_that_was_asked_for(tmp_path: Path):
    config = two_steps(*TORCH, "trainer.val_freq=0", f"run_root={tmp_path}", "profiler.finish_command='false'")
    check(config)
    path = train(config).path
    assert [file.name for file in (path / "profile").iterdir()] == ["step-2-rank-0.json.gz"]
    events = json.loads(gzip.decompress((path / "profile" / "step-2-rank-0.json.gz").read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert any("embedding" in name for name in names)
    assert {"generate_sequences", "update_actor"} <= names
    assert "after" in json.loads((path / "report.json").read_text())  # in spite of a command that failed


def test_explain_says_what_is_recorded():
    assert "profiled by torch: step 2 on rank 0, into profile/" in explain(two_steps(*TORCH))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("profiler.tool=torch", "profiler.steps=[3]"), "profiler.steps has 3, but trainer.total_steps is 2"),
        ((*TORCH, "profiler.ranks=[1]"), "profiler.ranks has 1, but num_workers is 1"),
        ((*TORCH, "profiler.ranks=[0]", "profiler.all_ranks=true"), "contradict each other"),
        (("profiler.tool=torch",), "profiler.tool=torch records nothing without profiler.steps"),
        (("profiler.steps=[1]",), r"profiler.steps=\[1\] has no effect without a profiler.tool: .* at \[\]"),
        (("profiler.finish_command=ls",), "profiler.finish_command=ls has no effect .* at null"),
    ],
)
def test_what_would_record_nothing_is_refused(overrides: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        check(two_steps(*overrides))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_tool_that_needs_a_gpu_is_refused_before_anything_starts(tmp_path: Path):
    config = two_steps("profiler.tool=nsys", "profiler.steps=[2]", f"run_root={tmp_path}")
    with pytest.raises(ConfigError, match=r"nsys.*CUDA"):
        prepare(config)
    assert list(tmp_path.iterdir()) == []

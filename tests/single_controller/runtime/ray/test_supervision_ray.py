"""What a driver learns when real processes die, raise or hang, and how a group comes back."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from podium.errors import CallTimeoutError, GroupClosedError, WorkerError, WorkerLostError
from podium.single_controller import (
    Dispatch,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    register,
)
from podium.single_controller.processes.lifecycle import State

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("ray_cluster")]

PEERS_GO_ON_S = 1.0
"""How long the healthy ranks of a call work on after one has failed."""

SLOW_AFTER_S = 1.5


class Patient(Worker):
    def __init__(self, greeting: str = "hello", *, generation: tuple[int, ...] = ()) -> None:
        self.greeting = greeting
        self.generation = generation

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def introduce(self) -> tuple[str, tuple[int, ...], int, int]:
        return self.greeting, self.generation, self.rank, os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def suffer(self, rank: int, harm: str) -> int:
        for line in range(30):
            print(f"rank {self.rank} line {line}", file=sys.stderr, flush=True)
        if self.rank == rank:
            harms[harm]()
        time.sleep(PEERS_GO_ON_S)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def crash_in_a_collective(self, rank: int) -> None:
        if not dist.is_initialized():
            self.init_process_group("gloo")
        dist.barrier()
        if self.rank == rank:
            ctypes.string_at(0)
        dist.all_reduce(torch.ones(1000))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def wait_for_godot(self, rank: int, seconds: float = 60.0) -> int:
        if self.rank == rank:
            look_down_the_road(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def wait_in_the_background(self, rank: int, seconds: float) -> int:
        if self.rank == rank:
            look_down_the_road(seconds)
        return self.rank


class Sociable(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def wait_for_a_friend(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def heartbeat(self) -> int:
        return os.getpid()


def leave() -> None:
    os._exit(7)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def complain() -> None:
    raise ValueError("too much")


def look_down_the_road(seconds: float) -> None:
    time.sleep(seconds)


harms = {"exit": leave, "kill": be_killed, "raise": complain}


@pytest.fixture(scope="module")
def shared() -> Iterator[WorkerGroup[Patient]]:
    init = Init(Patient, "good day", generation=(1, 2))
    group = WorkerGroup(ResourcePool([4]), init, runtime="ray", name="patients", threads_per_rank=1, slow_after_s=SLOW_AFTER_S)
    with group:
        yield group


@pytest.fixture
def group(shared: WorkerGroup[Patient]) -> WorkerGroup[Patient]:
    """Tests that do not break it run first: each restart takes seconds."""
    if shared.status().state is not State.READY:
        shared.restart()
    return shared


# -- hangs -----------------------------------------------------------------------------------------------------------------


def test_status_shows_who_is_awaited_and_where(group: WorkerGroup[Patient]):
    future = group.wait_in_the_background(2, 4.0)
    time.sleep(1.0)
    status = group.status(stacks=True)
    (call,) = status.calls
    assert (status.state, call.method, call.silent_ranks) == (State.READY, "wait_in_the_background", (2,))
    assert 0.9 < call.age_s < 30
    assert all(rank.is_alive for rank in status.ranks.values())
    assert "look_down_the_road" in status.ranks[2].stacks
    text = str(status)
    assert re.search(r"wait_in_the_background: \d+\.\d s, waits for rank 2\n", text)
    stacks = text[text.index("pid", text.index("rank 3: alive")) :]
    assert stacks.index("rank 2:") < stacks.index("look_down_the_road") < stacks.index("ranks 0-1, 3:")
    assert future.get() == [0, 1, 2, 3]
    assert group.status().calls == ()
    assert all(not rank.stacks for rank in group.status().ranks.values())


def test_a_slow_call_is_named_long_before_its_time_is_over(group: WorkerGroup[Patient], caplog: pytest.LogCaptureFixture):
    assert group.wait_for_godot(1, seconds=2 * SLOW_AFTER_S) == [0, 1, 2, 3]
    assert caplog.messages
    assert caplog.messages[0].startswith("group 'patients': method 'wait_for_godot': no answer from rank 1 after")
    assert "look_down_the_road" in caplog.messages[0]


def test_a_heartbeat_answers_while_an_async_method_waits():
    with WorkerGroup(ResourcePool([1]), Sociable, runtime="ray") as group:
        group.heartbeat()
        waiting = group.wait_for_a_friend(3.0)
        for _ in range(3):
            began = time.monotonic()
            assert len(group.heartbeat()) == 1
            assert time.monotonic() - began < 1.0
        assert not waiting.done()
        assert waiting.get() == [0]


def test_a_hang_ends_with_the_stacks_of_the_silent_ranks(group: WorkerGroup[Patient]):
    before = group.introduce()
    began = time.monotonic()
    with pytest.raises(CallTimeoutError, match="no answer from rank 2 within 1 s, 0-1, 3 had answered; killed") as caught:
        group.wait_for_godot.options(timeout=1.0)(2)
    assert time.monotonic() - began < 10
    assert caught.value.silent_ranks == (2,)
    assert re.search(r"test_supervision_ray\.py:\d+ look_down_the_road", str(caught.value))
    assert "wait_for_godot" in str(caught.value)
    with pytest.raises(GroupClosedError, match=r"timed out after 1 s on rank 2; restart\(\) starts its ranks anew"):
        group.introduce()
    group.restart()
    after = group.introduce()
    assert [entry[:3] for entry in after] == [("good day", (1, 2), rank) for rank in range(4)]
    assert not {pid for *_, pid in before} & {pid for *_, pid in after}
    assert not any(is_alive(pid) for *_, pid in before)


def is_alive(pid: int) -> bool:
    give_up = time.monotonic() + 5.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < give_up:  # noqa: PTH110
        time.sleep(0.05)
    return os.path.exists(f"/proc/{pid}")  # noqa: PTH110


# -- death and exceptions --------------------------------------------------------------------------------------------------


def test_an_exception_is_reported_in_full_and_the_group_goes_on(group: WorkerGroup[Patient]):
    pids = [pid for *_, pid in group.introduce()]
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        group.suffer(1, "raise")
    assert time.monotonic() - began < 10
    error, origin = caught.value, caught.value.origin
    assert (origin.group, origin.method, origin.rank, origin.pid) == ("patients", "suffer", 1, pids[1])
    assert (error.cause_type, error.cause_message, error.consequences) == ("ValueError", "too much", ())
    assert 'raise ValueError("too much")' in error.remote_traceback
    assert "rank 1 line 29" in error.last_words
    assert [pid for *_, pid in group.introduce()] == pids


@pytest.mark.parametrize("harm", ["exit", "kill"])
def test_a_death_is_reported_with_all_that_is_known(group: WorkerGroup[Patient], harm: str):
    pids = [pid for *_, pid in group.introduce()]
    began = time.monotonic()
    with pytest.raises(WorkerLostError) as caught:
        group.suffer(1, harm)
    assert time.monotonic() - began < 10
    error, origin = caught.value, caught.value.origin
    assert (origin.group, origin.method, origin.rank, origin.pid) == ("patients", "suffer", 1, pids[1])
    assert origin.node == socket.gethostname()
    assert error.cause_message.startswith("the rank's process died; ")
    assert re.findall(r"rank \d line \d+", error.last_words) == [f"rank 1 line {line}" for line in range(10, 30)]
    assert error.consequences == ()  # the others answered
    assert not re.search(r"rank [023]", str(error))
    assert f"group 'patients', method 'suffer', rank 1, node {origin.node}, pid {pids[1]}" in str(error)
    with pytest.raises(GroupClosedError, match=r"broken since method 'suffer' failed: rank 1: ProcessDied.*; restart\(\)"):
        group.introduce()


@pytest.mark.slow
def test_a_role_is_named_too():
    roles = {"actor": Init(Patient), "critic": Init(Patient)}
    with WorkerGroup(ResourcePool([2]), create_colocated_worker_cls(roles), runtime="ray", name="pair") as both:
        groups = both.spawn()
        with pytest.raises(WorkerLostError) as caught:
            groups["critic"].suffer(1, "exit")
        assert (caught.value.origin.method, caught.value.origin.rank) == ("critic.suffer", 1)
        with pytest.raises(GroupClosedError, match=r"'actor.introduce': it is broken since method 'critic.suffer' failed"):
            groups["actor"].introduce()
        groups["actor"].restart()  # both, since they are the same processes
        actors, critics = groups["actor"].introduce(), groups["critic"].introduce()
        assert actors == critics
        assert [rank for _, _, rank, _ in actors] == [0, 1]
        assert both.status().state is groups["critic"].status().state is State.READY


@pytest.mark.parametrize(
    "times", [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_a_crash_in_a_collective_always_names_the_rank_that_crashed(group: WorkerGroup[Patient], times: int):
    for round_ in range(times):
        if round_:
            group.restart()
        with pytest.raises(WorkerLostError) as caught:
            group.crash_in_a_collective(3)
        assert caught.value.origin.rank == 3
        assert "Fatal Python error: Segmentation fault" in caught.value.last_words
        assert "crash_in_a_collective" in caught.value.last_words
        assert sorted(line.split(":")[0] for line in caught.value.consequences) == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.slow
def test_a_death_between_two_calls_names_both(group: WorkerGroup[Patient]):
    future = group.execute_all("suffer", 2, "exit")
    with pytest.raises(WorkerLostError) as caught:
        group.introduce()
    found = caught.value
    assert found.origin.rank == 2
    assert found.origin.method == "suffer" or "had not answered 'suffer' either, which was sent before" in found.consequences[0]
    assert future.done()


# -- an end like any other -------------------------------------------------------------------------------------------------


def test_calls_on_their_way_end_with_the_group():
    with WorkerGroup(ResourcePool([1]), Patient, runtime="ray", name="short") as group:
        future = group.wait_in_the_background(0, 60.0)
    with pytest.raises(GroupClosedError, match="'wait_in_the_background' of group 'short' was running when that was closed"):
        future.get(timeout=30.0)


NORMAL_END = """
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register

class Calm(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def f(self) -> int:
        return self.rank

if __name__ == "__main__":
    with WorkerGroup(ResourcePool([2]), Calm, runtime="ray") as group:
        print(group.f())
    left_open = WorkerGroup(ResourcePool([2]), Calm, runtime="ray")
    print(left_open.f())
"""


@pytest.mark.slow  # a cluster of its own
def test_a_normal_end_says_nothing_of_dead_workers(tmp_path: Path):
    (tmp_path / "script.py").write_text(NORMAL_END)
    command = [sys.executable, "script.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=True)
    assert ran.stdout.splitlines()[-2:] == ["[0, 1]", "[0, 1]"]
    assert not re.search("died|dead|killed|unexpected|exit", ran.stdout + ran.stderr, re.IGNORECASE)

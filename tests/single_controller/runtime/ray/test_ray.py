"""What only processes can show: deaths in a collective, classes of a script, Ctrl-C, results that cannot travel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from podium.errors import GroupClosedError, ResourceError, WorkerError, WorkerLostError
from podium.protocol import DataProto
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("ray_cluster")]


class Probe(Worker):
    """Defined in a test module: workers import it by the name under which pytest runs it."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def leave_a_collective(self, rank: int, dies: bool) -> None:
        self.init_process_group("gloo")
        dist.barrier()
        if self.rank == rank and dies:
            os._exit(7)
        if self.rank == rank:
            raise ValueError("the cause")
        dist.all_reduce(torch.ones(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cannot_travel(self) -> object:
        return threading.Lock()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def await_own_method(self, x: int) -> int:
        return await self.double(x)

    async def double(self, x: int) -> int:
        return 2 * x

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def slow_rows(self, batch: DataProto) -> DataProto:
        time.sleep(0.3)
        return batch


def ray_group(num_ranks: int) -> WorkerGroup[Probe]:
    return WorkerGroup(ResourcePool([num_ranks]), Probe, runtime="ray", threads_per_rank=1)


def test_a_death_in_a_collective_is_the_cause_and_its_peers_the_consequence():
    with ray_group(2) as group, pytest.raises(WorkerLostError) as caught:
        group.call.leave_a_collective(1, dies=True)
    assert caught.value.origin.rank == 1
    assert "process died; Ray does not report the exit code" in caught.value.cause_message
    assert [line.split(":")[0] for line in caught.value.consequences] == ["rank 0"]


def test_a_raise_in_a_collective_ends_the_peers_that_wait_for_it():
    with ray_group(2) as group:
        began = time.monotonic()
        with pytest.raises(WorkerError, match="the cause") as caught:
            group.call.leave_a_collective(0, dies=False)
        assert caught.value.origin.rank == 0
        assert caught.value.consequences == ("rank 1: no answer within 2 s, killed",)
        assert time.monotonic() - began < 20
        with pytest.raises(GroupClosedError, match="broken since method 'leave_a_collective' failed: rank 0: ValueError"):
            group.call.cannot_travel()


def test_one_group_of_odd_cases():
    with ray_group(1) as group:
        with pytest.raises(WorkerError, match="lock") as caught:
            group.call.cannot_travel()
        assert (caught.value.origin.method, caught.value.origin.rank) == ("cannot_travel", 0)
        assert group.call.await_own_method(4) == [8]
        future = group.call.slow_rows(DataProto({"x": torch.arange(3)}))
        assert not future.done()
        assert future.get().batch["x"].tolist() == [0, 1, 2]


def test_more_ranks_than_the_cluster_has_cpus():
    with pytest.raises(ResourceError, match="10000 bundles of CPU 1"):
        ray_group(10_000)


SCRIPT = """
import sys, time
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register

class Local(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return type(self).__name__

if __name__ == "__main__":
    with WorkerGroup(ResourcePool([1]), Local, runtime="ray") as group:
        print(*group.call.nap(0.0), flush=True)
        group.call.nap(120.0)
"""


@pytest.mark.slow  # a cluster of its own
def test_a_class_of_a_script_works_and_ctrl_c_ends_it(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    driver = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline().strip() == "Local"
        time.sleep(0.5)
        interrupted = time.monotonic()
        os.killpg(driver.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
        _, errors = driver.communicate(timeout=60)
        assert time.monotonic() - interrupted < 30
    finally:
        driver.kill()
    assert "KeyboardInterrupt" in errors.splitlines()[-1]
    assert driver.returncode == -signal.SIGINT or driver.returncode == 1

"""How groups start on Ray: all ranks at once, where they meet, their environment and names, and groups that outlive a driver."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
import torch.distributed as dist

from podium import process_probe
from podium.cores import cgroup_parents, core_limit, num_cores, quota_cores
from podium.errors import ConfigError, ResourceError
from podium.single_controller import Dispatch, Init, ResourcePool, Worker, WorkerGroup, register
from podium.single_controller.runtime.ray import cluster

JOINS = """
import logging
import ray
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register

class Where(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def cluster(self) -> str:
        return ray.get_runtime_context().gcs_address

logging.basicConfig(level=logging.INFO, format="%(message)s")
with WorkerGroup(ResourcePool([1], use_gpu=False), Where, runtime="ray", threads_per_rank=1) as group:
    print(*group.cluster())
"""

pytestmark = [pytest.mark.timeout(180), pytest.mark.usefixtures("ray_cluster")]

HERE = Path(__file__).parent
LISTEN = "0A"
LOOPBACK_HEX = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")


def listening() -> dict[str, list[int]]:
    """The ports that this process listens on, "loopback" or "other"."""
    inodes = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this listing
            inodes.add(str(descriptor.readlink()))
    found: dict[str, list[int]] = {"loopback": [], "other": []}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                address, _, port = fields[1].partition(":")
                found["loopback" if address in LOOPBACK_HEX else "other"].append(int(port, 16))
    return found


class Ranks(Worker):
    def __init__(self, naps_s: float = 0.0) -> None:
        self.began = time.monotonic()
        time.sleep(naps_s)
        self.ended = time.monotonic()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def construction(self) -> tuple[float, float]:
        return self.began, self.ended

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def environment(self, names: list[str]) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        self.init_process_group("gloo")
        value = torch.tensor([float(self.rank + 1)])
        dist.all_reduce(value)
        return value.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def master(self) -> tuple[str, int]:
        address, port = self.get_master_addr_port()
        return address, int(port)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def listens(self) -> dict[str, list[int]]:
        return listening()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def nap(self, seconds: float) -> None:
        time.sleep(seconds)


@ray.remote(num_cpus=0)
class Bare:
    def listens(self) -> dict[str, list[int]]:
        return listening()


def own_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="module")
def four(ray_cluster: None) -> Iterator[WorkerGroup[Ranks]]:
    environment = own_environment()
    ports = listening()["other"]
    with WorkerGroup(ResourcePool([4]), Init(Ranks, naps_s=1.0), runtime="ray", threads_per_rank=1, name="four") as group:
        yield group
    assert own_environment() == environment, "a group's life changes no variable of the driver"
    assert listening()["other"] == ports, "nor does the driver listen to anybody outside"


# -- together ----------------------------------------------------------------------------------------------------------


def test_ranks_are_constructed_at_the_same_time(four: WorkerGroup[Ranks]):
    found = four.construction()
    assert max(began for began, _ in found) < min(ended for _, ended in found)
    assert max(ended for _, ended in found) - min(began for began, _ in found) < 3


def test_local_ranks_are_true(four: WorkerGroup[Ranks]):
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "WG_BACKEND", "MASTER_ADDR"]
    assert four.environment(names) == [[str(rank), "4", str(rank), "4", "4", "ray", "127.0.0.1"] for rank in range(4)]


def test_on_one_node_nothing_listens_but_on_loopback(four: WorkerGroup[Ranks]):
    assert four.sum_of_ranks() == [10.0] * 4
    bare = Bare.remote()
    rays_own = len(ray.get(bare.listens.remote())["other"])
    ray.kill(bare)
    found = four.listens()
    assert [len(ports["other"]) for ports in found] == [rays_own] * 4
    assert four.master()[0][1] in found[0]["loopback"]


def test_stacks_of_many_ranks_are_taken_side_by_side(four: WorkerGroup[Ranks], monkeypatch: pytest.MonkeyPatch):
    def slow_look(*_: object) -> str:
        time.sleep(1.0)
        return "here"

    monkeypatch.setattr(process_probe, "take_stacks", slow_look)
    began = time.monotonic()
    ranks = four.status(stacks=True).ranks
    assert [ranks[rank].stacks for rank in range(4)] == ["here"] * 4
    assert time.monotonic() - began < 2.5


# -- ports -------------------------------------------------------------------------------------------------------------


def free_range(count: int) -> int:
    """The first of `count` ports that are free now, below those that the system hands out by itself."""
    for low in range(21_000, 32_000, count):
        sockets: list[socket.socket] = []
        try:
            for port in range(low, low + count):
                sockets.append(socket.create_server(("127.0.0.1", port)))
            return low
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
    raise AssertionError("no range of ports is free")


def meet_at(ports: tuple[int, int], number: int, num_ranks: int) -> WorkerGroup[Ranks]:
    pool, name = ResourcePool([num_ranks]), f"group{number}"
    return WorkerGroup(pool, Ranks, runtime="ray", name=name, threads_per_rank=1, master_port_range=ports)


@pytest.mark.parametrize(("num_groups", "num_ranks"), [(2, 1), (8, 2)])
@pytest.mark.slow
def test_groups_share_a_range_of_ports_until_it_is_used_up(num_groups: int, num_ranks: int):
    """All are there before any of them initialises; a foreign process has a port in the middle of the range."""
    low = free_range(num_groups + 1)
    ports = low, low + num_groups + 1
    with socket.create_server(("127.0.0.1", low + 1)), ThreadPoolExecutor(num_groups) as threads:
        groups = list(threads.map(lambda number: meet_at(ports, number, num_ranks), range(num_groups)))
        try:
            sums = list(threads.map(lambda group: group.sum_of_ranks(), groups))
            assert sums == [[num_ranks * (num_ranks + 1) / 2] * num_ranks] * num_groups
            assert sorted(group.master()[0][1] for group in groups) == [low, *range(low + 2, ports[1])]
            with pytest.raises(ResourceError, match=rf"no port of master_port_range \[{low}, {ports[1]}\) is free on 127.0.0.1"):
                meet_at(ports, num_groups, 1)
        finally:
            for group in groups:
                group.close()


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ResourceError, match=r"cannot meet at 192\.0\.2\.77: .*; set master_addr to an address of rank 0's node"):
        WorkerGroup(ResourcePool([1]), Ranks, runtime="ray", master_addr="192.0.2.77")


# -- environment and names ---------------------------------------------------------------------------------------------


def test_worker_env_is_there_from_the_start_and_clashes_are_named():
    with WorkerGroup(ResourcePool([1]), Ranks, runtime="ray", worker_env={"PODIUM_TEST": "yes"}) as group:
        assert group.environment(["PODIUM_TEST", "RANK"]) == [["yes", "0"]]
    assert "PODIUM_TEST" not in os.environ
    taken = {"MASTER_PORT": "1", "RAY_LOCAL_WORLD_SIZE": "2", "FINE": "3"}
    with pytest.raises(ConfigError, match="worker_env sets MASTER_PORT, RAY_LOCAL_WORLD_SIZE, which"):
        WorkerGroup(ResourcePool([1]), Ranks, runtime="ray", worker_env=taken)
    with pytest.raises(ConfigError, match=r"a text as its value, got \{'DEPTH': 3\}"):
        WorkerGroup(ResourcePool([1]), Ranks, runtime="ray", worker_env={"DEPTH": 3})


def test_a_prefix_that_is_taken_is_refused_and_the_first_group_untouched():
    before = set(ray.util.list_named_actors())
    with WorkerGroup(ResourcePool([1]), Ranks, runtime="ray", name_prefix="same") as first:
        assert first.worker_names == ["sameRanks_0:0"]
        with pytest.raises(ResourceError, match=r"rank 0 of group 'Ranks' cannot be named 'sameRanks_0:0'.* another name_prefix"):
            WorkerGroup(ResourcePool([2]), Ranks, runtime="ray", name_prefix="same")
        assert set(ray.util.list_named_actors()) - before == {"sameRanks_0:0"}
        assert first.sum_of_ranks() == [1.0]
        # A name that is taken in the middle: rank 0 was made already, and goes again.
        in_the_way = Bare.options(name="laterRanks_0:1").remote()
        with pytest.raises(ResourceError, match=r"rank 1 .* 'laterRanks_0:1'"):
            WorkerGroup(ResourcePool([2]), Ranks, runtime="ray", name_prefix="later")
        give_up = time.monotonic() + 10
        while set(ray.util.list_named_actors()) - before != {"sameRanks_0:0", "laterRanks_0:1"} and time.monotonic() < give_up:
            time.sleep(0.1)
        assert set(ray.util.list_named_actors()) - before == {"sameRanks_0:0", "laterRanks_0:1"}
        ray.kill(in_the_way)


@pytest.mark.slow
def test_a_name_is_free_again_once_its_group_is_closed_or_restarted():
    group = WorkerGroup(ResourcePool([1]), Ranks, runtime="ray", name_prefix="again")
    group.restart()
    assert group.sum_of_ranks() == [1.0]
    group.close()
    with WorkerGroup(ResourcePool([1]), Ranks, runtime="ray", name_prefix="again") as another:
        assert another.worker_names == ["againRanks_0:0"]


@pytest.mark.slow
def test_a_detached_group_is_made_used_and_ended_by_three_drivers():
    address = ray.get_runtime_context().gcs_address

    def driver(part: str) -> list[str]:
        command = [sys.executable, str(HERE / "ray_detached.py"), part, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        return done.stdout.split()

    assert driver("make") == ["firstCounter_0:0", "firstCounter_0:1"]
    assert driver("use") == ["used"]
    assert driver("end") == ["ended"]


# -- cores -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", None),
        ("150000 100000", 1),
        ("50000 100000", 1),
        ("800000 100000", 8),
        ("-1 100000", None),
        ("", None),
        ("8 0", None),
    ],
)
def test_a_quota_is_whole_cores(quota: str, cores: int | None):
    assert quota_cores(quota) == cores


def test_a_quota_counts_for_the_groups_below():
    assert cgroup_parents("12:cpu:/x\n0::/user.slice/job") == ["user.slice/job", "user.slice", ""]
    assert cgroup_parents("") == [""]


def test_the_lower_of_mask_and_quota_is_the_number_of_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("podium.cores.CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert core_limit() == (8, "the affinity mask")
    (tmp_path / "cpu.max").write_text("300000 100000\n")
    assert core_limit() == (3, "the cgroup's CPU quota")
    assert num_cores() == 3
    (tmp_path / "cpu.max").write_text("1600000 100000\n")
    assert num_cores() == 8


ONE_CORE = """
import logging, os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
logging.basicConfig(level=logging.INFO)
from podium.single_controller import ResourcePool, Worker, WorkerGroup
began = time.monotonic()
with WorkerGroup(ResourcePool([1]), Worker, runtime="ray"):
    print(time.monotonic() - began)
"""


@pytest.mark.slow  # a cluster of its own
def test_on_one_core_a_group_starts_in_time_and_logs_the_source_of_the_number(tmp_path: Path):
    (tmp_path / "one_core.py").write_text(textwrap.dedent(ONE_CORE))
    done = subprocess.run([sys.executable, "one_core.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert float(done.stdout.split()[-1]) < 30
    assert "starting Ray with 64 CPUs, which it only counts: one for each rank. the affinity mask allows 1 core" in done.stderr


# -- the cluster -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_driver_joins_the_cluster_that_ray_address_names():
    """As under `ray job submit`: another process has started it, this one has not called `ray.init`."""
    address = ray.get_runtime_context().gcs_address
    environment = {**os.environ, "RAY_ADDRESS": address}
    ran = subprocess.run([sys.executable, "-c", JOINS], env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == address
    cpus = ray.cluster_resources()["CPU"]
    assert f"joined the Ray cluster at {address}, which has {cpus:g} CPUs: RAY_ADDRESS is {address!r}" in ran.stderr


def test_a_ray_address_without_a_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(**options: object) -> None:
        raise ConnectionError(f"no cluster at {options['address']}")

    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(
        ResourceError, match=r"RAY_ADDRESS is '10\.0\.0\.1:6379', but no Ray cluster can be joined there: no cluster at"
    ):
        cluster.connect(1)


@pytest.mark.parametrize("address", [None, "", "local"])
def test_without_an_address_a_cluster_of_its_own_is_started(monkeypatch: pytest.MonkeyPatch, address: str | None):
    asked: dict[str, object] = {}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: asked.update(options))
    cluster.connect(100)
    assert (asked["address"], asked["num_cpus"]) == ("local", 100)


ENDS_ITS_CLUSTER = """
import subprocess, sys
from podium.single_controller.runtime.ray import cluster

raylet = subprocess.Popen([sys.argv[1], "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
print(raylet.pid, raylet.stdout.readline(), flush=True)
cluster._end_cluster()
"""


def test_what_a_raylet_has_started_ends_with_the_driver(tmp_path: Path):
    """Ray's agents live a minute longer than a raylet that a signal interrupts while it starts. A shell stands for it here."""
    shell = shutil.copy(shutil.which("sh") or "/bin/sh", tmp_path / "raylet")
    command = [sys.executable, "-c", ENDS_ITS_CLUSTER, str(shell)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    started = [Path(f"/proc/{pid}/stat") for pid in done.stdout.split()]
    assert len(started) == 2
    assert not any(path.exists() and " Z " not in path.read_text() for path in started)

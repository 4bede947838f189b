"""A script of `test_two_nodes.py`: two raylets on one machine that do not see the same files under one path.

The driver is on 127.0.0.30. 127.0.0.4 comes first in the order of nodes, so it has rank 0; its raylet has a mount namespace of
its own, where the folder `private` is another one, and may use one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster

from podium.checkpoint import CheckpointStore, WrittenFiles, manifest
from podium.config import FSDP2Config, ModelConfig, OptimConfig, RunConfig, to_yaml
from podium.cores import num_cores
from podium.errors import CheckpointError, ResourceError, WorkerError
from podium.models import load_model, load_tokenizer, save_model
from podium.single_controller import Dispatch, Init, ResourcePool, Worker, WorkerGroup, register
from podium.trainers import placing
from podium.trainers.node_setup import ModelFiles, NodeSetup, shared
from podium.workers import TrainingSpec, TrainingWorker
from tests.trainers.builders import small_config

DRIVER, OTHER = "127.0.0.30", "127.0.0.4"
PATIENT = "start_timeout_s=900"
"""The machine may be busy."""
ATTEMPTS = 5
"""Ray ends a node whose agent does not start within 15 s, which takes longer on a busy machine."""
UNSHARE = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-rm")
"""Runs a command in a mount namespace of its own."""
SMALL = ModelConfig(path="char_llama", override_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1})


class Prober(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[str, int, int]:
        return ray.util.get_node_ip_address(), self.local_rank, torch.get_num_threads()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variables(self, *names: str) -> list[str | None]:
        return [os.environ.get(name) for name in names]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write(self, local_path: str) -> WrittenFiles:
        """As a worker does that makes the folder where it is missing."""
        folder = Path(local_path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank-{self.rank}").write_text("state")
        return WrittenFiles.of(folder, f"rank {self.rank} on {ray.util.get_node_ip_address()}", [f"rank-{self.rank}"])


def check(holds: bool, found: object = None) -> None:
    if not holds:
        raise SystemExit(f"failed: {found}")


@contextmanager
def other_node(address: str, private: Path) -> Iterator[None]:
    """The raylet of the other node, until the end of the block."""
    program = Path(sys.executable).with_name("ray")
    has = "--num-cpus=4 --num-gpus=2 --object-store-memory=80000000"
    inside = f"mount -t tmpfs none {private} && exec {program} start --block --address={address} --node-ip-address={OTHER} {has}"
    for _ in range(ATTEMPTS):
        with subprocess.Popen([*UNSHARE, "sh", "-c", inside], stdout=subprocess.DEVNULL) as node:
            try:
                if _has_joined(node):
                    os.sched_setaffinity(_raylet_of(node.pid), {min(os.sched_getaffinity(0))})  # its workers inherit this
                    yield
                    return
            finally:
                node.terminate()
    raise SystemExit("the other node did not start")


def _raylet_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(child) for child in children if Path(f"/proc/{child}/comm").read_text() == "raylet\n")


def _has_joined(node: subprocess.Popen[bytes]) -> bool:
    while node.poll() is None:
        if any(node["Alive"] and node["NodeManagerAddress"] == OTHER for node in ray.nodes()):
            return True
        time.sleep(0.2)
    return False


def check_checkpoints(group: WorkerGroup[Prober], private: Path) -> None:
    """Rank 0 writes on its own disk; what the driver kept stays."""
    store = CheckpointStore(private / "checkpoints", keep=1)
    store.save(1, lambda folder: [_state_of_driver(folder)])
    manifest.VISIBLE_WITHIN_S = 0.5  # type: ignore[misc]
    try:
        store.save(2, group.call.write)
        raise SystemExit("an empty folder became a checkpoint")
    except CheckpointError as error:
        check(f"rank 0 on {OTHER} wrote" in str(error) and "does not see the file" in str(error), error)
    latest = store.latest()
    check(latest is not None and latest.step == 1, latest)


def _state_of_driver(folder: str) -> WrittenFiles:
    (Path(folder) / "state").write_text("good")
    return WrittenFiles.of(Path(folder), "the driver")


def check_workers(private: Path) -> None:
    """The worker of a run makes no folder on its own disk."""
    spec = TrainingSpec(SMALL, FSDP2Config(), OptimConfig(lr=1e-3), total_steps=1, seed=0)
    store = CheckpointStore(private / "checkpoints", keep=1)
    pool = ResourcePool([1], use_gpu=False)
    with WorkerGroup(pool, Init(TrainingWorker, spec), runtime="ray", threads_per_rank=1, start_timeout_s=900) as group:
        for save in (lambda: store.save(2, group.call.save_checkpoint), lambda: group.call.save_hf(str(private / "hf"))):
            try:
                save()
                raise SystemExit("a worker wrote where the driver sees nothing")
            except WorkerError as error:
                check("rank 0 on " in str(error) and "does not see the folder" in str(error), error)
    latest = store.latest()
    check(latest is not None and latest.step == 1, latest)
    print("workers", flush=True)


def check_places(private: Path) -> None:
    """Ranks on both nodes, each with the threads and the variables that it should have."""
    os.environ |= {"NCCL_DEBUG": "INFO", "HF_FROM_DRIVER": "yes", "HF_TOKEN": "secret"}
    wide = "model.override_config={hidden_size: 512, num_hidden_layers: 8}"  # so that threads are counted by cores
    ranks = ("runtime=ray", "num_workers=4", "nodes=2", "use_gpu=true", PATIENT)
    config = small_config(private, *ranks, "worker_env.MINE=1", "threads_per_rank=0", wide)
    with placing.start_group(config, Init(Prober), "places", NodeSetup(())) as group:
        places = group.call.place()
        check([(address, rank) for address, rank, _ in places] == [(OTHER, 0), (OTHER, 1), (DRIVER, 0), (DRIVER, 1)], places)
        check([threads for *_, threads in places] == [1, 1, *[max(1, num_cores() // 2)] * 2], places)
        print("places", flush=True)
        found = group.call.variables("NCCL_DEBUG", "HF_FROM_DRIVER", "HF_TOKEN", "MINE")
        check(found == [["INFO", "yes", None, "1"]] * 4, found)
        print("variables", flush=True)
        check_checkpoints(group, private)
        print("checkpoints", flush=True)
    try:
        placing.start_group(config.model_copy(update={"nodes": 1}), Init(Prober), "places", NodeSetup(()))
        raise SystemExit("four ranks of a GPU each fit on a node of two")
    except ResourceError as error:
        check("- nodes=2 puts 2 rank(s) on each of 2 nodes" in str(error) and "process_on_nodes" not in str(error), error)
    print("room", flush=True)


def check_setup(private: Path, common: Path) -> None:
    """A node that lacks the run's folder, or the model, is named before any worker is built."""
    config = small_config(common, "runtime=ray", "num_workers=2", "nodes=2", "use_gpu=false", PATIENT)
    (private / "model").mkdir()
    save_model(load_model(SMALL, seed=0), str(private / "model"))
    files = ModelFiles.of("model.path", ModelConfig(path=str(private / "model")))
    for folder, models, reason in (
        (private, (), f"run_root: the driver keeps the run in {private}, but this node has another folder of that name"),
        (common, (files,), "config.json with"),
    ):
        try:
            with shared(folder) as probe:
                placing.start_group(config, Init(Prober), "setup", NodeSetup(models, probe))
            raise SystemExit("a node that is not ready was taken")
        except ResourceError as error:
            check("1 of 2 nodes are not ready" in str(error) and f"({OTHER}): " in str(error) and reason in str(error), error)
    print("setup", flush=True)


def check_runs(private: Path, common: Path, address: str) -> None:
    """`podium train`: refused where the folder is the node's own, whole where it is shared."""
    save = common / "model"
    save_model(load_model(SMALL, seed=0), str(save))
    load_tokenizer(SMALL).save_pretrained(save)
    ranks = ("runtime=ray", "num_workers=2", "nodes=2", "use_gpu=false", PATIENT)
    config = small_config(private, *ranks, "warmup.steps=1", "trainer.total_steps=1", f"model={save}")
    for root, code, words in (
        (private, 1, f"({OTHER}): run_root: the driver keeps the run in {private}"),
        (common, 0, "held-out"),
    ):
        done = _podium_train(config.model_copy(update={"run_root": str(root)}), common, address)
        check(done.returncode == code and words in done.stdout + done.stderr, done.stdout + done.stderr)
        print("refused" if code else "trained", flush=True)
    (run,) = [path for path in common.iterdir() if (path / "config.yaml").is_file() and not path.is_symlink()]
    for folder in (run / "hf", run / "warmup" / "hf", run / "checkpoints" / "step-1", run / "warmup" / "checkpoints" / "step-1"):
        manifest.Checkpoint.read(folder).verify()
    check(not [path for path in run.iterdir() if path.name.startswith(".probe")], run)
    print("whole", flush=True)


def _podium_train(config: RunConfig, common: Path, address: str) -> subprocess.CompletedProcess[str]:
    file = common / "config.yaml"
    file.write_text(to_yaml(config))
    command = [sys.executable, "-m", "podium.cli.main", "train", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "RAY_ADDRESS": address})


def main(folder: str) -> None:
    private, common = Path(folder) / "private", Path(folder) / "common"
    for path in (private, common):
        path.mkdir()
    nodes, store = Cluster(), 80 * 2**20
    nodes.add_node(num_cpus=4, num_gpus=2, node_ip_address=DRIVER, object_store_memory=store, include_dashboard=False)
    ray.init(address=nodes.address, log_to_driver=False)
    with other_node(nodes.address, private):
        check_places(private)
        check_workers(private)
        check_setup(private, common)
        ray.shutdown()
        check_runs(private, common, nodes.address)


if __name__ == "__main__":
    main(sys.argv[1])

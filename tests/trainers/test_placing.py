"""Where a run's ranks go by its settings, and what an error says where they have no room."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.config import RunConfig, check, explain
from podium.errors import ConfigError, NoRoomError, ResourceError, UnsupportedByRuntime
from podium.single_controller import Init, Worker
from podium.single_controller.placement.plan import Node, plan_placement
from podium.trainers import placing
from podium.trainers.node_setup import NodeSetup
from tests.trainers.builders import small_config

GPU_BOX = {"CPU": 64.0, "GPU": 8.0}


def config_of(*overrides: str) -> RunConfig:
    return small_config(Path("runs"), "runtime=ray", *overrides)


def refused(config: RunConfig, *boxes: dict[str, float], held: float = 0.0) -> str:
    """What `podium train` says where these boxes, with `held` GPUs in use on each, have no room."""
    nodes = [Node(f"n{n}", f"10.0.0.{n}", box, {**box, "GPU": box.get("GPU", 0) - held}) for n, box in enumerate(boxes)]
    counts = [config.ranks_per_node] * config.nodes
    with pytest.raises(NoRoomError) as caught:
        plan_placement(counts, {"CPU": 1.0, "GPU": 1.0}, nodes)
    return placing.no_room(config, caught.value)


def test_ranks_on_several_nodes_have_room_with_nodes():
    """32 ranks on 4 x 8 were refused: they were one entry, which has to lie on one node."""
    assert "- nodes=4 puts 8 rank(s) on each of 4 nodes" in refused(config_of("num_workers=32"), *[GPU_BOX] * 4)
    plan = plan_placement([8] * 4, {"CPU": 1.0, "GPU": 1.0}, [Node(f"n{n}", f"10.0.0.{n}", GPU_BOX, GPU_BOX) for n in range(4)])
    assert [len({node.node_id for node in entry}) for entry in plan] == [1, 1, 1, 1]


def test_an_error_about_room_names_the_settings_of_the_run():
    """It named arguments of ResourcePool, which a run does not have."""
    text = refused(config_of("num_workers=2"), {"CPU": 8.0, "GPU": 1.0})
    head, *table, fewer, on_cpus = text.splitlines()
    assert head == "num_workers=2 on nodes=1 is 2 rank(s) on each node, and each takes CPU 1 + GPU 1; that does not fit:"
    assert "1/1" in table[1]
    assert (fewer, on_cpus) == ("- num_workers=1 is the most that fits on nodes=1 now", "- use_gpu=false runs the ranks on CPUs")
    assert "process_on_nodes" not in text
    busy = refused(config_of("num_workers=8"), GPU_BOX, held=6.0)
    assert "- it fits once other programs give back what they hold" in busy
    assert "- num_workers=2 is the most that fits on nodes=1 now" in busy


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_without_room_fails_in_the_words_of_its_settings():
    with pytest.raises(ResourceError, match=r"num_workers=4 on nodes=2 is 2 rank\(s\) on each(.|\n)*- use_gpu=false runs"):
        placing.start_group(config_of("num_workers=4", "nodes=2", "use_gpu=true"), Init(Worker), "policy", NodeSetup(()))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["num_workers=5", "nodes=2"], "num_workers must be a multiple of nodes: 5 / 2 leaves 1 ranks over; use num_workers=4"),
        (["num_workers=1", "nodes=2"], "1 / 2 leaves 1 ranks over; use num_workers=2"),
        (
            ["runtime=inline", "worker_env.NCCL_DEBUG=INFO"],
            r"worker_env \(NCCL_DEBUG\) needs processes .* in the shell that starts",
        ),
        (["runtime=inline", "start_timeout_s=9"], "start_timeout_s=9.0 has no effect without runtime=ray"),
    ],
)
def test_ranks_that_cannot_be_placed_are_refused_before_anything_starts(overrides, reason):
    with pytest.raises(ConfigError, match=reason):
        check(config_of(*overrides))


def test_the_placement_is_explained():
    assert "8 ranks / 2 node(s) = 4 ranks on each node, a GPU each" in explain(
        config_of("num_workers=8", "nodes=2", "use_gpu=true")
    )
    assert "1 ranks / 1 node(s) = 1 ranks on each node, a GPU each, if the cluster has any" in explain(config_of())
    assert not any("node(s)" in line for line in explain(config_of("runtime=inline")))


def test_inline_refuses_an_environment_of_its_own():
    with pytest.raises(UnsupportedByRuntime, match="environment variables of the workers"):
        placing.start_group(config_of("runtime=inline", "worker_env.A=b"), Init(Worker), "policy", NodeSetup(()))

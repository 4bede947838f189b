"""verl's names as thin layers: their arguments, what is refused, and that nothing leaks from one group into the next."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from podium.compat.verl import (
    DISPATCH_MODE_FN_REGISTRY,
    ClassWithInitArgs,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    SubRayResourcePool,
    extract_pg_from_exist,
    initialize_global_process_group_ray,
)
from podium.errors import ConfigError, RegistrationError, ResourceError, UnsupportedByRuntime
from podium.protocol import DataProto
from podium.single_controller import (
    Dispatch,
    Init,
    Worker,
    WorkerGroup,
    get_predefined_dispatch_fn,
    register,
    register_dispatch_mode,
)
from podium.single_controller.runtime.base import GroupSpec


class Echo(Worker):
    def __init__(self, x: int, *, cls: str = "") -> None:
        self.x = x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self) -> int:
        return self.x


class Joins(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> tuple[int, str]:
        initialize_global_process_group_ray(timeout_second=60)
        total = torch.tensor(self.rank + 1)
        dist.all_reduce(total)
        return int(total), str(dist.get_backend(dist.group.WORLD))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Env(Worker):
    def resources(self) -> dict[str, float]:
        import ray

        assigned: dict[str, float] = ray.get_runtime_context().get_assigned_resources()
        return assigned

    def read(self) -> tuple[str | None, str | None]:
        return os.environ.get("FROM_OPTIONS"), os.environ.get("FROM_GROUP")


@pytest.fixture
def specs(monkeypatch: pytest.MonkeyPatch) -> list[GroupSpec]:
    """What would have been started: the worker processes stops where it would reach a cluster."""
    seen: list[GroupSpec] = []

    class Recorder:
        def start(self, spec: GroupSpec) -> dict[int, Any]:
            seen.append(spec)
            return {}

        def wait(self, tickets: Any, timeout_s: float) -> dict[int, Any]:
            return {}

        def close(self) -> None: ...

    monkeypatch.setattr("podium.single_controller.processes.worker_processes.build_runtime", lambda name: Recorder())
    return seen


def pool() -> RayResourcePool:
    return RayResourcePool([2], use_gpu=False)


# -- classes with arguments ------------------------------------------------------------------------------------------------


def test_the_class_may_be_given_by_name():
    assert ClassWithInitArgs(cls=Echo, x=2)().get() == 2
    assert RayClassWithInitArgs(cls=Echo, x=3)().get() == 3
    assert RayClassWithInitArgs(Echo, 4).args == (4,)
    assert Init(Echo, 5, cls="a worker's own argument").kwargs == {"cls": "a worker's own argument"}


def test_a_wrong_constructor_argument_raises_on_the_driver():
    with pytest.raises(TypeError, match=r"Echo\(\): got an unexpected keyword argument 'y'"):
        RayClassWithInitArgs(cls=Echo, x=1, y=2)


def test_options_add_up_and_those_of_placement_are_refused():
    made = RayClassWithInitArgs(cls=Echo, x=1)
    made.update_options({"runtime_env": {"env_vars": {"A": "1"}}})
    made.set_additional_resource({"disk": 1})  # one is enough
    made.set_additional_resource({"tape": 2})
    assert made.options == {"runtime_env": {"env_vars": {"A": "1"}}, "resources": {"disk": 1, "tape": 2}}
    with pytest.raises(ConfigError, match="num_gpus, scheduling_strategy must be set on the resource pool"):
        made.update_options({"scheduling_strategy": "SPREAD", "num_gpus": 1})


def test_a_groups_options_stay_its_own(specs: list[GroupSpec]):
    made = RayClassWithInitArgs(cls=Echo, x=1)
    RayWorkerGroup(pool(), made, bin_pack=False, detached=True)
    RayWorkerGroup(pool(), made)
    assert [(spec.options["bin_pack"], spec.detached) for spec in specs] == [(False, True), (True, False)]
    assert made.options == {}


# -- groups ----------------------------------------------------------------------------------------------------------------


def test_arguments_of_verl_reach_the_runtime(specs: list[GroupSpec]):
    RayWorkerGroup(
        resource_pool=pool(),
        ray_cls_with_init=RayClassWithInitArgs(cls=Echo, x=1),
        name_prefix="mine",
        master_port_range=[4000, 4010],
        worker_env={"A": "1"},
        device_name="cpu",
    )
    RayWorkerGroup(pool(), RayClassWithInitArgs(cls=Echo, x=1), master_addr="10.0.0.1", master_port=29500)
    ranged, fixed = specs
    assert (ranged.name_prefix, ranged.master_port_range, ranged.worker_env) == ("mine", (4000, 4010), {"A": "1"})
    assert (fixed.master_addr, fixed.master_port_range) == ("10.0.0.1", (29500, 29501))


def test_a_bare_class_is_enough(specs: list[GroupSpec]):
    class Plain:
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def get(self) -> int:
            return 1

    RayWorkerGroup(pool(), Plain)
    assert specs[0].worker_class is Plain


def test_nsight_options_are_those_of_the_steps_and_the_callers_dict_stays(specs: list[GroupSpec]):
    nsight = {"capture-range": "cudaProfilerApi", "capture-range-end": None}
    made = RayClassWithInitArgs(cls=Echo, x=1)
    made.update_options({"runtime_env": {"env_vars": {"A": "1"}}})
    RayWorkerGroup(pool(), made, profile_steps=[1, 2], worker_nsight_options=nsight)
    assert specs[0].options["runtime_env"] == {
        "env_vars": {"A": "1"},
        "nsight": {"capture-range": "cudaProfilerApi", "capture-range-end": "repeat-shutdown:12"},
    }
    assert nsight["capture-range-end"] is None
    assert "nsight" not in made.options["runtime_env"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"use_gpu": True}, ConfigError, "use_gpu must not be True for a pool that was made with use_gpu=False"),
        ({"device_name": "npu"}, UnsupportedByRuntime, "device_name must be 'cuda' or 'cpu', got 'npu'"),
        ({"master_addr": "10.0.0.1"}, ConfigError, "master_addr and master_port must be given together, got '10.0.0.1' and None"),
        ({"master_port": 1}, ConfigError, "master_addr and master_port must be given together, got None and 1"),
        (
            {"profile_steps": [1]},
            ConfigError,
            r"profile_steps and worker_nsight_options must be given together, got \[1\] and None",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        RayWorkerGroup(pool(), RayClassWithInitArgs(cls=Echo, x=1), **options)


def test_a_group_needs_its_class():
    for make in (RayWorkerGroup, RayWorkerGroup.from_detached):
        with pytest.raises(ConfigError, match="ray_cls_with_init must be the class of the workers"):
            make(worker_names=["a"])


def test_an_option_without_effect_in_verl_is_refused():
    with pytest.raises(TypeError, match="ray_wait_register_center_timeout"):
        RayWorkerGroup(pool(), RayClassWithInitArgs(cls=Echo, x=1), ray_wait_register_center_timeout=300)


def test_the_columns_of_a_batch_may_be_given_as_a_tensordict():
    data = DataProto(batch=TensorDict({"x": torch.arange(3)}, batch_size=[3]), meta_info={"step": 1})
    assert (data.batch["x"].tolist(), len(data), data.meta_info) == ([0, 1, 2], 3, {"step": 1})


# -- pools -----------------------------------------------------------------------------------------------------------------


def test_a_part_of_a_pool_is_a_pool():
    assert SubRayResourcePool is RayResourcePool
    with pytest.raises(ResourceError, match="there is no pool 'other'; there are: mine"):
        extract_pg_from_exist({"mine": pool()}, ["mine", "other"], pool())


def test_the_table_of_dispatch_modes_is_read_and_written_like_verls():
    before = DISPATCH_MODE_FN_REGISTRY.copy()
    assert before[Dispatch.ONE_TO_ALL] == get_predefined_dispatch_fn(Dispatch.ONE_TO_ALL)
    functions = {"dispatch_fn": lambda group, *args: (args, {}), "collect_fn": lambda group, outputs: outputs}
    mode = register_dispatch_mode("OF_THE_TEST", **functions)
    try:
        assert DISPATCH_MODE_FN_REGISTRY[mode] == functions
        DISPATCH_MODE_FN_REGISTRY[mode] = before[Dispatch.ALL_TO_ALL]
        assert get_predefined_dispatch_fn(mode) == before[Dispatch.ALL_TO_ALL]
    finally:
        Dispatch.remove("OF_THE_TEST")
        del DISPATCH_MODE_FN_REGISTRY[mode]
    assert DISPATCH_MODE_FN_REGISTRY.copy() == before
    assert "OF_THE_TEST" not in Dispatch
    with pytest.raises(RegistrationError, match="the mode to remove must be one that register_dispatch_mode added"):
        Dispatch.remove("ONE_TO_ALL")


def test_a_manager_of_pools_needs_no_roles():
    assert ResourcePoolManager({"pool": [2]}, mapping=None).mapping == {}


def test_on_cpus_a_pool_asks_for_no_gpus_and_keeps_its_devices():
    made = RayResourcePool([2])
    assert (made.on_device("cuda") is made, made.on_device("cpu").use_gpu) == (True, False)
    assert made.on_device("cpu").reservations == made.reservations
    with pytest.raises(ResourceError, match="unknown placement strategy 'SPREAD'"):
        made.get_placement_groups(strategy="SPREAD")


def test_a_managers_pools_are_keys_of_a_dict():
    manager = ResourcePoolManager({"global_pool": [2], "reward_pool": [2]}, {"actor": "global_pool", "rm": "reward_pool"})
    classes: dict[RayResourcePool, dict[str, str]] = {pool: {} for pool in manager.create_resource_pool().values()}
    classes[manager.get_resource_pool("rm")]["rm"] = "class"
    assert list(classes.values()) == [{}, {"rm": "class"}]


# -- on Ray ----------------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_attaching_by_names_handles_and_prefix(ray_cluster: None):
    made = RayClassWithInitArgs(cls=Echo, x=6)
    with RayWorkerGroup(pool(), made, name_prefix="names", detached=True) as group:
        by_names = RayWorkerGroup(worker_names=group.worker_names, ray_cls_with_init=made)
        by_handles = RayWorkerGroup.from_detached(worker_handles=group.workers, ray_cls_with_init=made)
        by_prefix = WorkerGroup.from_detached(made, name_prefix="names")
        for attached in (by_names, by_handles, by_prefix):
            assert attached.get() == [6, 6]
            assert attached.world_size == 2
            attached.close()  # lets go
        assert group.get() == [6, 6]


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_the_process_group_is_joined_and_attaching_to_a_busy_group_times_out(ray_cluster: None):
    with RayWorkerGroup(pool(), RayClassWithInitArgs(Joins), name_prefix="joins", detached=True) as group:
        assert [total for total, _ in group.sum_of_ranks()] == [3, 3]
        busy = group.sleep(4)
        began = time.monotonic()
        with pytest.raises(ResourceError, match=r"did not answer within 0\.5 s: .* or give a longer start_timeout_s"):
            RayWorkerGroup.from_detached(Joins, name_prefix="joins", start_timeout_s=0.5)
        assert time.monotonic() - began < 3
        with RayWorkerGroup.from_detached(Joins, name_prefix="joins", start_timeout_s=60) as attached:
            assert attached.world_size == 2
        busy.get()
        for wrong in (0, "soon"):
            with pytest.raises(ConfigError, match="start_timeout_s must be"):
                RayWorkerGroup.from_detached(Joins, name_prefix="joins", start_timeout_s=wrong)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_a_class_whose_environment_was_set_by_an_option(ray_cluster: None):
    made = RayClassWithInitArgs(cls=Env)
    made.update_options({"runtime_env": {"env_vars": {"FROM_OPTIONS": "1"}}})
    with RayWorkerGroup(RayResourcePool([1], use_gpu=False), made, worker_env={"FROM_GROUP": "2"}) as group:
        assert group.execute_all_sync("read") == [("1", "2")]


@pytest.mark.timeout(120)
def test_a_single_additional_resource_is_taken_of_what_the_pool_reserved(ray_cluster: None):
    import ray

    resource = next(name for name in ray.cluster_resources() if name.startswith("node:") and "__" not in name)
    made = RayClassWithInitArgs(cls=Env)
    made.set_additional_resource({resource: 0.0001})
    with RayWorkerGroup(RayResourcePool([1], use_gpu=False, accelerator_type=resource), made) as group:
        assert group.execute_rank_zero_sync("resources")[resource] == 0.0001
    with pytest.raises(ResourceError, match="fits into no place of its pool"):
        RayWorkerGroup(RayResourcePool([1], use_gpu=False), made)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_two_groups_of_one_name_prefix_are_refused_before_anything_starts(ray_cluster: None):
    made = RayClassWithInitArgs(cls=Env)
    with RayWorkerGroup(RayResourcePool([1], use_gpu=False), made, name_prefix="twice") as group:
        with pytest.raises(ResourceError, match="give another name_prefix than 'twice'"):
            RayWorkerGroup(RayResourcePool([1], use_gpu=False), made, name_prefix="twice")
        assert group.execute_all_sync("read") == [(None, None)]

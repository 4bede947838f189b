"""Several workers in one process per rank: who is called, what they know of each other, and that they live as one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from podium.compat.verl import RayClassWithInitArgs, create_colocated_worker_cls_fused
from podium.errors import DispatchError, GroupClosedError, RegistrationError, WorkerError, WorkerLostError
from podium.protocol import DataProto
from podium.single_controller import (
    ColocatedWorker,
    Dispatch,
    Init,
    ResourcePool,
    Worker,
    WorkerGroup,
    create_colocated_worker_cls,
    create_colocated_worker_raw_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)

pytestmark = pytest.mark.timeout(180)

NUM_RANKS = 2
SLOW_S = 3.0


class Actor(Worker):
    """Its mesh "train" runs against the order of ranks."""

    def __init__(self, base: int = 0) -> None:
        self.base = base
        self.seen_at_start = sorted(self.fused_worker_dict)
        self._register_dispatch_collect_info("train", self.world_size - 1 - self.rank, True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init(self) -> str:
        return f"actor.init on {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rollout_init(self) -> str:
        return f"actor.rollout_init on {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: int) -> int:
        return self.base + x + self.rank

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def tag(self, batch: DataProto) -> DataProto:
        return DataProto({"x": batch.batch["x"], "rank": torch.full((len(batch),), self.rank)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def ping(self, x: int) -> int:
        await asyncio.sleep(0.1)
        return x + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "waited"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("the actor's own fault")


class ActorRollout(Worker):
    """A role whose name begins with another's; its mesh "train" is in the order of ranks."""

    def __init__(self) -> None:
        self.seen_at_start = sorted(self.fused_worker_dict)
        self._register_dispatch_collect_info("train", self.rank, True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init(self) -> str:
        return f"actor_rollout.init on {self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask_the_actor(self, x: int) -> tuple[int, int]:
        actor = self.get_fused_worker_by_name("actor")
        return actor.add(x), self.fused_worker_dict["actor"].base

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask_nobody(self) -> None:
        self.get_fused_worker_by_name("actress")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def colleagues(self) -> tuple[list[str], list[str], list[str]]:
        return self.get_fused_worker_by_name("actor").seen_at_start, self.seen_at_start, sorted(self.fused_worker_dict)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def tag(self, batch: DataProto) -> DataProto:
        return DataProto({"x": batch.batch["x"], "rank": torch.full((len(batch),), self.rank)})

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def generate(self, x: int) -> int:
        await asyncio.sleep(0)
        return 100 * self.rank + x

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self) -> tuple[int, int, int, int]:
        return self.rank, self.world_size, self.local_rank, self.local_world_size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def heartbeat(self) -> int:
        return self.rank


class Judge:
    """A plain class: it knows nothing of ranks."""

    def __init__(self, bonus: int) -> None:
        self.bonus = bonus

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def score(self, x: int) -> int:
        return x + self.bonus

    def unregistered(self, x: int) -> int:
        return -x


class TwoMeshes(Worker):
    """Two meshes of two ranks: one against their order, and one in which they are peers."""

    def __init__(self) -> None:
        self._register_dispatch_collect_info("train", self.world_size - 1 - self.rank, True)
        self._register_dispatch_collect_info("infer", 0, self.rank == 1)

    def tagged(self, batch: DataProto) -> DataProto:
        return DataProto({"x": batch.batch["x"], "rank": torch.full((len(batch),), self.rank)})


Inner = create_colocated_worker_raw_cls({"actor": Init(Actor, 1000), "judge": Init(Judge, 5)})


class InnerHybrid(Inner):  # type: ignore[misc, valid-type]
    """A colocated class that becomes a role itself."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def judged(self, x: int) -> int:
        return int(self.judge.score(self.actor.add(x)))


HybridBase = create_colocated_worker_raw_cls(
    {"actor": Init(Actor, base=10), "judge": Init(Judge, 7), "meshes": TwoMeshes, "inner": InnerHybrid}
)


class Hybrid(HybridBase):  # type: ignore[misc, valid-type]
    """A user's own methods over inner workers, whose meshes it takes for its own."""

    def __init__(self, sign: int) -> None:
        super().__init__()
        self.sign = sign
        self.set_dispatch_collect("actor", **self.actor.get_dispatch_collect())
        self.set_dispatch_collect("infer", **self.meshes.get_dispatch_collect())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def foo(self, x: int) -> int:
        return int(self.sign * self.judge.score(self.actor.add(x)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def async_foo(self, x: int) -> int:
        return int(await self.actor.ping(x))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
    def on_actor(self, batch: DataProto) -> DataProto:
        return self.meshes.tagged(batch)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("infer"))
    def on_infer(self, batch: DataProto) -> DataProto:
        return self.meshes.tagged(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_some_mesh(self, name: str) -> None:
        self.set_dispatch_collect(name, **self.meshes.get_dispatch_collect())


class Stillborn(Worker):
    def __init__(self, rank: int) -> None:
        if self.rank == rank:
            raise ValueError("no such model")


class Mortal(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(3)


class Forgetful(Inner):  # type: ignore[misc, valid-type]
    """Builds no roles: it does not call `super().__init__()`."""

    def __init__(self) -> None:
        pass


@pytest.fixture(scope="module", params=["inline", "ray"])
def runtime(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "ray":
        request.getfixturevalue("ray_cluster")
    return name


@pytest.fixture(scope="module")
def group(runtime: str) -> Iterator[WorkerGroup[Any]]:
    roles = {"actor": Init(Actor, base=10), "actor_rollout": ActorRollout, "judge": Init(Judge, 7)}
    with colocated(create_colocated_worker_cls(roles), runtime, name="shared") as shared:
        yield shared


@pytest.fixture(scope="module")
def hybrid(runtime: str) -> Iterator[WorkerGroup[Hybrid]]:
    with colocated(Init(Hybrid, -1), runtime) as shared:
        yield shared


def colocated(init: Init[Any] | type, runtime: str, **options: Any) -> WorkerGroup[Any]:
    return WorkerGroup(ResourcePool([NUM_RANKS]), init, runtime=runtime, threads_per_rank=1, **options)


def rows(*values: int) -> DataProto:
    return DataProto({"x": torch.tensor(values)})


def origins(tagged: DataProto) -> list[tuple[int, int]]:
    """Each row with the rank that it was on."""
    return list(zip(tagged.batch["x"].tolist(), tagged.batch["rank"].tolist(), strict=True))


# -- roles and their groups ------------------------------------------------------------------------------------------------


def test_a_role_is_routed_by_role_and_method_not_by_a_joined_name(group: WorkerGroup[Any]):
    roles = group.spawn(["actor", "actor_rollout"])
    assert roles["actor"].init() == ["actor.init on 0", "actor.init on 1"]
    assert roles["actor"].rollout_init() == ["actor.rollout_init on 0", "actor.rollout_init on 1"]
    assert roles["actor_rollout"].init() == ["actor_rollout.init on 0", "actor_rollout.init on 1"]


def test_a_roles_group_has_no_method_of_another_role(group: WorkerGroup[Any]):
    roles = group.spawn()
    assert list(roles) == ["actor", "actor_rollout", "judge"]
    for name in ("rollout_place", "place", "actor_init", "score"):
        with pytest.raises(AttributeError, match=f"Actor has no method '{name}'"):
            getattr(roles["actor"], name)
    assert {"add", "ping"} <= set(dir(roles["actor"]))
    assert not {"heartbeat", "rollout_heartbeat", "score"} & set(dir(roles["actor"]))


def test_a_role_that_is_not_there_names_the_nearest(group: WorkerGroup[Any]):
    with pytest.raises(DispatchError, match="unknown role 'actr'; did you mean 'actor'"):
        group.spawn({"actr"})


def test_flat_names_reach_a_role_and_an_ambiguous_one_says_which_are_meant(group: WorkerGroup[Any]):
    assert group.actor_add(1) == [11, 12]
    assert group.actor_rollout_heartbeat() == [0, 1]
    with pytest.raises(AttributeError, match=r"could mean spawn\(\)\['actor'\].rollout_init or .*'actor_rollout'\].init"):
        _ = group.actor_rollout_init


def test_flat_names_are_names_for_any_call_too(group: WorkerGroup[Any]):
    assert group.execute_all_sync("actor_add", 1) == [11, 12]
    assert group.execute_rank_zero_sync("actor_add", 1) == 11
    with pytest.raises(AttributeError, match=r"could mean spawn\(\)\['actor'\].rollout_init or"):
        group.execute_all("actor_rollout_init")
    with pytest.raises(AttributeError, match="no method 'actor_ad'; did you mean 'actor_add'"):
        group.execute_all("actor_ad", 1)
    with pytest.raises(AttributeError, match="Actor has no method 'actor_add'"):
        group.spawn()["actor"].execute_all("actor_add", 1)


def test_a_group_that_is_not_fused_says_how_to_reach_a_role(group: WorkerGroup[Any]):
    with pytest.raises(AttributeError, match=r"'actor' is a role: spawn\(\)\['actor'\] is its group, fuse\(\)"):
        _ = group.actor


def test_inner_workers_are_the_rank_that_they_are_part_of(group: WorkerGroup[Any]):
    assert group.spawn()["actor_rollout"].place() == [(rank, NUM_RANKS, rank, NUM_RANKS) for rank in range(NUM_RANKS)]


def test_a_plain_class_is_a_role(group: WorkerGroup[Any]):
    judge = group.spawn()["judge"]
    assert judge.score(1) == [8, 8]
    assert judge.execute_all_sync("unregistered", 4) == [-4, -4]
    assert judge.execute_rank_zero_sync("unregistered", 5) == -5


def test_building_inner_workers_leaves_the_environment_alone():
    before = dict(os.environ)
    with colocated(create_colocated_worker_cls({"actor": Actor, "actor_rollout": ActorRollout}), "inline") as processes:
        processes.spawn()["actor_rollout"].place()
        assert dict(os.environ) == before


# -- what roles know of each other -----------------------------------------------------------------------------------------


def test_a_role_calls_another_in_process(group: WorkerGroup[Any]):
    assert group.spawn()["actor_rollout"].ask_the_actor(1) == [(11, 10), (12, 10)]


def test_a_constructor_sees_the_roles_before_it_and_later_everyone_sees_all(group: WorkerGroup[Any]):
    everyone = ["actor", "actor_rollout", "judge"]
    assert group.spawn()["actor_rollout"].colleagues() == [([], ["actor"], everyone)] * NUM_RANKS


def test_an_unknown_colleague_is_an_error_that_names_them(group: WorkerGroup[Any]):
    with pytest.raises(WorkerError, match="unknown role 'actress'; did you mean 'actor'"):
        group.spawn()["actor_rollout"].ask_nobody()


# -- async methods ---------------------------------------------------------------------------------------------------------


def test_an_async_method_of_a_role_gives_the_driver_its_value(group: WorkerGroup[Any], hybrid: WorkerGroup[Hybrid]):
    assert group.spawn()["actor"].ping(5) == [5, 6]
    assert hybrid.async_foo(5) == [5, 6]


def test_a_waiting_async_method_of_one_role_does_not_hold_up_another(runtime: str, group: WorkerGroup[Any]):
    if runtime == "inline":
        assert group.spawn()["actor"].wait(0).get() == ["waited", "waited"]  # ranks and calls run one after another
        return
    roles = group.spawn()
    roles["actor_rollout"].heartbeat()
    began = time.monotonic()
    waiting = roles["actor"].wait(SLOW_S)
    assert roles["actor_rollout"].heartbeat() == [0, 1]
    assert time.monotonic() - began < 1
    assert waiting.get() == ["waited", "waited"]
    assert time.monotonic() - began >= SLOW_S


# -- meshes ----------------------------------------------------------------------------------------------------------------


def test_each_role_has_meshes_of_its_own(group: WorkerGroup[Any]):
    roles = group.spawn()
    assert origins(roles["actor"].tag(rows(1, 2, 3, 4))) == [(1, 1), (2, 1), (3, 0), (4, 0)]
    assert origins(roles["actor_rollout"].tag(rows(1, 2, 3, 4))) == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_an_inner_workers_mesh_is_taken_over_under_another_name(hybrid: WorkerGroup[Hybrid]):
    assert origins(hybrid.on_actor(rows(1, 2))) == [(1, 1), (2, 0)]


def test_of_two_meshes_the_one_of_that_name_is_taken(hybrid: WorkerGroup[Hybrid]):
    assert origins(hybrid.on_infer(rows(1, 2))) == [(1, 1), (2, 1)]


def test_of_two_meshes_neither_is_taken_in_silence(hybrid: WorkerGroup[Hybrid]):
    with pytest.raises(WorkerError, match="the inner worker must have a mesh 'some', or only one, got 'train', 'infer'"):
        hybrid.take_some_mesh("some")


# -- methods called on a worker's own handle -------------------------------------------------------------------------------


def test_a_direct_method_of_a_role_is_on_the_workers_handle(runtime: str, group: WorkerGroup[Any]):
    if runtime == "ray":
        import ray

        assert ray.get([worker.generate.remote(3) for worker in group.workers]) == [3, 103]
    else:
        assert [asyncio.run(worker.generate(3)) for worker in group.workers] == [3, 103]


def test_a_direct_method_is_refused_through_the_group(group: WorkerGroup[Any]):
    for call in (group.generate, group.spawn()["actor_rollout"].generate):
        with pytest.raises(DispatchError, match=r"call it on a worker's own handle, group.workers\[rank\]"):
            call(3)


def test_two_roles_with_one_direct_method_are_refused_when_they_are_joined():
    with pytest.raises(RegistrationError, match="only one role may have the direct method 'generate', got 'left' and 'right'"):
        create_colocated_worker_cls({"left": ActorRollout, "right": ActorRollout})


# -- a user's own class over the roles -------------------------------------------------------------------------------------


def test_own_methods_stand_beside_fused_roles(hybrid: WorkerGroup[Hybrid]):
    hybrid.fuse(["actor", "judge"])
    assert hybrid.actor.add(1) == [11, 12]
    assert hybrid.judge.score(11) == [18, 18]
    assert hybrid.foo(1) == [-18, -19]
    assert {"actor", "judge", "foo"} <= set(dir(hybrid))


def test_spawn_fused_is_spawn(hybrid: WorkerGroup[Hybrid]):
    assert hybrid.spawn_fused({"actor"})["actor"].add(2) == [12, 13]
    assert create_colocated_worker_cls_fused is create_colocated_worker_cls


def test_a_colocated_class_as_a_role_keeps_roles_of_its_own(hybrid: WorkerGroup[Hybrid]):
    assert hybrid.spawn()["inner"].judged(1) == [1006, 1007]


def test_as_plain_objects_they_work_without_any_group():
    hybrid = Hybrid(1)
    assert hybrid.foo(1) == 18
    assert hybrid.fused_worker_dict["actor"] is hybrid.actor
    assert hybrid.actor.fused_worker_dict is hybrid.fused_worker_dict


def test_classes_that_ray_has_wrapped_are_roles_and_groups(runtime: str):
    ray = pytest.importorskip("ray")
    made = create_colocated_worker_cls({"actor": Init(ray.remote(Actor), 3), "judge": RayClassWithInitArgs(cls=Judge, bonus=1)})
    assert [init.cls for init in made.cls.raw_cls_dict.values()] == [Actor, Judge]
    with colocated(Init(ray.remote(Judge), 2), "inline") as plain:
        assert plain.score(1) == [3, 3]


@pytest.mark.parametrize("role", ["status", "processes"])
def test_a_role_named_like_a_groups_own_attribute_can_be_spawned_but_not_fused(role: str):
    with colocated(create_colocated_worker_cls({role: Actor}), "inline") as processes:
        assert processes.spawn()[role].add(1) == [1, 2]
        with pytest.raises(RegistrationError, match=f"the role '{role}' must not have the name"):
            processes.fuse()


# -- what cannot be joined -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["two words", "_hidden", "", 3])
def test_a_role_needs_a_name(role: Any):
    with pytest.raises(RegistrationError, match="the name of a role must be an identifier"):
        create_colocated_worker_cls({role: Actor})


def test_no_roles_are_refused():
    with pytest.raises(RegistrationError, match="at least one role"):
        create_colocated_worker_cls({})


def test_a_role_named_like_a_member_of_every_worker_is_refused():
    with pytest.raises(RegistrationError, match="must not have a member named 'rank'"):
        create_colocated_worker_cls({"rank": Actor})


def test_a_subclass_cannot_hide_a_role():
    with pytest.raises(RegistrationError, match="Hides must not have a member named 'judge'"):

        class Hides(Inner):  # type: ignore[misc, valid-type]
            def judge(self) -> None: ...


def test_a_direct_method_cannot_hide_what_every_worker_has():
    class Hides(Worker):
        @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
        def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
            return {}

    with pytest.raises(RegistrationError, match="the direct method 'get_dispatch_collect' of role 'a'"):
        create_colocated_worker_cls({"a": Hides})


def test_options_of_roles_become_those_of_the_process_they_share():
    left, right = RayClassWithInitArgs(cls=Actor), RayClassWithInitArgs(cls=Actor)
    left.set_additional_resource({"disk": 1})
    assert create_colocated_worker_cls({"left": left, "right": right}).options == {"resources": {"disk": 1}}
    right.set_additional_resource({"disk": 2})
    with pytest.raises(
        RegistrationError, match=r"role 'right' must have the same option resources .*'disk': 1.* got .*'disk': 2"
    ):
        create_colocated_worker_cls({"left": left, "right": right})
    with pytest.raises(RegistrationError, match=r"role 'left' must not have options .* give them to the class made of the roles"):
        create_colocated_worker_raw_cls({"left": left})


# -- failures and the end --------------------------------------------------------------------------------------------------


def test_a_failure_names_group_role_method_and_rank(group: WorkerGroup[Any]):
    with pytest.raises(WorkerError, match="ValueError: the actor's own fault") as caught:
        group.spawn()["actor"].fail(1)
    assert (caught.value.origin.group, caught.value.origin.method, caught.value.origin.rank) == ("shared", "actor.fail", 1)
    assert group.spawn()["actor_rollout"].heartbeat() == [0, 1]


def test_wrong_arguments_are_refused_before_anything_is_sent(group: WorkerGroup[Any]):
    with pytest.raises(TypeError, match=r"add\(\): missing a required argument: 'x'"):
        group.spawn()["actor"].add()
    with pytest.raises(
        DispatchError, match=r"^shared\.actor\.tag \(ND_COMPUTE_PROTO\): an argument must be a DataProto or TensorDict"
    ):
        group.spawn()["actor"].tag(5)


def test_a_constructor_that_raises_names_its_role_and_rank(runtime: str):
    with pytest.raises(WorkerError, match="ValueError: no such model") as caught:
        colocated(create_colocated_worker_cls({"actor": Actor, "still": Init(Stillborn, 1)}), runtime)
    assert caught.value.origin.rank == 1
    assert "raised by the constructor of role 'still' (Stillborn)" in str(caught.value)


def test_roles_that_were_never_built_say_why():
    with (
        colocated(Forgetful, "inline") as processes,
        pytest.raises(WorkerError, match=r"role 'actor' of Forgetful was not built: call super\(\)"),
    ):
        processes.spawn()["actor"].add(1)


def test_a_death_in_one_role_breaks_the_groups_of_all_roles(ray_cluster: None):
    with colocated(create_colocated_worker_cls({"mortal": Mortal, "rollout": ActorRollout}), "ray") as processes:
        roles = processes.spawn()
        assert roles["rollout"].heartbeat() == [0, 1]
        with pytest.raises(WorkerLostError) as caught:
            roles["mortal"].die(1)
        assert (caught.value.origin.method, caught.value.origin.rank) == ("mortal.die", 1)
        with pytest.raises(GroupClosedError, match=r"'mortal\.die' failed: rank 1"):
            roles["rollout"].heartbeat()
        roles["rollout"].restart()
        assert roles["rollout"].heartbeat() == [0, 1]
        assert roles["mortal"].die(9) == [None, None]


def test_closing_one_group_closes_all(runtime: str):
    processes = colocated(create_colocated_worker_cls({"judge": Init(Judge, 1), "rollout": ActorRollout}), runtime)
    roles = processes.spawn()
    assert roles["judge"].score(1) == [2, 2]
    roles["judge"].close()
    processes.close()
    for call in (roles["judge"].score, processes.judge_score):
        with pytest.raises(GroupClosedError):
            call(1)
    with pytest.raises(GroupClosedError):
        roles["rollout"].heartbeat()


def test_another_driver_attaches_to_the_roles_of_a_detached_group(ray_cluster: None):
    made = create_colocated_worker_cls({"judge": Init(Judge, 1), "rollout": ActorRollout})
    with colocated(made, "ray", detached=True, name_prefix="shared") as processes:
        attached = WorkerGroup.from_detached(made, name_prefix="shared")
        attached.fuse()
        assert attached.judge.score(1) == [2, 2]
        assert origins(attached.rollout.tag(rows(1, 2))) == [(1, 0), (2, 1)]
        attached.close()
        assert processes.judge_score(2) == [3, 3]


def test_every_colocated_class_is_a_worker_of_workers():
    assert issubclass(Hybrid, ColocatedWorker)
    assert list(Hybrid.raw_cls_dict) == ["actor", "judge", "meshes", "inner"]

"""A driver of several roles on several pools, as a user of verl wrote it."""

from enum import Enum

import ray
import torch
from policy_workers import JudgeWorker
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, ResourcePoolManager
from verl.single_controller.ray.base import (
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
    merge_resource_pool,
    split_resource_pool,
)


class Role(Enum):
    Actor = 0
    Critic = 1
    RewardModel = 2


@ray.remote
class Actor(Worker):
    def __init__(self):
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.rank

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def generate(self, prompt):
        return f"{prompt} from {self.rank}"


@ray.remote
class Critic(Worker):
    def __init__(self, val):
        super().__init__()
        self.val = val

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def sub(self, x):
        return x - self.val

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def ask_actor(self, x):
        return self.get_fused_worker_by_name("actor_rollout").add(x) - self.val


class_dict = {"actor_rollout": RayClassWithInitArgs(cls=Actor), "critic": RayClassWithInitArgs(cls=Critic, val=10)}
FusedBase = create_colocated_worker_raw_cls(class_dict)


@ray.remote
class HybridWorker(FusedBase):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def foo(self, x):
        return self.critic.sub(self.actor_rollout.add(x))


def main():
    ray.init(num_cpus=64, num_gpus=4)
    manager = ResourcePoolManager(
        resource_pool_spec={"global_pool": [2], "reward_pool": [1]},
        mapping={Role.Actor: "global_pool", Role.Critic: "global_pool", Role.RewardModel: "reward_pool"},
    )
    manager.create_resource_pool()
    print("pools", manager.get_n_gpus(), manager.get_resource_pool(Role.Actor).world_size)

    resource_pool_to_cls = {pool: {} for pool in manager.resource_pool_dict.values()}
    resource_pool_to_cls[manager.get_resource_pool(Role.Actor)]["actor_rollout"] = class_dict["actor_rollout"]
    resource_pool_to_cls[manager.get_resource_pool(Role.Critic)]["critic"] = class_dict["critic"]
    reward_cls = RayClassWithInitArgs(cls=ray.remote(JudgeWorker), bonus=5)
    resource_pool_to_cls[manager.get_resource_pool(Role.RewardModel)]["rm"] = reward_cls
    all_wg = {}
    for resource_pool, roles in resource_pool_to_cls.items():
        wg_dict = RayWorkerGroup(resource_pool=resource_pool, ray_cls_with_init=create_colocated_worker_cls(class_dict=roles))
        spawn_wg = wg_dict.spawn(prefix_set=roles.keys())
        all_wg.update(spawn_wg)
    print("roles", sorted(all_wg))
    x = all_wg["actor_rollout"].add(100)
    print("spawn", x, all_wg["critic"].sub(x))
    scores = all_wg["rm"].compute_rm_score(DataProto.from_dict(tensors={"x": torch.arange(3)}))
    print("reward", scores.batch["score"].tolist())
    print("direct", ray.get([worker.generate.remote("hi") for worker in all_wg["actor_rollout"].workers]))

    pool = manager.get_resource_pool(Role.Actor)
    fused_cls = create_colocated_worker_cls_fused(class_dict=class_dict)
    spawned = RayWorkerGroup(pool, fused_cls, name_prefix="fused").spawn_fused(class_dict.keys())
    print("spawn_fused", spawned["actor_rollout"].add(1), spawned["critic"].sub([1, 2]), spawned["critic"].ask_actor(100))
    hybrid_cls = RayClassWithInitArgs(cls=HybridWorker)
    hybrid_cls.fused_worker_used = True
    hybrid = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=hybrid_cls, name_prefix="hybrid")
    hybrid.fuse(class_dict.keys())
    print("fuse", hybrid.actor_rollout.add(1), hybrid.critic.sub(hybrid.actor_rollout.add(1)), hybrid.foo(1))

    cpus = RayResourcePool([3], use_gpu=False, name_prefix="cpus")
    one, two = split_resource_pool(cpus, split_size=[1, 2])
    both = merge_resource_pool(
        RayResourcePool([1], use_gpu=False, name_prefix="left"), RayResourcePool([1], use_gpu=False, name_prefix="right")
    )
    print("pools", one.world_size, two.world_size, both.world_size, both.store, cpus.local_rank_list())
    for name, part in (("one", one), ("two", two), ("both", both)):
        print(name, RayWorkerGroup(part, RayClassWithInitArgs(cls=ray.remote(JudgeWorker)), name_prefix=name).add(0))
    ray.shutdown()


if __name__ == "__main__":
    main()

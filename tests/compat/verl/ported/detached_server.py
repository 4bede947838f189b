"""A driver that leaves its workers behind, as a user of verl wrote it."""

import ray
from policy_workers import JudgeWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

if __name__ == "__main__":
    ray.init(address="auto", namespace="ported")
    pool = RayResourcePool(process_on_nodes=[2], use_gpu=False, detached=True)
    wg = RayWorkerGroup(
        resource_pool=pool,
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(JudgeWorker), bonus=40),
        name_prefix="judge",
        detached=True,
    )
    print(wg.add(1), wg.worker_names)

"""Another driver, which takes the workers over by their names, as a user of verl wrote it."""

import ray
import torch
from policy_workers import JudgeWorker
from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

WORKER_NAMES = ["judgeJudgeWorker_0:0", "judgeJudgeWorker_0:1"]


@ray.remote(num_cpus=0)
def elsewhere(worker_names):
    wg = RayWorkerGroup.from_detached(
        name_prefix=None, worker_names=worker_names, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(JudgeWorker))
    )
    return wg.add(2)


if __name__ == "__main__":
    ray.init(address="auto", namespace="ported")
    wg = RayWorkerGroup(worker_names=WORKER_NAMES, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(JudgeWorker)))
    print(wg.add(1), wg.compute_rm_score(DataProto.from_dict(tensors={"x": torch.arange(4)})).batch["score"].tolist())
    print(ray.get(elsewhere.remote(wg.worker_names)))
    for worker in wg.workers:
        ray.kill(worker)

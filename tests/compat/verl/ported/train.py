"""A driver of one group, as a user of verl wrote it."""

import ray
import torch
from policy_workers import NestedWorker, PolicyWorker
from tensordict import TensorDict
from verl import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


def twice(worker, data):
    return DataProto.from_dict(tensors={"x": data.batch["x"] * 2 + 100 * worker.rank})


def total_of(tensor, factor):
    return float(tensor.sum()) * factor


def rows(n):
    return DataProto.from_dict(tensors={"x": torch.arange(n)}, non_tensors={"uid": [f"u{i}" for i in range(n)]})


def main():
    ray.init()
    pool = RayResourcePool(process_on_nodes=[4], use_gpu=False, max_colocate_count=3)
    policy_cls = RayClassWithInitArgs(cls=ray.remote(PolicyWorker), config={"scale": 3}, role="actor")
    wg = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=policy_cls, name_prefix="policy", device_name="cpu")
    print("names", wg.worker_names, wg.world_size)

    print("one_to_all", wg.init_model(), wg.describe("<", suffix=">"))
    out = wg.compute_log_prob(rows(8))
    print("dp_proto", out.batch["log_prob"].tolist(), out.batch["rank"].tolist(), out.non_tensor_batch["uid"].tolist())

    padded = DataProto.from_dict(tensors={"x": torch.arange(5)}, auto_padding=True)
    out = wg.compute_log_prob(padded)
    print("padding", out.batch["log_prob"].tolist(), len(out), len(padded))

    print("all_to_all", wg.pairwise([1, 2, 3, 4], [5, 6, 7, 8]))
    print("rank_zero", wg.save_checkpoint("ckpt", steps=[1, 2, 3, 4]))
    print("custom", wg.dealt(list("abcdefgh")), wg.own_value([10, 20, 30, 40]))
    print("registered", wg.dealt_and_flat([1, 2, 3, 4, 5]))

    refs = wg.ranks_later(10)
    print("refs", ray.get(refs), ray.get(refs[2]))
    future = wg.generate_sequences(rows(4))
    print("future", future.get().batch["x"].tolist(), future.get().meta_info)
    chained = wg.compute_log_prob(wg.generate_sequences(rows(4)))
    print("chained", chained.batch["log_prob"].tolist())

    out = wg.update_actor(rows(6))
    print("mesh", out.batch["rank"].tolist(), out.batch["total"].tolist(), out.batch["seen"].tolist())
    print("other mesh", wg.compute_ref_log_prob(rows(4)).batch["ref_log_prob"].tolist())
    tensordict = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    print("tensordict", wg.compute_ref_log_prob(DataProto(batch=tensordict)).batch["ref_log_prob"].tolist())
    print("metric", wg.metrics(rows(8)))

    print("execute_all", wg.execute_all_sync("unregistered", 1, times=2), ray.get(wg.execute_all_async("unregistered", x=5)))
    print("execute_rank_zero", wg.execute_rank_zero_sync("unregistered", 7))
    print("with_func", wg.execute_with_func_generator(twice, rows(4)).batch["x"].tolist())
    print("func_rank_zero", wg.execute_func_rank_zero(total_of, torch.ones(3), 2))

    nested = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(NestedWorker), 1000), name_prefix="nested")
    print("nested", nested.add(1))
    ray.shutdown()


if __name__ == "__main__":
    main()

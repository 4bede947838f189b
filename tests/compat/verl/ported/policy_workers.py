"""Workers of a policy and of a judge, as a user of verl wrote them."""

import os

import torch
import torch.distributed
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    Execute,
    collect_all_to_all,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
)


def dispatch_in_turns(worker_group, *args, **kwargs):
    """Deal the items of every list like cards."""
    size = worker_group.world_size
    dealt = tuple([arg[rank::size] for rank in range(size)] for arg in args)
    return dealt, {key: [value[rank::size] for rank in range(size)] for key, value in kwargs.items()}


def collect_flat(worker_group, output):
    assert len(output) == worker_group.world_size
    return [item for items in output for item in items]


register_dispatch_mode("IN_TURNS", dispatch_fn=dispatch_in_turns, collect_fn=collect_flat)


class PolicyWorker(Worker):
    def __init__(self, config, role):
        super().__init__()
        self.config = config
        self.role = role
        if not torch.distributed.is_initialized():
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            torch.distributed.init_process_group(backend="gloo", rank=rank, world_size=world_size)
        # two data-parallel ranks of two tensor-parallel peers; the first peer's output counts
        self._register_dispatch_collect_info("actor", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)
        self._register_dispatch_collect_info("ref", dp_rank=self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        weight = torch.tensor([float(self.rank + 1)])
        torch.distributed.all_reduce(weight)
        self.weight = weight.item()
        return self.weight

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def describe(self, prefix, suffix=""):
        return f"{prefix}{self.role}{self.rank}/{self.world_size}{suffix}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto):
        data.batch["log_prob"] = data.batch["x"] * self.config["scale"]
        data.batch["rank"] = torch.full((len(data),), self.rank)
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"x": prompts.batch["x"] + 1}, meta_info={"temperature": 0.5})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def update_actor(self, data: DataProto):
        total = data.batch["x"].sum().reshape(1).float()
        torch.distributed.all_reduce(total)
        return DataProto.from_dict(tensors={"rank": torch.tensor([self.rank]), "total": total, "seen": torch.tensor([len(data)])})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def compute_ref_log_prob(self, data: DataProto):
        return DataProto.from_dict(tensors={"ref_log_prob": -data.batch["x"]})

    @register()
    def pairwise(self, x, y):
        return x * y

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def save_checkpoint(self, path, steps):
        return f"rank {self.rank} saves {steps} to {path}"

    @register(dispatch_mode={"dispatch_fn": dispatch_in_turns, "collect_fn": collect_all_to_all})
    def dealt(self, cards):
        return cards

    @register(dispatch_mode=Dispatch.IN_TURNS)
    def dealt_and_flat(self, cards):
        return [card * 10 for card in cards]

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def ranks_later(self, offset):
        return self.rank + offset

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def own_value(self, value):
        return value + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metrics(self, data: DataProto):
        return {"rows": len(data), "rank": self.rank}

    def unregistered(self, x, times=1):
        return (x + self.rank) * times


class JudgeWorker(Worker):
    def __init__(self, bonus=0):
        super().__init__()
        self.bonus = bonus

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto):
        return DataProto.from_dict(tensors={"score": data.batch["x"] + self.bonus})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        return x + self.bonus + self.rank


class NestedWorker(Worker):
    """A worker that keeps another and calls its registered methods."""

    def __init__(self, bonus):
        super().__init__()
        self.judge = JudgeWorker(bonus=bonus)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x):
        return self.judge.add(x)

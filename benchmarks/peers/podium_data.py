"""Podium's side of the data benchmark: payloads through group calls beside bare Ray actors, one JSON line out.

    python podium_data.py [--only calls|chain] [--sizes 1,16,128,512] [--workers 2,4] [--quick]

A ratio is to the raw call of as many bare actors, measured in turns in this process. Needs Podium with the extra `ray`.
`verl_data.py` does the same work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import payloads as load
import ray
import torch
from ray._private.internal_api import node_stats
from ray_calls import Case, bare_actors, end, ratio, start_ray

import podium
from podium.protocol import DataProto, jagged_from_rows
from podium.single_controller import Dispatch, ResourcePool, Worker, WorkerGroup, register

CHAIN_RANKS = 4


class DataWorker(Worker):
    """Takes rows and gives them back, in each way that a method may be registered."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def send(self, data: DataProto) -> None:
        pass

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def echo(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def keep(self, data: DataProto) -> DataProto:
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def produce(self, plan: DataProto) -> DataProto:
        made = load.produced(int(plan.batch["tokens"].sum()))
        return DataProto({key: torch.from_numpy(column) for key, column in made.items()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, by_reference=True)
    def transform(self, data: DataProto) -> DataProto:
        load.transformed({key: column.numpy() for key, column in data.batch.items()})
        return data

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def consume(self, data: DataProto) -> int:
        return int(data.batch["input_ids"].shape[1] * (data.batch["input_ids"][0, -1] == 1))


def group_of(ranks: int) -> Any:
    """A group of single-threaded ranks."""
    return WorkerGroup(ResourcePool([ranks], use_gpu=False), DataWorker, runtime="ray", threads_per_rank=1)


def payloads_of(mib: int, ranks: int) -> dict[str, tuple[DataProto, Callable[[], list[load.Columns]]]]:
    """Each kind of rows, and how the raw call cuts the same bytes."""
    columns, text = load.dense(mib), load.strings()
    arrays = {key: column.numpy() for key, column in columns.items()}
    tokens = mib * load.MIB // load.TOKEN_BYTES
    lengths = load.ragged_lengths(tokens, load.ROWS)
    values = load.columns(tokens)
    ragged = {key: jagged_from_rows(column.split(lengths)) for key, column in values.items()}
    offsets, packed = np.concatenate([[0], np.cumsum(lengths)]), {key: column.numpy() for key, column in values.items()}
    return {
        "dense": (DataProto(columns), lambda: load.cut_rows(arrays, ranks)),
        "jagged": (DataProto(ragged), lambda: load.cut_ragged(packed, offsets, ranks)),
        "strings": (DataProto(columns, text), lambda: load.cut_rows({**arrays, **text}, ranks)),
    }


def call_figures(group: Any, bare: list[Any], mib: int, *, quick: bool) -> dict[str, float]:
    """Echo and send of every kind of payload of this size."""
    ranks, found = len(bare), {}
    suffix = f"{mib}mb_x{ranks}"
    for kind, (data, cut) in payloads_of(mib, ranks).items():
        cases = {name: _bound(getattr(group, name), data) for name in ("echo", "send")}
        times = load.timed_in_turns({**load.raw_cases(bare, cut), **cases}, load.repeats_of(mib, quick))
        found |= load.echo_figures(times, kind, suffix)
        found |= load.memory_figures({"echo": cases["echo"]}, kind, mib, suffix)
        kept = _bound(lambda rows: group.keep(group.keep(rows)), data)
        found |= load.memory_figures({"reference_echo": kept}, kind, mib, suffix)
    return found


def _bound(call: Callable[[DataProto], Any], data: DataProto) -> Case:
    return lambda: call(data)


def chain_figures(mib: int, *, quick: bool) -> dict[str, float]:
    """produce -> transform -> consume over four ranks, by reference, beside the same chain of Ray's own references."""
    tokens = mib * load.MIB // load.TOKEN_BYTES // CHAIN_RANKS
    plan = DataProto({"tokens": torch.full((CHAIN_RANKS,), tokens)})
    bare = bare_actors(load.BareData, CHAIN_RANKS)
    with group_of(CHAIN_RANKS) as group:

        def chain() -> None:
            counts = group.consume(group.transform(group.produce(plan)))
            assert counts == [tokens] * CHAIN_RANKS, counts

        def raw_chain() -> None:
            made = [actor.produce.remote(tokens) for actor in bare]
            made = [actor.transform.remote(part) for actor, part in zip(bare, made, strict=True)]
            ray.get([actor.consume.remote(part) for actor, part in zip(bare, made, strict=True)])

        times = load.timed_in_turns({"raw": raw_chain, "podium": chain}, load.repeats_of(mib, quick))
        before = bytes_stored()
        growth = load.peak_growth(chain)
        stored = bytes_stored() - before
    end(bare)
    return {
        f"chain_raw_ms_{mib}mb_x{CHAIN_RANKS}": 1e3 * median(times["raw"]),
        f"chain_ratio_{mib}mb_x{CHAIN_RANKS}": ratio(times["podium"], times["raw"]),
        f"chain_anon_{mib}mb_x{CHAIN_RANKS}": growth["RssAnon"] / mib,
        f"chain_shared_{mib}mb_x{CHAIN_RANKS}": growth["RssShmem"] / mib,
        f"chain_stored_per_hop_{mib}mb_x{CHAIN_RANKS}": stored / load.MIB / mib / 2,
    }


def bytes_stored() -> int:
    """All bytes that were ever put into the object store of this machine: a payload that moves once adds itself once."""
    node = ray.nodes()[0]
    return int(node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats.cumulative_created_bytes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("calls", "chain"))
    parser.add_argument("--sizes", default="1,16,128,512")
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sizes, chain_sizes = list(map(int, arguments.sizes.split(","))), [64 if arguments.quick else 256]
    sizes = [] if arguments.only == "chain" else load.sizes_with_room(sizes)
    chain_sizes = [] if arguments.only == "calls" else load.sizes_with_room(chain_sizes)
    found: dict[str, float] = {}
    if sizes or chain_sizes:
        start_ray(load.store_bytes([*sizes, *chain_sizes]))
    for ranks in map(int, arguments.workers.split(",")) if sizes else ():
        bare = bare_actors(load.BareData, ranks)
        with group_of(ranks) as group:
            for mib in sizes:
                found |= call_figures(group, bare, mib, quick=arguments.quick)
                print(f"podium: {mib} MB over {ranks} workers measured", file=sys.stderr, flush=True)
        end(bare)
    for mib in chain_sizes:
        found |= chain_figures(mib, quick=arguments.quick)
    print(json.dumps({"peer": f"podium {podium.__version__}", **{name: round(value, 3) for name, value in found.items()}}))


if __name__ == "__main__":
    main()

"""Bare Ray's side of the benchmarks of calls, and the stopwatch: what the scripts of Podium and of verl share.

Imports Ray and the standard library only, so that it runs in either side's environment.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from statistics import median
from typing import Any

import ray

Case = Callable[[], object]
Clock = Callable[[Case, int], float]

BLOCK = 20
"""Calls of one case in a row. Short, so that the cases of a round see the machine in the same mood."""
SETTLE_S = 1.0
"""What killed actors get to end before the next start is timed."""


class Bare:
    """An actor that does nothing. Given modules, it imports them first."""

    def __init__(self, modules: Sequence[str] = ()) -> None:
        for module in modules:
            import_module(module)

    def empty(self) -> None:
        pass


class AsyncBare:
    """The same as an asyncio actor."""

    async def empty(self) -> None:
        pass


def start_ray(store_bytes: int | None = None) -> None:
    """A cluster of this process alone, with room for every actor; Ray starts no process before it is needed."""
    ray.init(
        address="local",
        object_store_memory=store_bytes,
        num_cpus=64,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config={"prestart_worker_first_driver": False},
    )


def bare_actors(cls: type, count: int, *args: object) -> list[Any]:
    """That many actors of the class, which may be starting still."""
    return [ray.remote(num_cpus=0)(cls).remote(*args) for _ in range(count)]


def bare_call(actors: Sequence[Any]) -> Case:
    """The call that everything is compared with."""
    return lambda: ray.get([actor.empty.remote() for actor in actors])


def end(actors: Sequence[Any]) -> None:
    """Kill the actors and wait a moment."""
    for actor in actors:
        ray.kill(actor)
    time.sleep(SETTLE_S)


def microseconds(case: Case, calls: int) -> float:
    """The median time of a call, of `calls` in a row."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        case()
        times.append(time.perf_counter() - begin)
    return median(times) * 1e6


def cpu_microseconds(case: Case, calls: int) -> float:
    """The mean CPU time of a call in this process, garbage collection included: what a call that never waits costs."""
    begin = time.process_time()
    for _ in range(calls):
        case()
    return (time.process_time() - begin) / calls * 1e6


def in_turns(cases: dict[str, Case], blocks: int, clock: Clock = microseconds) -> dict[str, list[float]]:
    """For each case, the cost of a call in each of `blocks` short blocks; every case has its turn before the next block."""
    for case in cases.values():
        clock(case, BLOCK)  # actors are still starting, caches are cold
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(blocks):
        for name, case in cases.items():
            found[name].append(clock(case, BLOCK))
    return found


def ratio(times: Sequence[float], floor: Sequence[float]) -> float:
    """The median of the block by block ratios: neighbours in time are compared with each other."""
    return median(time / below for time, below in zip(times, floor, strict=True))


def loaded_modules(package: str) -> list[str]:
    """The package's modules that this process has imported."""
    return sorted(name for name in sys.modules if name == package or name.startswith(f"{package}."))


def start_times(
    start_group: Callable[[], tuple[Case, Case]], modules: Sequence[str], ranks: int, rounds: int
) -> dict[str, float]:
    """Seconds from nothing to the first answer, of the group and of bare actors that import `modules`, in turns.

    `start_group` returns the group's empty call and what ends the group.
    """
    found: dict[str, list[float]] = {"start_s": [], "bare_start_s": []}
    for _ in range(rounds):
        begin = time.perf_counter()
        actors = bare_actors(Bare, ranks, modules)
        bare_call(actors)()
        found["bare_start_s"].append(time.perf_counter() - begin)
        end(actors)
        begin = time.perf_counter()
        call, close = start_group()
        call()
        found["start_s"].append(time.perf_counter() - begin)
        close()
        time.sleep(SETTLE_S)
    times = {name: median(seconds) for name, seconds in found.items()}
    return {**times, "start_ratio": ratio(found["start_s"], found["bare_start_s"])}

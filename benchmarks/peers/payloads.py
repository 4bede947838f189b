"""The payloads of the data benchmark, what is known of memory, and bare Ray's side of it.

Imports Ray, torch, numpy and the standard library only, so that it runs in either side's environment.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from ray_calls import Case, ratio

MIB = 1 << 20
ROWS = 256
TOKEN_BYTES = 32
"""Of the five columns together."""
MEASURED_MIB = 16
"""From this size on, the driver's memory is measured: below it, what the allocator keeps is more than the payload."""
RAW_SEND, RAW_COPY_SEND, RAW_ECHO, RAW_COPY_ECHO = "raw_send", "raw_copy_send", "raw_echo", "raw_copy_echo"

Columns = dict[str, Any]


def columns(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The five columns of a step, [tokens] each."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 150_000, (tokens,), generator=generator),
        "attention_mask": torch.ones(tokens, dtype=torch.int64),
        "position_ids": torch.arange(tokens),
        "old_log_probs": torch.randn(tokens, generator=generator),
        "advantages": torch.randn(tokens, generator=generator),
    }


def dense(mib: int) -> dict[str, torch.Tensor]:
    """256 rows of equal length, `mib` in all."""
    return {key: column.reshape(ROWS, -1) for key, column in columns(mib * MIB // TOKEN_BYTES).items()}


def ragged_lengths(tokens: int, rows: int) -> list[int]:
    """Lengths from half the mean to one and a half, `tokens` in all."""
    lengths = torch.randint(tokens // rows // 2, tokens // rows * 3 // 2, (rows,), generator=torch.Generator().manual_seed(0))
    surplus = int(lengths.sum()) - tokens
    share, left = divmod(abs(surplus), rows)
    lengths -= (share + (torch.arange(rows) < left).long()) * (1 if surplus > 0 else -1)
    return lengths.tolist()  # type: ignore[no-any-return]


def strings() -> dict[str, Any]:
    """Two columns of 256 strings: prompts of 500 letters or so, and ids."""
    prompts = [f"prompt {row} " * 50 for row in range(ROWS)]
    return {"raw_prompt": np.array(prompts, dtype=object), "uid": np.array([f"{row:032x}" for row in range(ROWS)], dtype=object)}


# -- bare Ray ---------------------------------------------------------------------------------------------------------


class BareData:
    """An actor that is given numpy dicts: read-only views of the store's memory."""

    def send(self, data: Columns) -> None:
        pass

    def copy_send(self, data: Columns) -> None:
        copied(data)

    def echo(self, data: Columns) -> Columns:
        return data

    def copy_echo(self, data: Columns) -> Columns:
        return copied(data)

    def produce(self, tokens: int) -> Columns:
        return produced(tokens)

    def transform(self, data: Columns) -> Columns:
        return transformed(copied(data))

    def consume(self, data: Columns) -> int:
        return len(copied(data)["input_ids"])


def copied(data: Columns) -> Columns:
    """What the one copy in the worker is."""
    return {key: column.copy() for key, column in data.items()}


def produced(tokens: int) -> Columns:
    """One rank's part of a chain's rows: numpy columns [rows, tokens of a row]."""
    kinds = (np.int64, np.int64, np.int64, np.float32, np.float32)
    return {key: np.full((1, tokens), number, kind) for number, (key, kind) in enumerate(zip(columns(0), kinds, strict=True))}


def transformed(data: Columns) -> Columns:
    """Other values in as many bytes."""
    for column in data.values():
        column += 1
    return data


def cut_rows(data: Columns, ranks: int) -> list[Columns]:
    """Views of consecutive rows of dense numpy columns."""
    return [
        {key: column[part * len(column) // ranks : (part + 1) * len(column) // ranks] for key, column in data.items()}
        for part in range(ranks)
    ]


def cut_ragged(values: Columns, offsets: Any, ranks: int) -> list[Columns]:
    """The same of ragged ones: views of the values, and each part's offsets."""
    parts = []
    for part in range(ranks):
        own = offsets[part * ROWS // ranks : (part + 1) * ROWS // ranks + 1]
        parts.append({key: column[own[0] : own[-1]] for key, column in values.items()} | {"offsets": own - own[0]})
    return parts


def joined(parts: Sequence[Columns]) -> Columns:
    """One batch of the parts, which is what a group call returns."""
    whole = {key: np.concatenate([part[key] for part in parts]) for key in parts[0] if key != "offsets"}
    if "offsets" in parts[0]:
        lengths = np.concatenate([np.diff(part["offsets"]) for part in parts])
        whole["offsets"] = np.concatenate([[0], np.cumsum(lengths)])
    return whole


def raw_cases(actors: Sequence[Any], cut: Callable[[], list[Columns]]) -> dict[str, Case]:
    """The calls that the others are compared with: cut in the driver, sent, and of an echo joined again."""

    def call(name: str) -> list[Any]:
        parts = zip(actors, cut(), strict=True)
        return ray.get([getattr(actor, name).remote(part) for actor, part in parts])  # type: ignore[no-any-return]

    return {
        RAW_SEND: lambda: call("send"),
        RAW_COPY_SEND: lambda: call("copy_send"),
        RAW_ECHO: lambda: joined(call("echo")),
        RAW_COPY_ECHO: lambda: joined(call("copy_echo")),
    }


# -- time and memory --------------------------------------------------------------------------------------------------


def timed_in_turns(cases: dict[str, Case], repeats: int) -> dict[str, list[float]]:
    """Seconds of each case, one call at a time in turns, after one call of each that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(repeats + 1):
        for name, case in cases.items():
            begin = time.perf_counter()
            case()
            if turn:
                found[name].append(time.perf_counter() - begin)
    return found


def repeats_of(mib: int, quick: bool) -> int:
    """How many turns payloads of this size get."""
    return max(5, min(20, 600 // mib)) // (2 if quick else 1)


def echo_figures(times: dict[str, list[float]], kind: str, suffix: str) -> dict[str, float]:
    """Ratios to the raw call that copies as often, and of the raw calls to each other."""
    found = {f"{kind}_{RAW_COPY_ECHO}_ms_{suffix}": 1e3 * median(times[RAW_COPY_ECHO])}
    for way in ("echo", "send"):
        found[f"{kind}_raw_{way}_of_raw_copy_{suffix}"] = ratio(times[f"raw_{way}"], times[f"raw_copy_{way}"])
    for name, seconds in times.items():
        if not name.startswith("raw"):
            way = "echo" if name.endswith("echo") else "send"
            found[f"{kind}_{name}_ratio_{suffix}"] = ratio(seconds, times[f"raw_copy_{way}"])
    return found


SAMPLER = r"""
import json, select, sys
def anonymous():
    return {line.split(":")[0]: int(line.split()[1]) for line in open(f"/proc/{sys.argv[1]}/status") if line.startswith("Rss")}
start = anonymous()
peak = dict(start)
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0.003)[0]:
    peak = {name: max(kib, peak[name]) for name, kib in anonymous().items()}
print(json.dumps({name: peak[name] - start[name] for name in peak}))
"""


def peak_growth(case: Case) -> dict[str, float]:
    """By how many MiB this process grew at most in the call, by kind: RssAnon is its own memory, RssShmem the store's.

    Another process looks every 3 ms, at Linux's /proc.
    """
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # what glibc keeps would hide what the call takes
    command = [sys.executable, "-S", "-c", SAMPLER, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sampler:
        assert sampler.stdin is not None
        assert sampler.stdout is not None
        sampler.stdout.readline()
        case()
        sampler.stdin.close()
        return {name: kib / 1024 for name, kib in json.loads(sampler.stdout.read()).items()}


def memory_figures(cases: dict[str, Case], kind: str, mib: int, suffix: str) -> dict[str, float]:
    """The driver's own memory in one call of each case, at most, in payloads."""
    if mib < MEASURED_MIB:
        return {}
    return {f"{kind}_{name}_anon_{suffix}": peak_growth(case)["RssAnon"] / mib for name, case in cases.items()}


STORE_PAYLOADS, ALL_PAYLOADS = 4, 10


def store_bytes(sizes: Sequence[int]) -> int:
    """What the object store needs: what is sent, what is returned, and as much again that is not freed yet."""
    return STORE_PAYLOADS * max(sizes) * MIB + 256 * MIB


def sizes_with_room(sizes: Sequence[int]) -> list[int]:
    """The sizes in MiB that this machine has the memory for; says which are skipped and why."""
    free = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in Path("/proc/meminfo").read_text().splitlines()}
    available, shared = free["MemAvailable"], shutil.disk_usage("/dev/shm").free / MIB
    fitting = []
    for mib in sizes:
        store, total = store_bytes([mib]) / MIB, ALL_PAYLOADS * mib + 1024
        if store <= shared and total <= available:
            fitting.append(mib)
            continue
        needs = f"{store:.0f} MiB in /dev/shm (free: {shared:.0f}) and {total:.0f} MiB of memory (available: {available:.0f})"
        print(f"{mib} MB is skipped: it needs {needs}", file=sys.stderr, flush=True)
    return fitting

"""Row operations of Podium's DataProto beside the same done with torch alone, one JSON line out.

    python podium_ops.py [--size 128] [--repeats 7]

The floor of an operation is the fastest of the ways that are written here, by hand, for columns that are known to be all
dense or all jagged with the same offsets: no names are checked and no meta is kept. Of jagged columns the work on the offsets
counts, once for all columns, as does an index of the values where a way needs one, and the making of torch's nested tensors.
Needs Podium; no Ray.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import payloads as load
import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

import podium
from podium.protocol import DataProto, jagged_from_rows

PARTS = 4
SHORT_ROW = 64
"""Tokens of a short row, on average; long ones are a 256th of the payload."""

Columns = dict[str, Tensor]
Case = Callable[[], object]


@dataclass
class Operation:
    """One operation, and the ways to do it with torch alone."""

    podium: Case
    floors: list[Case]


def nested(values: Columns, offsets: Tensor) -> Columns:
    """What jagged columns are in torch, made as cheaply as can be: its public constructor takes longer."""
    return {key: NestedTensor(column, offsets) for key, column in values.items()}


def offsets_of(lengths: Tensor) -> Tensor:
    """[B] to [B + 1]."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def dense_operations(mib: int) -> dict[str, Operation]:
    """256 rows of equal length."""
    columns = load.dense(mib)
    data, order = DataProto(columns), torch.randperm(load.ROWS)
    half, parts = order[: load.ROWS // 2], DataProto(columns).chunk(PARTS)
    torn = [part.batch for part in parts]
    twice, tiled = torch.arange(load.ROWS).repeat_interleave(2), torch.arange(load.ROWS).repeat(2)

    def each(change: Callable[[Tensor], object]) -> Case:
        return lambda: {key: change(column) for key, column in columns.items()}

    return {
        "partition": Operation(lambda: data.partition(PARTS), [each(lambda column: column.chunk(PARTS))]),
        "concat": Operation(
            lambda: DataProto.concat(parts), [lambda: {key: torch.cat([p[key] for p in torn]) for key in columns}]
        ),
        "half": Operation(lambda: data.select_idxs(half), [each(lambda column: column.index_select(0, half))]),
        "random": Operation(lambda: data.select_idxs(order), [each(lambda column: column.index_select(0, order))]),
        "reorder": Operation(lambda: data.select().reorder(order), [each(lambda column: column.index_select(0, order))]),
        "repeat_interleaved": Operation(
            lambda: data.repeat(2),
            [
                each(lambda column: column.repeat_interleave(2, 0)),
                each(lambda column: column.index_select(0, twice)),
                each(lambda column: column.unsqueeze(1).expand(-1, 2, -1).reshape(2 * load.ROWS, -1)),
            ],
        ),
        "repeat_tiled": Operation(
            lambda: data.repeat(2, interleave=False),
            [
                each(lambda column: column.repeat(2, 1)),
                each(lambda column: column.index_select(0, tiled)),
                each(lambda column: torch.cat([column, column])),
            ],
        ),
    }


def jagged_operations(mib: int, rows: int) -> dict[str, Operation]:
    """Rows of half the mean length to one and a half."""
    tokens = mib * load.MIB // load.TOKEN_BYTES
    lengths = load.ragged_lengths(tokens, rows)
    values, offsets = load.columns(tokens), offsets_of(torch.tensor(lengths))
    data = DataProto({key: jagged_from_rows(column.split(lengths)) for key, column in values.items()})
    bounds, parts = [part * rows // PARTS for part in range(PARTS + 1)], data.partition(PARTS)
    torn = [{key: part.batch[key].values() for key in values} for part in parts]
    torn_offsets = [next(iter(part.batch.values())).offsets() for part in parts]
    order, every = torch.randperm(rows), torch.arange(rows)

    def cut() -> object:
        sizes = [stop - start for start, stop in pairwise(offsets[torch.tensor(bounds)].tolist())]
        own = [offsets[start : stop + 1] - offsets[start] for start, stop in pairwise(bounds)]
        cuts = {key: column.split_with_sizes(sizes) for key, column in values.items()}
        return [nested({key: cut[part] for key, cut in cuts.items()}, own[part]) for part in range(PARTS)]

    def join() -> object:
        joined = {key: torch.cat([part[key] for part in torn]) for key in values}
        return nested(joined, offsets_of(torch.cat([own.diff() for own in torn_offsets])))

    def moves(chosen: Tensor) -> list[Case]:
        return [lambda: by_index(values, offsets, chosen), *([lambda: by_slices(values, offsets, chosen)] if rows < 4096 else [])]

    def tile() -> object:
        return nested({key: column.repeat(2) for key, column in values.items()}, offsets_of(offsets.diff().repeat(2)))

    return {
        "partition": Operation(lambda: data.partition(PARTS), [cut]),
        "concat": Operation(lambda: DataProto.concat(parts), [join]),
        "half": Operation(lambda: data.select_idxs(order[: rows // 2]), moves(order[: rows // 2])),
        "random": Operation(lambda: data.select_idxs(order), moves(order)),
        "reorder": Operation(lambda: data.select().reorder(order), moves(order)),
        "repeat_interleaved": Operation(lambda: data.repeat(2), moves(every.repeat_interleave(2))),
        "repeat_tiled": Operation(lambda: data.repeat(2, interleave=False), [tile, *moves(every.repeat(2))]),
    }


def by_index(values: Columns, offsets: Tensor, rows: Tensor) -> object:
    """The chosen rows by the number of each value."""
    lengths = offsets.diff()[rows]
    chosen = offsets_of(lengths)
    index = torch.repeat_interleave(offsets[rows] - chosen[:-1], lengths)
    index += torch.arange(len(index))
    return nested({key: column.index_select(0, index) for key, column in values.items()}, chosen)


def by_slices(values: Columns, offsets: Tensor, rows: Tensor) -> object:
    """The chosen rows as slices that are put end to end."""
    first, last = offsets[rows].tolist(), offsets[rows + 1].tolist()
    joined = {key: torch.cat([column[a:b] for a, b in zip(first, last, strict=True)]) for key, column in values.items()}
    return nested(joined, offsets_of(offsets.diff()[rows]))


def figures(kind: str, operations: dict[str, Operation], repeats: int) -> dict[str, float]:
    """Each operation's ratio to its floor, and how many microseconds it is above."""
    found = {}
    for name, operation in operations.items():
        cases = {"podium": operation.podium, **{str(number): floor for number, floor in enumerate(operation.floors)}}
        calls = 50 if name == "partition" else 1
        many = {key: _repeated(case, calls) for key, case in cases.items()}
        times = {key: median(seconds) / calls for key, seconds in load.timed_in_turns(many, repeats).items()}
        floor = min(seconds for key, seconds in times.items() if key != "podium")
        found[f"{kind}_{name}_floor_ms"] = 1e3 * floor
        found[f"{kind}_{name}_ratio"] = times["podium"] / floor
        found[f"{kind}_{name}_above_us"] = 1e6 * (times["podium"] - floor)
    return found


def _repeated(case: Case, calls: int) -> Case:
    def many() -> None:
        for _ in range(calls):
            case()

    return many


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128, help="MB")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, float] = {}
    if load.sizes_with_room([arguments.size]):
        short = arguments.size * load.MIB // load.TOKEN_BYTES // SHORT_ROW
        found |= figures("ops_dense", dense_operations(arguments.size), arguments.repeats)
        found |= figures("ops_long", jagged_operations(arguments.size, load.ROWS), arguments.repeats)
        found |= figures("ops_short", jagged_operations(arguments.size, short), arguments.repeats)
    print("podium: operations measured", file=sys.stderr, flush=True)
    print(json.dumps({"peer": f"podium {podium.__version__}", **{name: round(value, 3) for name, value in found.items()}}))


if __name__ == "__main__":
    main()

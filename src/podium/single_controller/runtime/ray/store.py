"""Rows that lie in Ray's object store: how a rank leaves them there, how they are named in a message, how they are read.

A rank returns two objects, a header and a block, which belong to the driver and so outlive the rank. A reader on the block's node
maps it and copies the rows that it needs; one on another node has them cut out there first, unless it needs all.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from podium.errors import DataError, GroupClosedError
from podium.protocol.blocks import Block, Header, Read, is_run, private_copy, selected
from podium.protocol.remote_rows import RemoteRows
from podium.single_controller.runtime.payload import Envelope
from podium.single_controller.runtime.ray.cluster import here, session
from podium.single_controller.runtime.replies import decode_columns, encode_columns

SMALL_BYTES = 64 * 1024
"""To start a task on another node, which cuts rows out, costs more than to fetch a block of this size; and below 100 KiB Ray
keeps a call's result in the process of its caller."""
READ_TIMEOUT_S = 600.0
"""How long rows may take to arrive: no network of a cluster needs so long for what fits into a node's store."""

_is_beside_loop = False


def read_beside_loop() -> None:
    """From here on this process, which runs an event loop, reads by futures: there Ray warns of every `ray.get`, also in threads
    where it blocks no loop."""
    global _is_beside_loop
    _is_beside_loop = True


@dataclass(frozen=True)
class RayBlock:
    """Columns that a rank returned."""

    ref: Any
    node_id: str
    num_rows: int
    num_columns: int
    is_small: bool
    """Whether it is fetched whole wherever it is: Ray keeps small objects with their owner."""
    session: str
    """The connection to the cluster by which this process knows the reference."""

    def check_session(self) -> None:
        """GroupClosedError where that has ended: what Ray says of a reference of another session comes late, or never."""
        if not ray.is_initialized() or session() != self.session:
            raise GroupClosedError("the rows were in a Ray session that was shut down: read them before, or make them anew")

    def begin(self, keys: Sequence[str], rows: Tensor) -> Read:
        self.check_session()
        if self.is_small or self.node_id == here() or (len(rows) == self.num_rows and len(keys) == self.num_columns):
            return lambda: selected(decode_columns(self._await(self.ref), keys), keys, rows)
        there = NodeAffinitySchedulingStrategy(self.node_id, soft=True)
        part = _select_on_its_node.options(scheduling_strategy=there).remote(self.ref, list(keys), rows)
        if is_run(rows):
            return lambda: decode_columns(self._await(part), keys)
        return lambda: private_copy(decode_columns(self._await(part), keys))

    def _await(self, ref: Any) -> Any:
        try:
            return ref.future().result(READ_TIMEOUT_S) if _is_beside_loop else ray.get(ref, timeout=READ_TIMEOUT_S)
        except (GetTimeoutError, FutureTimeoutError):
            raise DataError(f"rows that lie on node {self.node_id} did not arrive within {READ_TIMEOUT_S:g} s") from None
        except RayError as error:
            raise DataError(f"rows that lay on node {self.node_id} are lost, make them anew: {error}") from error


def block_of(header: Header, ref: Any, node_id: str, session: str) -> RayBlock:
    """The block that belongs to a header, on the node of the rank that sent it."""
    return RayBlock(ref, node_id, header.num_rows, len(header.column_types), header.block_bytes <= SMALL_BYTES, session)


@dataclass(frozen=True)
class RemoteArgument:
    """Rows on their way. Their blocks have numbers for references, which travel beside the message, where Ray sees them."""

    rows: RemoteRows


def encode_argument(argument: Any, refs: list[Any]) -> Any:
    """The argument as it goes into a message; the references that it needs are appended to `refs`."""
    if not isinstance(argument, RemoteRows):
        return argument
    rows = argument.narrowed()
    if not any(isinstance(block, RayBlock) for block in rows.blocks):
        return rows.fetched()

    def named(block: Block) -> Block:
        if not isinstance(block, RayBlock):
            return block
        block.check_session()
        if block.ref not in refs:
            refs.append(block.ref)
        return replace(block, ref=refs.index(block.ref), session="")

    return RemoteArgument(rows.with_blocks(named))


def fetch_argument(argument: Any, refs: Sequence[Any]) -> Any:
    """The inverse, in a rank: private copies of the rows."""
    if not isinstance(argument, RemoteArgument):
        return argument
    mine = session()

    def found(block: Block) -> Block:
        return replace(block, ref=refs[block.ref], session=mine) if isinstance(block, RayBlock) else block

    return argument.rows.with_blocks(found).fetched()


@ray.remote(num_cpus=0)
def _select_on_its_node(block: Envelope, keys: list[str], rows: Tensor) -> Envelope | None:
    return encode_columns(selected(decode_columns(block, keys), keys, rows))

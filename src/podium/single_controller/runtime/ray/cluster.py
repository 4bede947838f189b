"""The Ray cluster: joining it, and what its nodes have."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, cast

import psutil  # Ray brings it along, and `import ray` makes it importable
import ray
from ray._private.worker import global_worker
from ray.util.placement_group import PlacementGroup, placement_group_table

from podium.cores import core_limit
from podium.errors import ResourceError
from podium.single_controller.placement.plan import Node, sort_by_node_ip
from podium.single_controller.runtime.base import START_TIMEOUT_S

LOCAL_CPUS = 64
"""Ranks that may live at once in a cluster that we start. Ray's CPUs are only counted, so this costs nothing."""
LEFT_PROCESS_GRACE_S = 1.0
"""How long Ray's processes may take to end after the shutdown of their cluster, before they are killed."""
PLACEMENT_TIMEOUT_S = START_TIMEOUT_S
"""For what is asked of the cluster where no group is started."""

log = logging.getLogger("podium.single_controller")

Resources: TypeAlias = dict[str, float]


def connect(world_size: int) -> None:
    """Join the cluster that RAY_ADDRESS names (`ray job submit` sets it) or start our own, unless the driver has joined one.

    The CPUs of our own are how many ranks may live at once. The cores that they share, by which torch threads are counted,
    are those of the affinity mask or of the cgroup's quota; the log says which. ResourceError where RAY_ADDRESS names no cluster.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if address in ("", "local"):
        _start(world_size)
    else:
        _join(address)


def _join(address: str) -> None:
    try:
        with _sigterm_handler_kept():
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"RAY_ADDRESS is {address!r}, but no Ray cluster can be joined there: {error}. Correct it, or unset it to start one "
            "on this machine"
        ) from error
    where, cpus = ray.get_runtime_context().gcs_address, cast(Any, ray).cluster_resources().get("CPU", 0)
    log.info("joined the Ray cluster at %s, which has %g CPUs: RAY_ADDRESS is %r", where, cpus, address)


def _start(world_size: int) -> None:
    cores, source = core_limit()
    num_cpus = max(LOCAL_CPUS, cores, world_size)
    log.info("starting Ray with %d CPUs, which it only counts: one for each rank. %s allows %d cores", num_cpus, source, cores)
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys() and not _can_keep_token():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)  # for this process and its own; Ray fails where it cannot keep one
    atexit.unregister(_end_cluster)
    atexit.register(_end_cluster)  # before ray.init, which a signal may interrupt when Ray's processes have started already
    try:
        with _sigterm_handler_kept():
            ray.init(
                address="local",  # a bare init would join whatever cluster another job runs on this machine
                include_dashboard=False,
                num_cpus=num_cpus,
                logging_level=logging.ERROR,
                log_to_driver=True,  # what workers print is for whoever runs the driver
                _system_config={"prestart_worker_first_driver": False},  # else Ray starts an idle process for each logical CPU
            )
    except OSError as error:
        raise ResourceError(
            f"Ray cannot be started on this machine: {error}. Ray writes into the folder of RAY_TMPDIR, or TMPDIR, or /tmp: set "
            "RAY_TMPDIR to a folder that can be written, has room, and has a path of at most 40 characters"
        ) from error


def _end_cluster() -> None:
    """Shut down the cluster that this process started, and end those of its processes that Ray leaves behind.

    Ray ends the raylet, and kills one that does not end within a second. Its agents then notice that only after 2 s, and try for
    60 s more to tell the cluster's GCS, which has ended too.
    """
    processes = _rays_processes()
    ray.shutdown(_exiting_interpreter=True)  # as Ray's own hook does, which has nothing left to do then
    for left in psutil.wait_procs(processes, timeout=LEFT_PROCESS_GRACE_S)[1]:
        with suppress(psutil.NoSuchProcess):
            left.kill()


def _rays_processes() -> list[psutil.Process]:
    """The raylet that this process started, and what that started: agents and workers."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                found += [child, *child.children(recursive=True)]
    return found


def _can_keep_token() -> bool:
    """Whether Ray can write `~/.ray/auth_token`, as it does by default; a container's home may be read-only or not there."""
    try:
        folder = Path.home() / ".ray"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: this user does not have a home
        return False
    return os.access(folder, os.W_OK)


@contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Put the driver's own handler of SIGTERM back, if it has one: Ray replaces it by one that dumps stacks and exits."""
    before = signal.getsignal(signal.SIGTERM)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    try:
        yield
    except SystemExit:  # by Ray's handler, which has ended what Ray had started
        before(signal.SIGTERM, None)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def session() -> str:
    """Names the connection to this cluster: after a shutdown and another `ray.init` it is another."""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()}/{context.get_job_id()}"


def connection() -> object | None:
    """What stands for this process's connection: a new object after every `ray.init`, None without one.

    Every call asks, so it has to cost less than `session`; and it must not ask Ray for a context, which would start, or join,
    whatever cluster it finds. The attribute is Ray's own, touched here only.
    """
    node: object | None = global_worker.node
    return node or (session() if ray.is_initialized() else None)  # with Ray Client there is no node


def is_own() -> bool:
    """Whether this process started the cluster, whose one node then has this process's environment."""
    return bool(getattr(global_worker.node, "head", False))


def nodes() -> list[Node]:
    """The nodes and what they have in all, every one as if nothing were held of it."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"], node["Resources"], node["Alive"])
        for node in cast(Any, ray).nodes()
    ]


def nodes_now(besides: Collection[PlacementGroup] = ()) -> list[Node]:
    """The nodes with what is free of them now, and who holds what, as if these placement groups were not there."""
    ours = {group.id.hex() for group in besides}
    placed = [entry for entry in cast(Any, placement_group_table)().values() if entry["bundles_to_node_id"] and _is_held(entry)]
    free = _free_by_node()
    return [
        Node(
            node_id=node.node_id,
            address=node.address,
            resources_total=node.resources_total,
            resources_free=_plus(
                free.get(node.node_id, node.resources_total),
                [part for entry in placed if entry["placement_group_id"] in ours for part in _parts_on(node.node_id, entry)],
            ),
            alive=node.alive,
            held_by=_holders(node.node_id, [entry for entry in placed if entry["placement_group_id"] not in ours]),
        )
        for node in nodes()
    ]


def sort_groups(groups: Sequence[PlacementGroup]) -> list[PlacementGroup]:
    """The groups by the address of the node that their first bundle is on."""
    address = {node.node_id: node.address for node in nodes()}
    where = {group: node_ids(group)[0] for group in groups}
    return sort_by_node_ip(groups, lambda group: address[where[group]])


def node_ids(group: PlacementGroup) -> dict[int, str]:
    """The node of each bundle of a group that has its place."""
    return cast(dict[int, str], cast(Any, placement_group_table)(group)["bundles_to_node_id"])


def state_of(group: PlacementGroup) -> str:
    """CREATED once the group has its place, PENDING or RESCHEDULING while it waits, REMOVED."""
    return str(cast(Any, placement_group_table)(group).get("state", "REMOVED"))


def is_unused(group: PlacementGroup) -> bool:
    """Whether no actor or task is in the group, as far as its nodes have reported by now."""
    bundles = cast(Any, placement_group_table)(group).get("bundles", {})
    # Ray gives each bundle 1,000 units of a mark by which it finds the group; what runs there holds a bit of it.
    free: float = sum(resources.get(f"bundle_group_{group.id.hex()}", 0) for resources in _free_by_node().values())
    return free >= 1000 * len(bundles)


def _is_held(entry: dict[str, Any]) -> bool:
    return bool(entry["state"] == "CREATED")


def _parts_on(node_id: str, entry: dict[str, Any]) -> list[Resources]:
    return [entry["bundles"][index] for index, where in entry["bundles_to_node_id"].items() if where == node_id]


def _holders(node_id: str, placed: Sequence[dict[str, Any]]) -> dict[str, Resources]:
    """By the name of the placement group, or its id, what it has of the node."""
    parts = {entry["name"] or entry["placement_group_id"]: _parts_on(node_id, entry) for entry in placed}
    return {name: _plus({}, held) for name, held in parts.items() if held}


def _plus(amounts: Mapping[str, float], parts: Sequence[Resources]) -> Resources:
    total = dict(amounts)
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0) + amount
    return total


def _free_by_node() -> dict[str, Resources]:
    try:
        from ray._private.state import available_resources_per_node  # no public function of Ray says what is free per node
    except ImportError:
        return {}
    return cast(dict[str, Resources], cast(Any, available_resources_per_node)())


def here() -> str | None:
    """This node; None where Ray is not started."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None

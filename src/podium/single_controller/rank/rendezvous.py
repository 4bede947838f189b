"""How the ranks of a group meet in torch.distributed: one store in the process of rank 0, and the variables that lead to it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without saying so

from podium.errors import ResourceError
from podium.single_controller.rank.context import RankContext
from podium.single_controller.rank.interfaces import socket_interfaces

LOOPBACK = "127.0.0.1"


def host_store(address: str, port_range: tuple[int, int] | None) -> tuple[TCPStore, int]:
    """The store in this process at which all ranks meet, and its port. ResourceError where no port of the range is free."""
    # We bind the socket and hand it over: no other process can take the port in between, and nothing else listens.
    listener = _listen(address, port_range)
    port: int = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()), port


def set_environment(context: RankContext, node_address: str, interfaces: Mapping[str, Sequence[str]]) -> None:
    """Set the variables of this rank. `interfaces` are the addresses of each network interface of the node."""
    os.environ.update(rank_environment(context))
    address = LOOPBACK if context.master_addr == LOOPBACK else node_address
    for name, value in socket_interfaces(address, interfaces).items():
        os.environ.setdefault(name, value)  # what the user has set stays


def rank_environment(context: RankContext) -> dict[str, str]:
    """The variables by which torch.distributed, and code ported from verl, find a rank's place."""
    return {
        "RANK": str(context.rank),
        "WORLD_SIZE": str(context.world_size),
        "LOCAL_RANK": str(context.local_rank),
        "LOCAL_WORLD_SIZE": str(context.local_world_size),
        "RAY_LOCAL_WORLD_SIZE": str(context.local_world_size),
        "MASTER_ADDR": str(context.master_addr),
        "MASTER_PORT": str(context.master_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 of init_process_group("gloo") then joins our store and opens none
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WG_BACKEND": context.runtime,
        "WG_PREFIX": context.group,
    }


def _listen(address: str, port_range: tuple[int, int] | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in (0,) if port_range is None else range(*port_range):
        try:
            return socket.create_server((address, port), family=family)
        except OSError as error:
            taken = error
    if port_range is None:
        raise ResourceError(f"the ranks cannot meet at {address}: {taken}; set master_addr to an address of rank 0's node")
    low, high = port_range
    raise ResourceError(f"no port of master_port_range [{low}, {high}) is free on {address}: {taken}; give a longer range")

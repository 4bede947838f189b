"""The network interfaces that the ranks of a group use to reach one another."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping, Sequence

log = logging.getLogger("podium.single_controller")


def socket_interfaces(address: str, addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The variables by which gloo and NCCL take the interface that carries this node's `address`; none where none carries it.

    `addresses` are those of each interface, as text. Without the variables gloo listens where the node's host name leads, on
    many systems 127.0.1.1, which no other node can reach; NCCL takes the first interface that it finds.
    """
    name = interface_of(address, addresses)
    if name is None:
        log.warning(
            "no network interface of this node has its address %s, but %s: gloo and NCCL choose one themselves. If the ranks "
            "cannot meet, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME",
            address,
            {name: list(own) for name, own in addresses.items()},
        )
        return {}
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}  # without "=" NCCL takes it as a prefix: eth1, eth10


def interface_of(address: str, addresses: Mapping[str, Sequence[str]]) -> str | None:
    """The interface that has an address; for any loopback address the one that has some of them.

    >>> interface_of("10.0.0.7", {"lo": ["127.0.0.1", "::1"], "eth0": ["fe80::1%eth0", "10.0.0.7"]})
    'eth0'
    >>> interface_of("127.0.1.1", {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.7"]})
    'lo'
    """
    wanted = _ip(address)
    if wanted is None:
        return None
    found = [(name, ip) for name, own in addresses.items() for ip in map(_ip, own) if ip is not None]
    exact = (name for name, ip in found if ip == wanted)
    loopback = (name for name, ip in found if wanted.is_loopback and ip.is_loopback)
    return next(exact, None) or next(loopback, None)


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address without its scope (fe80::1%eth0); None of what is not an IP address, such as a MAC address."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None

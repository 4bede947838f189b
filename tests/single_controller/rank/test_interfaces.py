"""The choice of the network interface for gloo and NCCL."""

from __future__ import annotations

import logging
import socket

import pytest

from podium.single_controller.rank.interfaces import interface_of, socket_interfaces
from podium.single_controller.worker import Worker

NODE = {
    "lo": ["127.0.0.1", "::1", "00:00:00:00:00:00"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.7", "10.0.0.8", "fe80::1%eth0", "02:fc:00:00:00:01"],
    "ib0": ["2001:db8::7"],
}


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.7", "eth0"),
        ("10.0.0.8", "eth0"),
        ("127.0.0.1", "lo"),
        ("127.0.1.1", "lo"),  # where Debian's host names lead
        ("::1", "lo"),
        ("2001:0db8:0::7", "ib0"),
        ("fe80::1%eth0", "eth0"),
        ("10.0.0.9", None),  # of the host around a container
        ("node-7", None),
    ],
)
def test_the_interface_that_carries_an_address(address: str, name: str | None):
    assert interface_of(address, NODE) == name


def test_nccl_is_given_the_exact_name_since_it_matches_prefixes():
    assert socket_interfaces("10.0.0.7", NODE) == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


def test_an_address_that_no_interface_carries_is_logged_and_left_to_gloo(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "podium.single_controller"):
        assert socket_interfaces("10.0.0.9", NODE) == {}
    assert "no network interface of this node has its address 10.0.0.9" in caplog.text


def test_this_machines_address_and_loopback_are_on_interfaces_that_exist():
    pytest.importorskip("ray")  # makes psutil importable
    import psutil

    addresses = {name: [entry.address for entry in entries] for name, entries in psutil.net_if_addrs().items()}
    names = {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.1", addresses) in names
    assert interface_of(Worker.get_available_master_addr_port()[0], addresses) in names

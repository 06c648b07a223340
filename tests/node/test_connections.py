"""What counts as a connection to another worker. Launches show the rest: `launch/test_apart`."""

from __future__ import annotations

import ipaddress
import os
import socket

import pytest

from dtrain.node import sockets
from dtrain.node.agent import connections
from dtrain.node.agent.connections import OPEN, Connections, elsewhere


@pytest.mark.parametrize(
    ("family", "listening", "dialed", "seen"),
    [
        (socket.AF_INET, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        (socket.AF_INET6, "::1", "::1", "::1"),
        (socket.AF_INET6, "::", "127.0.0.1", "127.0.0.1"),
    ],
    ids=["IPv4", "IPv6", "IPv4 in IPv6"],
)
def test_both_ends_of_a_connection_are_seen_and_no_listener(
    family: int, listening: str, dialed: str, seen: str
) -> None:
    with socket.socket(family) as server:
        server.bind((listening, 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.create_connection((dialed, port)) as one, server.accept()[0] as other:
            address = ipaddress.ip_address(seen).packed
            here = (address, port), (address, one.getsockname()[1])
            found = {
                (local, remote, state, inode)
                for local, remote, state, inode in connections.connections()
                if port in (local[1], remote[1])
            }
            inodes = [os.fstat(end.fileno()).st_ino for end in (other, one)]
            assert found == {(*here, OPEN, inodes[0]), (*here[::-1], OPEN, inodes[1])}


def test_a_kernel_that_does_not_tell_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SOCK_DIAG_BY_FAMILY", 4000)
    with pytest.raises(OSError, match="Invalid argument"):
        list(connections.connections())
    unknown = Connections([29500])
    unknown.look([os.getpid()])
    assert unknown.found is None
    assert unknown.watch(lambda: [os.getpid()]) is None


@pytest.mark.parametrize(
    ("address", "port", "counts"),
    [
        ("192.168.1.10", 443, True),
        ("100.64.0.9", 40000, True),
        ("8.8.8.8", 40000, True),
        ("8.8.8.8", 443, False),
        ("127.0.0.1", 40000, False),
        ("::1", 40000, False),
    ],
)
def test_only_web_servers_of_the_internet_are_no_worker(
    address: str, port: int, counts: bool
) -> None:
    assert elsewhere(ipaddress.ip_address(address).packed, port) is counts

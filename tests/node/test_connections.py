"""What counts as a connection to another worker. Launches show the rest: `launch/test_apart`."""

from __future__ import annotations

import ipaddress

import pytest

from dtrain.node.agent.connections import elsewhere, end_of


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (b"0100007F:733C", "127.0.0.1"),
        (b"0A01A8C0:733C", "192.168.1.10"),
        (b"0000000000000000FFFF00000A01A8C0:733C", "192.168.1.10"),
        (b"B80D0120000000000000000001000000:733C", "2001:db8::1"),
    ],
)
def test_an_end_is_read_as_the_kernel_writes_it(text: bytes, address: str) -> None:
    assert end_of(text) == (ipaddress.ip_address(address).packed, 29500)


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

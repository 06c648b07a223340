"""A worker gets the network interface through which its host reaches the first host."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from dtrain.launchplan.environment import NodeVariable
from dtrain.node.boot import file_of
from dtrain.node.programs import modules
from support.node import Node, written

SHOW = 'echo "${GLOO_SOCKET_IFNAME-none}"'


def route(target: str) -> dict[str, Any]:
    return written({"GLOO_SOCKET_IFNAME": NodeVariable(target, "interface", "default")})


NETWORK = """
set -e
ip link set lo up
ip link add left type veth peer name right
ip addr add 192.0.2.1/24 dev left
ip addr add 203.0.113.1/24 dev left
ip link add later type veth peer name last
ip addr add 198.18.0.1/32 dev later
ip addr add 192.0.2.1/32 dev later
ip addr add 2001:db8::1/64 dev left nodad
ip addr add fe80::1/64 dev left nodad
ip link set left up
ip link set right up
exec "$@"
"""
ONLY_A_ROUTER = """
set -e
ip link add left type veth peer name right
ip addr add fe80::1/64 dev left nodad
ip link set left up
ip link set right up
ip -6 route add 2001:db8::/64 via fe80::2 dev left
exec "$@"
"""
FIND = """
import sys
sys.path.insert(0, sys.argv[1])
from dtrain.node.interfaces import interface_to, owners
print(*(interface_to(target, owners()) for target in sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "target, name",
    [
        ("127.0.0.1", "lo"),
        ("localhost", "lo"),
        ("", "none"),
        ("no such host", "none"),
        ("host" * 30, "none"),  # longer than a label may be
        ("nul\0", "none"),
        ("255.255.255.255", "none"),  # a broadcast address cannot be connected to
    ],
)
def test_the_interface_is_found_or_the_variable_is_unset(
    host: Node, target: str, name: str
) -> None:
    job = host.start(host.shell(SHOW), node_variables=route(target))
    job.wait()
    assert job.text("worker-0.out") == f"{name}\n"


@pytest.mark.netns
@pytest.mark.parametrize(
    "network, names",
    [
        (
            NETWORK,
            {
                "192.0.2.2": "left",  # `later` has the address of its route, too
                "192.0.2.1": "left",
                "203.0.113.2": "left",  # the second address of the interface
                "2001:db8::2": "left",
                "::1": "lo",
                "fe80::2%left": "left",
                "198.51.100.1": "None",
            },
        ),
        (ONLY_A_ROUTER, {"2001:db8::2": "left"}),
    ],
    ids=["global addresses", "only a router"],
)
def test_the_interface_is_the_one_on_the_route(
    python: str, tmp_path: Path, network: str, names: dict[str, str]
) -> None:
    """In its own network namespace, which has no route out."""
    for name, text in modules("agent").items():
        file = tmp_path / file_of(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    find = [python, "-c", FIND, str(tmp_path), *names]
    command = ["unshare", "--net", "bash", "-c", network, "sh", *find]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(names.values())


def test_the_request_and_setup_take_precedence(host: Node) -> None:
    job = host.start(
        host.shell(SHOW),
        host.shell(SHOW, 1, environment={"GLOO_SOCKET_IFNAME": "own"}),
        setup=["export GLOO_SOCKET_IFNAME=setup"],
        node_variables=route("127.0.0.1"),
    )
    job.wait()
    assert job.text("worker-0.out") == "setup\n"
    assert job.text("worker-1.out") == "own\n"

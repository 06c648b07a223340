"""Interfaces, addresses and ports of this host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct

from dtrain.node.agent.wire import RefusedError
from dtrain.node.files import read_file
from dtrain.node.host_name import encoded
from dtrain.node.listening import on_all_addresses
from dtrain.node.port_holder import UNKNOWN_HOLDER, port_holder, tcp_entries

SIOCGIFADDR = 0x8915


def interface_to(target: str) -> bytes | None:
    """The name of the network interface through which this host reaches ``target``, or None if the
    kernel has no route. Sends no packet."""
    try:
        found = socket.getaddrinfo(encoded(target), 9, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # unknown or not a valid name
        return None
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(address)
            own = socket.inet_pton(family, probe.getsockname()[0].partition("%")[0])
            for _, name in socket.if_nameindex():
                if own in addresses_of(probe, name):
                    return os.fsencode(name)
    return None


def addresses_of(sock: socket.socket, interface: str) -> list[bytes]:
    """The packed addresses of ``interface`` in the family of ``sock``: all IPv6 ones, or the first
    IPv4 address."""
    if sock.family == socket.AF_INET6:
        lines = (read_file("/proc/net/if_inet6") or b"").splitlines()
        fields = [line.split() for line in lines]
        return [
            bytes.fromhex(one[0].decode()) for one in fields if one[5] == os.fsencode(interface)
        ]
    try:
        asked = struct.pack("256s", os.fsencode(interface))
        return [fcntl.ioctl(sock, SIOCGIFADDR, asked)[20:24]]
    except OSError:  # no IPv4 address
        return []


def reserve_port(port: int) -> list[socket.socket]:
    """Bind ``port`` on all addresses, so that no other launch takes it before a worker listens.

    No other process can bind the port until `share_ports`. Raises RefusedError, which names the
    process that uses the port, or at least its user.
    """
    held: list[socket.socket] = []
    try:
        for sock, address in on_all_addresses():
            held.append(sock)
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue  # IPv6 is switched off
                if error.errno != errno.EADDRINUSE or not tcp_entries(port):
                    raise
                # Ignore closed connections (TIME_WAIT) of an earlier job, and only those.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address, port))
    except OSError as error:
        for sock in held:
            sock.close()
        reason = "port %d cannot be used: %s" % (port, error.strerror)
        hint = "stop it, or set `job.rendezvous.port` or `job.rendezvous.ports` to free ports"
        if error.errno == errno.EADDRINUSE:
            reason = "port %d is taken by %s" % (port, port_holder(port) or UNKNOWN_HOLDER)
        elif isinstance(error, PermissionError):
            reason = "only root can use port %d" % port
            hint = "set `job.rendezvous.port` to 1024 or above"
        raise RefusedError("port", reason, hint) from None
    return held


def share_ports(held: list[socket.socket]) -> None:
    """Let the workers listen on reserved ports. They stay bound, so that `reserve_port` fails for
    other launches even before a worker listens.

    Linux allows this if both sockets have SO_REUSEADDR, as servers usually do: libuv (torch)
    and gRPC (TensorFlow, JAX) set it.
    """
    for sock in held:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

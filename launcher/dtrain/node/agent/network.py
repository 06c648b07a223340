"""Interfaces, addresses and ports of this host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct

from dtrain.node.agent.folder import listed
from dtrain.node.agent.processes import read_file, user_name
from dtrain.node.agent.wire import RefusedError, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Collection

SIOCGIFADDR = 0x8915


def interface_to(target: str) -> bytes | None:
    """The name of the network interface by which this host reaches ``target``, where the kernel
    has chosen one. Sends nothing there."""
    try:
        found = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):  # unknown, or no name at all
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
    """Those of the socket's family: all IPv6 ones, the first IPv4 one."""
    if sock.family == socket.AF_INET6:
        lines = (read_file("/proc/net/if_inet6") or b"").splitlines()
        fields = [line.split() for line in lines]
        return [
            bytes.fromhex(one[0].decode()) for one in fields if one[5] == os.fsencode(interface)
        ]
    try:
        asked = struct.pack("256s", os.fsencode(interface))
        return [fcntl.ioctl(sock, SIOCGIFADDR, asked)[20:24]]
    except OSError:  # it has none
        return []


def reserve_port(port: int) -> list[socket.socket]:
    """Bind ``port`` on all addresses, so that no other launch chooses it before a worker listens.

    Nothing else can bind the port until `share_ports`. Raises RefusedError, which names the
    process or at least the user that has the port.
    """
    held: list[socket.socket] = []
    try:
        for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
            try:
                sock = socket.socket(family, socket.SOCK_STREAM)
            except OSError:
                continue  # no IPv6 here
            held.append(sock)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    continue  # IPv6 is switched off
                if error.errno != errno.EADDRINUSE or not entries_of(port):
                    raise
                # The closed connections of an earlier job are no obstacle; all else still is.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address, port))
    except OSError as error:
        for sock in held:
            sock.close()
        reason = "port %d cannot be used: %s" % (port, error.strerror)
        hint = "stop it, or set `job.rendezvous.port` or `job.rendezvous.ports` to free ports"
        if error.errno == errno.EADDRINUSE:
            reason = "port %d is taken by %s" % (port, port_holder(port))
        elif isinstance(error, PermissionError):
            reason = "port %d may not be used by ordinary users" % port
            hint = "set `job.rendezvous.port` to 1024 or above"
        raise RefusedError("port", reason, hint) from None
    return held


def share_ports(held: list[socket.socket]) -> None:
    """Let the workers listen on reserved ports. They stay bound, so that `reserve_port` refuses
    them to other launches even before a worker listens.

    Linux allows this where both sockets have SO_REUSEADDR, as servers usually do: libuv (torch)
    and gRPC (TensorFlow, JAX) set it.
    """
    for sock in held:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def entries_of(port: int) -> list[list[bytes]]:
    """The kernel's lines about TCP sockets on local ``port``. Linux lists no socket there that is
    bound but neither listens nor is connected."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_file(table, 1 << 24) or b"").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and int(fields[1].rpartition(b":")[2], 16) == port:
                found.append(fields)
    return found


UNNAMED = "a process that does not listen there, such as another launch; Linux does not say which"


def port_holder(port: int) -> str:
    """The process that has ``port``, where this user may see it, and its user."""
    users = {
        b"socket:[" + fields[9] + b"]": int(fields[7])
        for fields in entries_of(port)
        if fields[9] != b"0"
    }
    for uid in users.values():
        owner = "" if uid == os.geteuid() else " of user %s" % user_name(uid)
        return (process_with(users) or "a process") + owner
    return UNNAMED


def process_with(sockets: Collection[bytes]) -> str:
    """The first process that has one of ``sockets`` open; empty if none can be seen."""
    for name in os.listdir("/proc"):
        folder = b"/proc/" + os.fsencode(name) + b"/fd"
        for fd in listed(folder) if name.isdigit() else ():
            try:
                held = os.readlink(os.path.join(folder, fd)) in sockets
            except OSError:
                continue
            if held:
                words = (read_file("/proc/%s/cmdline" % name) or b"").replace(b"\0", b" ")
                return "process %s (%s)" % (name, shown(words.strip())[:120])
    return ""

"""Interfaces, addresses and ports of this host."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct

from dtrain.node.agent.control import call, peer_of
from dtrain.node.agent.folder import listed
from dtrain.node.agent.processes import environment_of, read_file, user_name
from dtrain.node.agent.wire import RefusedError, shown

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


def reserve_port(port: int) -> socket.socket:
    """Keep ``port`` for this run as far as other dtrain runs go, and see that it is free.

    Raises RefusedError, naming who holds it where that can be told.
    """
    hint = "stop it, or choose another `job.rendezvous.port`"
    name = b"\0dtrain-port/%d" % port
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(name)
        # Nobody accepts: a connection only tells the asker who listens, and stays in the queue.
        lock.listen(128)
    except OSError:
        lock.close()
        raise RefusedError(
            "port", "port %d is taken by %s" % (port, lock_holder(name)), hint
        ) from None
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 here
        with probe:
            try:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
            except PermissionError:
                lock.close()
                raise RefusedError(
                    "port",
                    "port %d may not be used by ordinary users" % port,
                    "choose a `job.rendezvous.port` of 1024 or above",
                ) from None
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    continue
                lock.close()
                raise RefusedError(
                    "port", "port %d is taken by %s" % (port, port_holder(port)), hint
                ) from None
    return lock


def lock_holder(name: bytes) -> str:
    sock = call(name)
    if sock is None:
        return "another dtrain run"
    pid, uid = peer_of(sock)
    sock.close()
    run = environment_of(pid).get(b"DTRAIN_RUN_ID")
    if run is not None:
        return "another dtrain run, %s" % shown(run)
    return "another dtrain run, of user %s" % user_name(uid)


def port_holder(port: int) -> str:
    inodes: dict[bytes, int] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (read_file(table, 1 << 24) or b"").splitlines()[1:]:
            fields = line.split()
            if int(fields[1].rpartition(b":")[2], 16) == port and fields[9] != b"0":
                inodes[b"socket:[" + fields[9] + b"]"] = int(fields[7])
    for name in os.listdir("/proc"):
        if not name.isdigit() or not inodes:
            continue
        folder = b"/proc/" + name.encode() + b"/fd"
        for fd in listed(folder):
            try:
                held = os.readlink(os.path.join(folder, fd)) in inodes
            except OSError:
                continue
            if held:
                words = (read_file("/proc/%s/cmdline" % name) or b"").replace(b"\0", b" ")
                return "process %s (%s)" % (name, shown(words.strip())[:120])
    for uid in inodes.values():
        return "a process of user %s" % user_name(uid)
    return "another process"

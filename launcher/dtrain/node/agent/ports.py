"""The ports of this host."""

from __future__ import annotations

import errno
import socket

from dtrain.node.agent.wire import RefusedError
from dtrain.node.listening import on_all_addresses
from dtrain.node.port_holder import UNKNOWN_HOLDER, bind_alone, port_holder


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
                bind_alone(sock, address, port)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:  # IPv6 is switched off
                    raise
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

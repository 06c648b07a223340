"""Connects to hosts by SSH.

Only this module, and modules that only it imports, import paramiko. Commands that need no SSH do
not load it.
"""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TypeAlias

import paramiko

from dtrain.diagnostics import (
    AuthError,
    ConnectError,
    HostKeyError,
    LimitError,
    NodeError,
    reason_of,
)
from dtrain.node.host_name import encoded
from dtrain.spec.model import Host
from dtrain.transport import control_master, retry
from dtrain.transport.algorithms import allow, check_host_key, mismatch
from dtrain.transport.authentication import authenticate
from dtrain.transport.control_master import ControlMaster
from dtrain.transport.endpoint import Endpoint, Resolver
from dtrain.transport.host_keys import KnownHosts
from dtrain.transport.keys import Keyring
from dtrain.transport.live_socket import ByteStream
from dtrain.transport.proxy_command import ProxyCommand
from dtrain.transport.questions import Ask, Questions
from dtrain.transport.retry import DroppedError, Transient
from dtrain.transport.server_key import CertificateError, HostKey, read_host_key
from dtrain.transport.ssh_connection import SshConnection
from dtrain.transport.ssh_transport import ClientTransport, HostKeyProofError
from dtrain.transport.threads import blocking, fulfil
from dtrain.transport.unanswered import Unanswered

_Jump: TypeAlias = SshConnection | ControlMaster

HANDSHAKES = 64
"""Limit on handshakes in progress, over all hosts."""
HANDSHAKES_PER_SERVER = 8
"""Limit on handshakes in progress with one server. From 10 unauthenticated connections on, sshd
drops connections at random (MaxStartups 10:30:100), and it may have other clients."""
EARLY = 16
"""Limit on hosts that are connected early: more are not finished when their connections are needed,
and each needs a thread more."""
ASKED_SECONDS = 60.0
"""Seconds for which all hosts share an answer of the user that their jump host refused."""

_OR_ADDRESS = ", or its `address` in `cluster.overrides`"
SSH_FAILED = 255
"""Exit status of ``ssh`` without a connection. As a ProxyCommand (``ssh -W``) it may have
exceeded MaxStartups on the jump host."""


class SshTransport:
    """Connects to hosts. All threads of a launch share one object.

    Relative paths in the cluster file start at ``base``. ``ask`` asks the user for passphrases and
    for answers to a server's questions; None if there is no terminal. ``notice`` receives
    messages for the user: accepted keys, ignored settings.
    """

    def __init__(
        self,
        base: Path,
        ask: Ask | None = None,
        notice: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._notice_once = notice
        self._noticed: set[str] = set()
        self._unanswered = Unanswered(notice)
        self._lock = threading.Lock()
        self._resolver = Resolver(base, self._notice)
        self._ask = Questions(ask) if ask else None
        self._keyring = Keyring(self._ask)
        self._known_hosts = KnownHosts()
        self._handshakes = threading.BoundedSemaphore(HANDSHAKES)
        self._per_server: defaultdict[object, threading.BoundedSemaphore] = defaultdict(
            lambda: threading.BoundedSemaphore(HANDSHAKES_PER_SERVER)
        )
        self._jumps: dict[Endpoint, Future[_Jump]] = {}
        self._asked_until: dict[Endpoint, float] = {}
        """Until when a jump host's login that failed after a prompt to the user is not repeated."""
        self._early: dict[str, Future[SshConnection]] = {}
        """By name of the host. `close` may run in another thread than `connect`."""
        self._unfinished: set[ClientTransport] = set()
        self._closing = threading.Event()

    def connect_early(self, hosts: Iterable[Host]) -> None:
        """Begin to connect to ``hosts``. `connect` returns these connections."""
        for host in islice(hosts, EARLY):
            early = self._early[host.name] = Future[SshConnection]()
            blocking.run(partial(fulfil, early, partial(self._connect, host)))

    def connect(self, host: Host) -> SshConnection:
        """Raises ConnectError, HostKeyError or AuthError, each with a hint."""
        early = self._early.pop(host.name, None)
        if early is None or early.cancel():  # no thread has been free for it
            return self._connect(host)
        connection = early.result()
        if connection.alive:
            return connection
        connection.close()  # the server has ended it meanwhile
        return self._connect(host)

    def close(self) -> None:
        """Close the connections that nobody has used, and those to jump hosts and to the ssh agent.
        End waiting attempts and the open question."""
        self._closing.set()
        if self._ask is not None:
            self._ask.close()
        for early in list(self._early.values()):
            if not early.cancel():
                early.add_done_callback(_close)
        with self._lock:
            jumps, self._jumps = list(self._jumps.values()), {}
            unfinished = list(self._unfinished)
        for transport in unfinished:
            transport.close()
        # A later connection may run over an earlier one.
        for jump in reversed(jumps):
            jump.add_done_callback(_close)
        self._keyring.close()

    def _connect(self, host: Host) -> SshConnection:
        return self._reach(self._resolver.resolve(host))

    def _reach(self, endpoint: Endpoint) -> SshConnection:
        started = time.monotonic()
        attempt = 1
        while True:
            try:
                return self._attempt(endpoint)
            except DroppedError as failure:
                started += failure.excused
                elapsed = time.monotonic() - started
                pause = retry.pause(failure.kind, attempt, elapsed, random.uniform)
                if pause is None or self._closing.wait(pause):
                    tries = f" ({attempt} attempts in {elapsed:.0f} s)" if attempt > 1 else ""
                    hint = _DROPPED_HINTS[failure.kind].format(
                        command=endpoint.command, address=endpoint.address
                    )
                    if failure.said:  # it may be only a legal notice
                        hint = f"if what it said is not the reason, {hint}"
                    reason = failure.reason + tries
                    raise endpoint.error(ConnectError, reason, hint=hint) from None
                attempt += 1

    def _attempt(self, endpoint: Endpoint) -> SshConnection:
        # Before taking a slot: the jump host's connection needs a slot too.
        via = self._jump(endpoint, endpoint.via) if endpoint.via else None
        server = self._server_slots(endpoint)
        with server, self._handshakes:
            deadline = time.monotonic() + endpoint.timeout
            with self._unanswered.watching(endpoint):
                stream = self._open_stream(endpoint, via, deadline)
            transport = ClientTransport(stream)
            with self._lock:
                self._unfinished.add(transport)
            try:
                if self._closing.is_set():
                    raise endpoint.error(ConnectError, "the launch is ending")
                with self._unanswered.watching(endpoint):
                    self._handshake(endpoint, transport, stream, deadline)
                key = _host_key(endpoint, transport)
                check_host_key(endpoint, key, transport.host_key_blob)
                notice = self._known_hosts.check(endpoint, key)
                if notice:
                    self._notice(notice)
                authenticate(
                    transport,
                    endpoint,
                    self._keyring,
                    self._ask,
                    max(1.0, deadline - time.monotonic()),
                )
            except BaseException:
                transport.close()
                raise
            finally:
                with self._lock:
                    self._unfinished.discard(transport)
        return SshConnection(endpoint, transport)

    def _handshake(
        self,
        endpoint: Endpoint,
        transport: ClientTransport,
        stream: ByteStream,
        deadline: float,
    ) -> None:
        """Exchange keys with the server. Afterwards its host key is known."""
        allow(transport, endpoint, self._known_hosts.algorithms(endpoint))
        # The deadline below must expire first; paramiko's own timeouts are longer.
        transport.banner_timeout = transport.handshake_timeout = endpoint.timeout + 5
        done = threading.Event()
        transport.start_client(event=done)
        done.wait(max(0.0, deadline - time.monotonic()))
        if transport.is_active() and transport.initial_kex_done:
            return
        if isinstance(stream, ProxyCommand):
            if stream.status == SSH_FAILED:
                raise DroppedError(Transient.DROPPED, stream.explain())
            raise endpoint.error(
                ConnectError, stream.explain(), hint=f"check whether `{endpoint.command}` works"
            )
        greeting = transport.live.greeting.decode("latin-1").splitlines()
        # Behind its version, a server sends packets.
        words = takewhile(lambda line: not line.startswith("SSH-"), greeting)
        text = next(filter(None, words), "")
        if transport.is_active():
            what = "finish its SSH handshake" if transport.remote_version else "greet as SSH does"
            raise DroppedError(
                Transient.SILENT, f"the server did not {what} within {endpoint.timeout:g} s"
            )
        failure = transport.saved_exception
        if isinstance(failure, HostKeyProofError):
            raise endpoint.error(
                HostKeyError,
                f"the server did not prove its identity: {failure}",
                hint="the connection may be intercepted, or the server is faulty; compare with "
                f"the output of `{endpoint.command}`",
            )
        if isinstance(failure, paramiko.ssh_exception.IncompatiblePeer):
            reason, hint = mismatch(transport, failure)
            raise endpoint.error(ConnectError, reason, hint=hint)
        if text and not text.startswith("Exceeded MaxStartups") and "allowed" not in text:
            raise endpoint.error(
                ConnectError,
                f"not an SSH server: it sent {text[:80]!r}",
                hint="check the host's `address` and `port`",
            )
        if text:
            raise DroppedError(Transient.THROTTLED, f"the server rejected the connection: {text}")
        raise DroppedError(
            Transient.DROPPED,
            "the server closed the connection during the SSH handshake",
        )

    def _open_stream(self, endpoint: Endpoint, via: _Jump | None, deadline: float) -> ByteStream:
        if via:
            return _through_jump(endpoint, via)
        if endpoint.proxy_command:
            try:
                return ProxyCommand(endpoint.proxy_command)
            except OSError as error:
                raise endpoint.error(
                    ConnectError, f"cannot start its ProxyCommand: {error}"
                ) from error
        return _dial(endpoint, deadline)

    def _jump(self, endpoint: Endpoint, via: Endpoint) -> _Jump:
        """The shared connection to a jump host. The first thread that needs it opens it."""
        with self._lock:
            pending = self._jumps.get(via)
            if pending and pending.done() and not self._is_settled(via, pending):
                pending = None
            mine = pending is None
            if pending is None:
                pending = self._jumps[via] = Future()
        if mine:
            fulfil(pending, lambda: self._open_jump(via))
        try:
            return pending.result()
        except NodeError as error:
            reason = f"cannot reach its jump host: {error.message}"
            wrapped = endpoint.error(type(error), reason, hint=error.hint)
            wrapped.jump = error.jump or error.host
            if isinstance(error, AuthError) and isinstance(wrapped, AuthError):
                wrapped.asked = error.asked
            raise wrapped from error

    def _open_jump(self, via: Endpoint) -> _Jump:
        try:
            return self._master(via) or self._reach(via)
        finally:  # before another thread sees how it ended
            self._asked_until[via] = time.monotonic() + ASKED_SECONDS

    def _is_settled(self, via: Endpoint, jump: Future[_Jump]) -> bool:
        """Whether a jump host's connection is up, or its login has just failed after a prompt to
        the user."""
        error = jump.exception()
        if error:
            asked = isinstance(error, AuthError) and error.asked
            return asked and time.monotonic() < self._asked_until[via]
        return jump.result().alive

    def _master(self, via: Endpoint) -> ControlMaster | None:
        master = control_master.find(via)
        if master:
            self._notice(f"{via.host}: using the connection that ssh holds open ({master.path})")
        return master

    def _server_slots(self, endpoint: Endpoint) -> threading.BoundedSemaphore:
        # The server behind a ProxyCommand is unknown. Often it is one jump host for all hosts.
        server = (endpoint.via, endpoint.address, endpoint.port)
        with self._lock:
            return self._per_server["ProxyCommand" if endpoint.proxy_command else server]

    def _notice(self, text: str) -> None:
        with self._lock:
            if text in self._noticed:
                return
            self._noticed.add(text)
        self._notice_once(text)


def _close(opened: Future[Any]) -> None:
    if opened.exception() is None:
        opened.result().close()


_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_DROPPED_HINTS = {
    Transient.THROTTLED: "its sshd has too many connections at once (MaxStartups), or punishes "
    "this address for failed logins (PerSourcePenalties): wait, or change that in its sshd_config",
    Transient.DROPPED: "check whether `{command}` works; an overloaded sshd (MaxStartups), a "
    "firewall or fail2ban closes connections like this",
    Transient.SILENT: "check whether `{command}` works; the host may be overloaded, another "
    "program than sshd may listen on this port, or the network may lose large packets (MTU): "
    "`ping -M do -s 1400 {address}`",
}


def _host_key(endpoint: Endpoint, transport: ClientTransport) -> HostKey:
    try:
        return read_host_key(transport.host_key_blob)
    except CertificateError as problem:
        raise endpoint.error(
            HostKeyError,
            f"invalid host certificate: {problem}",
            hint=f"compare with the output of `{endpoint.command}`; the administrator of the host "
            "must replace the file that HostCertificate in its sshd_config names",
        ) from problem


def _dial(endpoint: Endpoint, deadline: float) -> socket.socket:
    """Open a TCP connection to the endpoint. Tries every address of its name."""
    try:
        found = socket.getaddrinfo(
            encoded(endpoint.address), endpoint.port, endpoint.family, socket.SOCK_STREAM
        )
    except (socket.gaierror, UnicodeError) as error:
        raise endpoint.error(
            ConnectError,
            f"cannot resolve the name {endpoint.address!r} ({reason_of(error)})",
            hint="check the name, or set its HostName in ssh's configuration"
            + ("" if endpoint.is_jump else _OR_ADDRESS),
        ) from error
    failure: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no addresses")
    for index, (family, kind, protocol, _, where) in enumerate(found):
        # An address that does not answer must leave time for the remaining addresses.
        share = (deadline - time.monotonic()) / (len(found) - index)
        connection = None
        try:
            connection = socket.socket(family, kind, protocol)
            connection.settimeout(max(0.1, share))
            if endpoint.bind_address:
                _bind(connection, endpoint.bind_address)
            connection.connect(where)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as error:
            if connection is not None:
                connection.close()
            # A kernel without IPv6 says nothing about the host.
            if error.errno != errno.EAFNOSUPPORT or index == 0:
                failure = error
    if limit := LimitError.of(failure):
        raise endpoint.error(ConnectError, limit.message, hint=limit.hint)
    if isinstance(failure, ConnectionResetError):
        raise DroppedError(Transient.DROPPED, "the connection was reset")
    raise endpoint.error(
        ConnectError,
        f"no answer within {endpoint.timeout:g} s"
        if isinstance(failure, TimeoutError)
        else reason_of(failure),
        hint=_dial_hint(failure, endpoint),
    ) from failure


def _bind(connection: socket.socket, address: str) -> None:
    """Bind to the BindAddress of ssh's configuration. Raises OSError."""
    try:
        found = socket.getaddrinfo(address, 0, connection.family, connection.type)
        connection.bind(found[0][4])
    except OSError as error:
        raise OSError(f"cannot use BindAddress {address} ({reason_of(error)})") from error


def _dial_hint(failure: OSError, endpoint: Endpoint) -> str:
    if isinstance(failure, ConnectionRefusedError):
        here = "; `transport: local` runs workers on this machine without SSH"
        key = "ssh.jump" if endpoint.is_jump else "ssh.port"
        return (
            f"check that sshd runs there, and on port {endpoint.port} (`{key}`)"
            f"{here if endpoint.address in _LOOPBACK else ''}"
        )
    if isinstance(failure, TimeoutError) or failure.errno in {
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
    }:
        jump = "; to go through a jump host, set `jump` under `ssh`"
        return (
            "check that the host is up, and that no firewall or missing VPN blocks the connection"
            f"{'' if endpoint.is_jump else jump}"
        )
    return f"check whether `{endpoint.command}` works"


def _through_jump(endpoint: Endpoint, via: _Jump) -> ByteStream:
    try:
        return via.open_stream(endpoint.address, endpoint.port, endpoint.timeout)
    except paramiko.ChannelException as error:
        forbidden = error.code == 1
        raise endpoint.error(
            ConnectError,
            f"jump host {via.endpoint.host} "
            + ("does not forward connections" if forbidden else f"cannot reach {endpoint.place}"),
            hint="AllowTcpForwarding in its sshd_config must allow it"
            if forbidden
            else f"check that the host is up; on the jump host, try `nc -vz {endpoint.address} "
            f"{endpoint.port}`",
        ) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        if via.alive:
            raise endpoint.error(
                ConnectError,
                f"jump host {via.endpoint.host} did not open a connection to {endpoint.place} "
                f"within {endpoint.timeout:g} s",
                hint="check that the host is up, and that no firewall blocks the connection from "
                "the jump host",
            ) from error
        raise DroppedError(
            Transient.DROPPED, f"the connection to jump host {via.endpoint.host} was lost"
        ) from error

"""Selects the transport of each host: SSH, or this machine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.spec.model import Host
from dtrain.transport.contract import Connection
from dtrain.transport.endpoint import Resolver
from dtrain.transport.local import LocalTransport
from dtrain.transport.notices import Notices
from dtrain.transport.open_files import allow_files
from dtrain.transport.questions import Ask
from dtrain.transport.threads import blocking, fulfil

if TYPE_CHECKING:
    from dtrain.transport.ssh import SshTransport
    from dtrain.transport.ssh_connection import SshConnection

EARLY = 16
"""Limit on hosts that are connected early: more are not finished when their connections are needed,
and each needs a thread more."""


class Transports:
    """Connects to each host with its ``transport``. Loads SSH on first use. For the arguments see
    `SshTransport`."""

    def __init__(
        self,
        base: Path,
        ask: Ask | None = None,
        notice: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._base = base
        self._ask = ask
        self._notice = Notices(notice)
        self._local = LocalTransport()
        self._lock = threading.Lock()
        self._ssh: SshTransport | None = None
        self._early: dict[str, Future[SshConnection]] = {}
        """By name of the host. `close` may run in another thread than `connect`."""

    def prepare(self, hosts: Collection[Host]) -> None:
        """Raise the limit of open files for ``hosts``, and import what connecting to them needs,
        before threads do it beside other work. Raises LimitError."""
        allow_files(len(hosts))
        if any(host.transport == "ssh" for host in hosts):
            self._ssh_transport()

    def connect_early(self, hosts: Collection[Host]) -> None:
        """Begin to connect to ``hosts``, as `prepare` does not. `connect` returns these
        connections."""
        allow_files(len(hosts))
        remote = [host for host in hosts if host.transport == "ssh"]
        for host in remote[:EARLY]:
            early = self._early[host.name] = Future()
            blocking.run(partial(fulfil, early, partial(self._reach, host)))
        if remote:
            self._ssh_transport()

    def connect(self, host: Host) -> Connection:
        """Raises ConnectError, HostKeyError or AuthError, each with a hint."""
        if host.transport == "local":
            return self._local.connect(host)
        early = self._early.pop(host.name, None)
        if early is not None and not early.cancel():  # or no thread has been free for it
            connection = early.result()
            if connection.alive:
                return connection
            connection.close()  # the server has ended it meanwhile
        return self._reach(host)

    def close(self) -> None:
        """Close the connections that nobody has used, and what connections share."""
        for early in list(self._early.values()):
            if not early.cancel():
                early.add_done_callback(_close)
        with self._lock:
            if self._ssh:
                self._ssh.close()

    def _reach(self, host: Host) -> SshConnection:
        # ssh's configuration is read while another thread still imports paramiko.
        endpoint = self._resolver.resolve(host)
        return self._ssh_transport().reach(endpoint)

    @cached_property
    def _resolver(self) -> Resolver:
        return Resolver(self._base, self._notice)

    def _ssh_transport(self) -> SshTransport:
        with self._lock:
            if self._ssh is None:
                from dtrain.transport.ssh import SshTransport

                self._ssh = SshTransport(self._base, self._ask, self._notice, self._resolver)
            return self._ssh


def _close(opened: Future[SshConnection]) -> None:
    if opened.exception() is None:
        opened.result().close()

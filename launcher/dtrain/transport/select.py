"""Selects the transport of each host: SSH, or this machine."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.diagnostics import LimitError
from dtrain.spec.model import Host
from dtrain.transport.contract import Connection
from dtrain.transport.local import LocalTransport
from dtrain.transport.questions import Ask

if TYPE_CHECKING:
    from dtrain.transport.ssh import SshTransport

_EACH = 4
"""Open files for each connection: its own, and others for a moment."""
_OWN = 256
_LEAST = 31
"""Open files besides the connections. With fewer, a launch fails somewhere in the middle,
and `dtrain attach` would stop the job because it cannot store its output."""


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
        self._notice = notice
        self._local = LocalTransport()
        self._lock = threading.Lock()
        self._ssh: SshTransport | None = None

    def prepare(self, hosts: Collection[Host]) -> None:
        """Raise the limit of open files for ``hosts``, and import what connecting to them needs,
        before threads do it beside other work. Raises LimitError."""
        allow_files(len(hosts))
        if any(host.transport == "ssh" for host in hosts):
            self._ssh_transport()

    def connect_early(self, hosts: Collection[Host]) -> None:
        """Begin to connect to ``hosts``. `connect` returns these connections."""
        remote = [host for host in hosts if host.transport == "ssh"]
        if remote:
            self._ssh_transport().connect_early(remote)

    def connect(self, host: Host) -> Connection:
        """Raises ConnectError, HostKeyError or AuthError, each with a hint."""
        if host.transport == "local":
            return self._local.connect(host)
        return self._ssh_transport().connect(host)

    def close(self) -> None:
        with self._lock:
            if self._ssh:
                self._ssh.close()

    def _ssh_transport(self) -> SshTransport:
        with self._lock:
            if self._ssh is None:
                from dtrain.transport.ssh import SshTransport

                self._ssh = SshTransport(self._base, self._ask, self._notice)
            return self._ssh


def allow_files(connections: int) -> None:
    """Raise the soft limit of open files, which is 1,024 on most systems.

    Raises LimitError if the hard limit is too low for them.
    """
    wanted = connections * _EACH + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        if hard < (least := connections + _LEAST):
            raise LimitError(
                f"this machine lets dtrain open {hard} files, but it needs at least {least}",
                hint=f"raise the limit of open files: `ulimit -n {wanted}`",
            )
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

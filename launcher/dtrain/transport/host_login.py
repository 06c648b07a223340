"""A login with the host key of this machine: hostbased (RFC 4252, section 9).

Only root can read the key. OpenSSH's set-uid program ssh-keysign signs with it for a user, if the
data to sign names this user and this machine.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import paramiko

from dtrain.framing import clean
from dtrain.transport.keys import PublicKey, read_public
from dtrain.transport.login_handler import MethodHandler
from dtrain.transport.login_methods import HOST, LoginMethodError
from dtrain.transport.server_key import key_type
from dtrain.transport.ssh_transport import ClientTransport

PROGRAMS = (
    "/usr/lib/openssh/ssh-keysign",  # Debian
    "/usr/libexec/openssh/ssh-keysign",  # Red Hat
    "/usr/lib/ssh/ssh-keysign",  # SUSE, Arch, Alpine
    "/usr/libexec/ssh/ssh-keysign",
    "/usr/libexec/ssh-keysign",  # macOS
    "/usr/local/libexec/ssh-keysign",
)
FOLDER = Path("/etc/ssh")
TIMEOUT = 30.0
"""Seconds for a signature: ssh-keysign asks the name server for the name of this machine."""
MOST_SAID = 200
"""Characters of ssh-keysign's words that a message shows."""
_VERSION = 2
"""Of ssh-keysign's protocol."""


class OtherHostKeyError(LoginMethodError):
    """ssh-keysign does not have the key, but may have another one."""


def own_host_keys(algorithms: Iterable[str]) -> list[tuple[str, PublicKey]]:
    """The host keys and certificates of this machine, each with the first algorithm for it, in the
    order of ``algorithms``. Raises LoginMethodError if there are none."""
    keys = list(filter(None, map(read_public, sorted(FOLDER.glob("ssh_host_*_key*.pub")))))
    if not keys:
        raise LoginMethodError(
            f"this machine has no host keys ({FOLDER}/ssh_host_*_key.pub)",
            "create them with `ssh-keygen -A`",
        )
    found: dict[PublicKey, str] = {}
    for algorithm in algorithms:
        for key in keys:
            if key.kind == key_type(algorithm):
                found.setdefault(key, algorithm)
    if not found:
        raise LoginMethodError(
            "HostbasedAcceptedAlgorithms excludes the host keys of this machine",
            f"allow one of these for this host: {', '.join(key.kind for key in keys)}",
        )
    return [(algorithm, key) for key, algorithm in found.items()]


class HostLogin(MethodHandler):
    """One attempt, with the signature of ``key``. Raises LoginMethodError if there is none."""

    method = HOST

    def __init__(
        self, transport: ClientTransport, user: str, algorithm: str, key: PublicKey
    ) -> None:
        super().__init__(transport, user)
        connection = transport.live.tcp
        client = _name(connection)
        self._request = paramiko.Message()
        self.begin_request(self._request)
        self._request.add_string(algorithm)
        self._request.add_string(key.blob)
        self._request.add_string(f"{client}.")
        self._request.add_string(pwd.getpwuid(os.getuid()).pw_name)
        signed = paramiko.Message()
        signed.add_string(transport.session_id or b"")
        signed.add_bytes(self._request.asbytes())
        self._request.add_string(_signature(connection, signed.asbytes()))
        self.refusal = LoginMethodError(
            f"the server refused the host key of {client}, this machine",
            f"check that shosts.equiv and ssh_known_hosts in its {FOLDER} have {client}, and the "
            "log of its sshd"
            + (
                ""
                if connection
                else "; for a connection that another host relays, its sshd_config needs "
                "`HostbasedUsesNameFromPacketOnly yes`"
            ),
        )

    def _request_login(self, _accepted: paramiko.Message) -> None:
        self.send(self._request)


def _name(connection: socket.socket | None) -> str:
    """The name of this machine as ssh-keysign finds it: the name of the connection's own address.
    Without a direct connection, or if the address has no name, the host name."""
    if connection is not None:
        with suppress(OSError):
            return socket.getnameinfo(connection.getsockname(), socket.NI_NAMEREQD)[0]
    return socket.gethostname()


def _signature(connection: socket.socket | None, data: bytes) -> bytes:
    program = next(filter(os.path.exists, PROGRAMS), None)
    if program is None:
        raise LoginMethodError(
            "ssh-keysign is not installed",
            "install it (package openssh-client on Debian, openssh-keysign or openssh on Red Hat)",
        )
    with ExitStack() as stack:
        try:
            if connection is None:  # any file that is no socket
                inherited = os.open(os.devnull, os.O_RDONLY)
            else:
                inherited = os.dup(connection.fileno())
            stack.callback(os.close, inherited)
            order = paramiko.Message()
            order.add_byte(bytes([_VERSION]))
            order.add_int(inherited)
            order.add_string(data)
            framed = paramiko.Message()
            framed.add_string(order.asbytes())
            done = subprocess.run(
                [program],
                input=framed.asbytes(),
                capture_output=True,
                pass_fds=(inherited,),
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise LoginMethodError(
                f"ssh-keysign did not answer within {TIMEOUT:g} s",
                "check the name server: ssh-keysign asks it for the name of this machine",
            ) from None
        except OSError as error:
            raise LoginMethodError(f"cannot run {program}: {error}") from error
    # The length, the version, and the signature.
    reply = paramiko.Message(paramiko.Message(done.stdout).get_binary()[1:])
    signature = reply.get_binary()
    if done.returncode or not signature:
        said = clean(done.stderr.decode(errors="replace").strip())[-MOST_SAID:]
        said = said or f"it ended with status {done.returncode}"
        kind = OtherHostKeyError if "no matching hostkey" in said else LoginMethodError
        raise kind(f"ssh-keysign does not sign: {said}", _hint(program, said))
    return signature


def _hint(program: str, said: str) -> str:
    if "not enabled" in said:
        return "set `EnableSSHKeysign yes` for all hosts in /etc/ssh/ssh_config of this machine"
    if "could not open any host key" in said:
        return (
            f"{program} must be set-uid root, as its package installs it, on a machine or in a "
            "container that permits that (no nosuid, no no_new_privs)"
        )
    return ""

"""Logins with a Kerberos ticket, with a real Kerberos server and a real sshd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import paramiko
import pytest

from dtrain.diagnostics import AuthError
from dtrain.spec.model import Host, Ssh
from dtrain.transport import kerberos
from dtrain.transport.ssh import SshTransport
from support.kdc import Kdc, running_kdc
from support.limits import HANG
from support.ssh_server import Login, SshServer
from support.sshd import Sshd, host_on, running_sshd

pytestmark = pytest.mark.sshd

SETTINGS = {
    "GSSAPIAuthentication": "yes",
    # Or its name must be that of this machine.
    "GSSAPIStrictAcceptorCheck": "no",
}
ONLY_TICKETS = {**SETTINGS, "AuthenticationMethods": "gssapi-with-mic password"}


@pytest.fixture(scope="module")
def kdc(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kdc]:
    with running_kdc(tmp_path_factory.mktemp("kdc")) as server:
        yield server


@pytest.fixture(autouse=True)
def ticket(kdc: Kdc, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """The environment and ssh configuration of a user with a ticket."""
    for name, value in kdc.environment.items():
        monkeypatch.setenv(name, value)
    configure(home, "GSSAPIAuthentication yes")
    kdc.kinit(kdc.user)


@pytest.fixture(scope="module")
def server(kdc: Kdc, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """An sshd that accepts only tickets, and passwords, which dtrain does not send."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in kdc.environment.items():
            patch.setenv(name, value)
        with running_sshd(tmp_path_factory.mktemp("tickets"), settings=ONLY_TICKETS) as found:
            yield found


def configure(home: Path, *lines: str) -> None:
    (home / ".ssh" / "config").write_text("\n".join(("HashKnownHosts no", *lines)) + "\n")


def on(sshd: Sshd) -> Host:
    return host_on(sshd, identity=None)


def tickets_on(transport: SshTransport, host: Host) -> str:
    """What `klist` prints there."""
    connection = transport.connect(host)
    process = connection.start("klist -f 2>&1")
    output = b"".join(iter(lambda: process.read(1 << 16), b""))
    process.wait(HANG)
    connection.close()
    return output.decode()


def test_a_ticket_logs_in(transport: SshTransport, server: Sshd) -> None:
    transport.connect(on(server)).close()


def test_without_a_ticket_the_error_says_how_to_get_one(
    transport: SshTransport, server: Sshd, kdc: Kdc
) -> None:
    kdc.kdestroy()
    with pytest.raises(AuthError, match=r"only gssapi-with-mic \(Kerberos: No") as caught:
        transport.connect(on(server))
    assert caught.value.hint == "get a ticket with `kinit`"


def test_without_permission_no_ticket_is_used(
    transport: SshTransport, server: Sshd, home: Path
) -> None:
    configure(home, "GSSAPIAuthentication no")
    with pytest.raises(AuthError) as caught:
        transport.connect(on(server))
    assert "set `GSSAPIAuthentication yes`" in caught.value.hint


def test_without_the_library_the_error_names_its_package(
    transport: SshTransport, server: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    kerberos._library.cache_clear()
    monkeypatch.setattr(kerberos, "LIBRARY", "libgssapi_missing.so")
    with pytest.raises(AuthError, match=r"libgssapi_missing.so is not installed") as caught:
        transport.connect(on(server))
    assert "libgssapi-krb5-2" in caught.value.hint


@pytest.mark.parametrize(("delegate", "shown"), [("yes", "Flags: Ff"), ("no", "No credentials")])
def test_the_host_gets_a_ticket_only_if_configured(
    transport: SshTransport, server: Sshd, home: Path, delegate: str, shown: str
) -> None:
    configure(home, "GSSAPIAuthentication yes", f"GSSAPIDelegateCredentials {delegate}")
    assert shown in tickets_on(transport, on(server))


def test_without_permission_no_key_is_used(transport: SshTransport, sshd: Sshd, home: Path) -> None:
    configure(home, "GSSAPIAuthentication yes", "PubkeyAuthentication no")
    with pytest.raises(AuthError, match="allows only a Kerberos ticket"):
        transport.connect(host_on(sshd))


def test_a_server_may_require_a_ticket_and_a_key(
    transport: SshTransport, tmp_path: Path, make_transport: Callable[..., SshTransport]
) -> None:
    both = {**SETTINGS, "AuthenticationMethods": "gssapi-with-mic,publickey"}
    with running_sshd(tmp_path, settings=both) as sshd:
        transport.connect(host_on(sshd)).close()
        with pytest.raises(AuthError, match="it accepted a Kerberos ticket but also requires"):
            make_transport().connect(on(sshd))


def test_a_key_logs_in_after_the_ticket_of_another_user(
    transport: SshTransport, tmp_path: Path, make_transport: Callable[..., SshTransport], kdc: Kdc
) -> None:
    kdc.kinit("other")
    with running_sshd(tmp_path, settings=SETTINGS) as sshd:
        transport.connect(host_on(sshd)).close()
        with pytest.raises(AuthError, match="Kerberos: the server refused the ticket") as caught:
            make_transport().connect(on(sshd))
    assert caught.value.hint.startswith("check with `klist` whose ticket it is")


def test_a_host_that_kerberos_does_not_know(
    transport: SshTransport, server: Sshd, home: Path
) -> None:
    """Another ticket does not help."""
    configure(home, "GSSAPIAuthentication yes", "GSSAPIServerIdentity nowhere")
    with pytest.raises(AuthError, match="not found in Kerberos database") as caught:
        transport.connect(on(server))
    assert caught.value.hint.startswith("check whether `ssh ")


class Liar(Login):
    """Sends ``message`` in reply to a request for a login with a ticket."""

    message: ClassVar[paramiko.Message]
    requests = 0

    def get_allowed_auths(self, username: str) -> str:
        return "gssapi-with-mic"

    def check_auth_none(self, username: str) -> int:
        """For each request of a method that paramiko does not know, too."""
        self.requests += 1
        if self.requests > 1:
            self.server._transports[-1]._send_message(self.message)
        return paramiko.AUTH_FAILED


@pytest.mark.parametrize(
    ("number", "content", "problem"),
    [
        (60, b"\x06\x03\x2b\x06\x01", "the server chose another mechanism"),
        (61, b"no token", "[Tt]oken"),
        (61, b"", "[Tt]oken"),
    ],
)
def test_a_server_that_breaks_the_protocol_is_refused(
    transport: SshTransport, tmp_path: Path, number: int, content: bytes, problem: str
) -> None:
    class Server(SshServer):
        class login(Liar):
            message = paramiko.Message()

    Server.login.message.add_byte(bytes([number]))
    Server.login.message.add_string(content)
    with Server(b"") as server:
        known_hosts = tmp_path / "known_hosts"
        known_hosts.write_text(server.host_key_line)
        ssh = Ssh(user="me", port=server.port, known_hosts=str(known_hosts))
        with pytest.raises(AuthError, match=problem):
            transport.connect(Host("gpu01", "127.0.0.1", ssh=ssh))


def test_a_server_that_hangs_up_after_a_refused_ticket_is_not_asked_again(
    transport: SshTransport, tmp_path: Path, kdc: Kdc
) -> None:
    kdc.kinit("other")
    with running_sshd(tmp_path, settings={**SETTINGS, "MaxAuthTries": "1"}) as sshd:
        closed = (
            r"it closed the connection after a refusal \(Kerberos: the server refused the ticket\)"
        )
        with pytest.raises(AuthError, match=closed) as caught:
            transport.connect(host_on(sshd))
        assert caught.value.hint.endswith("and the log of its sshd")
        assert sshd.log().count("Connection from") == 1

"""Host keys of a real sshd: known, unknown, changed, revoked, accepted."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import paramiko
import pytest

from dtrain.diagnostics import ConnectError, HostKeyError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.host_keys import matches
from dtrain.transport.ssh import SshTransport
from support.limits import HANG
from support.ssh_server import SshServer
from support.sshd import Sshd, generate_key, host_on, running_sshd

pytestmark = pytest.mark.sshd


def fingerprint(public: Path) -> str:
    command = ["ssh-keygen", "-l", "-f", str(public)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]


def public_key(path: Path, kind: str = "ed25519") -> str:
    return " ".join(Path(f"{generate_key(path, kind)}.pub").read_text().split()[:2])


def known_hosts(tmp_path: Path, text: str) -> str:
    path = tmp_path / "known"
    path.write_text(text)
    return str(path)


def test_a_known_host_is_accepted(transport: SshTransport, sshd: Sshd) -> None:
    connection = transport.connect(host_on(sshd))
    assert connection.start("exit 7").wait(HANG) == 7
    connection.close()


def test_hashed_names_are_recognised(transport: SshTransport, sshd: Sshd, tmp_path: Path) -> None:
    path = known_hosts(tmp_path, sshd.known_hosts.read_text())
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=True, capture_output=True)
    hashed = Path(path).read_text()
    assert "127.0.0.1" not in hashed
    damaged = "".join(f"{names} {sshd.host_key()}\n" for names in ("|1|", "|1|x|y", "|1|YWJj|YWJj"))
    known_hosts(tmp_path, damaged + hashed)
    transport.connect(host_on(sshd, known_hosts=path)).close()


@pytest.mark.parametrize(
    "names",
    [
        "127.0.0.1",
        "gpu01",
        "other,[127.0.0.1]:{port}",
        "[127.0.*]:{port}",
        "[gpu01]:{port}",
        "GPU01",
    ],
)
def test_names_that_match_the_host(
    transport: SshTransport, sshd: Sshd, tmp_path: Path, names: str
) -> None:
    line = f"{names.format(port=sshd.port)} {sshd.host_key()}\n"
    path = known_hosts(tmp_path, f"# comment\n\nbroken\n{line}")
    transport.connect(host_on(sshd, known_hosts=path)).close()


def test_an_unknown_host_is_refused_with_both_remedies(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    with pytest.raises(HostKeyError) as caught:
        transport.connect(host_on(sshd, known_hosts=known_hosts(tmp_path, "")))
    error = caught.value
    assert error.host == "gpu01"
    assert f"connecting to gpu01 (127.0.0.1:{sshd.port}) as {sshd.user}" in error.message
    assert f"ssh-ed25519 {fingerprint(sshd.folder / 'host_ed25519.pub')}" in error.reason
    assert "host_keys: accept-new" in error.hint
    assert (
        f"UserKnownHostsFile={tmp_path}/known -p {sshd.port} {sshd.user}@127.0.0.1`" in error.hint
    )


def test_a_host_known_on_another_port_is_unknown(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    path = known_hosts(tmp_path, f"[127.0.0.1]:1 {sshd.host_key()}\n")
    with pytest.raises(HostKeyError, match="its host key is unknown"):
        transport.connect(host_on(sshd, known_hosts=path))


def test_a_key_recorded_for_port_22_may_be_that_of_another_server(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    # As in ssh: a container on the host may have its own sshd.
    outside = f"127.0.0.1,gpu01 {public_key(tmp_path / 'other')}\n"
    path = known_hosts(tmp_path, outside)
    with pytest.raises(HostKeyError, match="its host key is unknown"):
        transport.connect(host_on(sshd, known_hosts=path))
    transport.connect(host_on(sshd, known_hosts=path, host_keys="accept-new")).close()
    assert Path(path).read_text() == f"{outside}[127.0.0.1]:{sshd.port} {sshd.host_key()}\n"


def test_the_key_for_the_port_is_requested_first(transport: SshTransport, tmp_path: Path) -> None:
    outside = f"127.0.0.1 {public_key(tmp_path / 'other', 'rsa')}\n"
    with running_sshd(tmp_path, host_key_types=("ed25519", "rsa")) as sshd:
        path = known_hosts(tmp_path, f"{outside}[gpu01]:{sshd.port} {sshd.host_key()}\n")
        transport.connect(host_on(sshd, known_hosts=path)).close()


def test_only_a_newline_ends_a_line(transport: SshTransport, sshd: Sshd, tmp_path: Path) -> None:
    path = known_hosts(tmp_path, f"# old:\f[127.0.0.1]:{sshd.port} {sshd.host_key()}\n")
    with pytest.raises(HostKeyError, match="its host key is unknown"):
        transport.connect(host_on(sshd, known_hosts=path))


def test_a_changed_key_names_the_line_and_both_fingerprints(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    other = public_key(tmp_path / "other")
    path = known_hosts(tmp_path, f"# one\n# two\n[127.0.0.1]:{sshd.port} {other}\n")
    # Accepting new keys must not accept changed ones.
    with pytest.raises(HostKeyError) as caught:
        transport.connect(host_on(sshd, known_hosts=path, host_keys="accept-new"))
    assert f"{path}:3" in caught.value.reason
    assert fingerprint(tmp_path / "other.pub") in caught.value.reason
    assert fingerprint(sshd.folder / "host_ed25519.pub") in caught.value.reason
    assert f"ssh-keygen -f {path} -R '[127.0.0.1]:{sshd.port}'" in caught.value.hint
    assert len(Path(path).read_text().splitlines()) == 3


def test_a_known_key_that_paramiko_lacks_is_not_called_changed(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    """Debian's OpenSSH 10.6 makes such host keys."""
    known = f"[127.0.0.1]:{sshd.port} ssh-mldsa44-ed25519 AAAA\n"
    path = known_hosts(tmp_path, known)
    with pytest.raises(HostKeyError) as caught:
        transport.connect(host_on(sshd, known_hosts=path, host_keys="accept-new"))
    assert "has only ssh-mldsa44-ed25519 SHA256:" in caught.value.reason
    assert f"({path}:1), a type of key that dtrain does not support" in caught.value.reason
    assert f"ssh-keyscan -t ssh-ed25519 -p {sshd.port} 127.0.0.1 >>{path}" in caught.value.hint
    assert Path(path).read_text() == known


def test_a_key_of_another_type_is_not_accepted_as_new(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    other = public_key(tmp_path / "other", "ecdsa")
    path = known_hosts(tmp_path, f"[127.0.0.1]:{sshd.port} {other}\n")
    with pytest.raises(HostKeyError, match="its host key has changed"):
        transport.connect(host_on(sshd, known_hosts=path, host_keys="accept-new"))


def test_a_server_with_several_keys_is_asked_for_the_known_one(
    transport: SshTransport, tmp_path: Path
) -> None:
    with running_sshd(tmp_path, host_key_types=("ed25519", "ecdsa", "rsa")) as sshd:
        for kind in ("rsa", "ecdsa", "ed25519"):
            path = tmp_path / kind
            path.write_text(f"[127.0.0.1]:{sshd.port} {sshd.host_key(kind)}\n")
            transport.connect(host_on(sshd, known_hosts=str(path))).close()


def test_a_revoked_key_is_refused_even_when_it_is_known(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    text = f"[127.0.0.1]:{sshd.port} {sshd.host_key()}\n@revoked * {sshd.host_key()}\n"
    path = known_hosts(tmp_path, text)
    with pytest.raises(HostKeyError, match="is revoked") as caught:
        transport.connect(host_on(sshd, known_hosts=path, host_keys="accept-new"))
    assert f"{path}:2" in caught.value.reason


def test_the_key_of_a_certificate_authority_is_not_a_host_key(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    path = known_hosts(tmp_path, f"@cert-authority * {sshd.host_key()}\n")
    with pytest.raises(
        HostKeyError, match=r"its host key is unknown: .* it has no certificate from the CA"
    ):
        transport.connect(host_on(sshd, known_hosts=path))


class BorrowedKey(paramiko.ECDSAKey):
    """Presents another server's public key but signs with its own."""

    def __init__(self, shown: bytes) -> None:
        own = paramiko.ECDSAKey.generate()
        super().__init__(vals=(own.signing_key, own.verifying_key))
        self.shown = shown

    def asbytes(self) -> bytes:
        return self.shown


@pytest.mark.parametrize("kind", ["ecdsa", "ed25519"])
def test_a_server_without_the_private_key_is_refused(
    transport: SshTransport, tmp_path: Path, kind: str
) -> None:
    known = public_key(tmp_path / "known_key", kind)
    with SshServer(b"", BorrowedKey(base64.b64decode(known.split()[1]))) as server:
        path = known_hosts(tmp_path, f"[127.0.0.1]:{server.port} {known}\n")
        host = Host("gpu01", "127.0.0.1", ssh=Ssh(port=server.port, known_hosts=path))
        with pytest.raises(HostKeyError, match="the server did not prove its identity"):
            transport.connect(host)
        assert server.connections == 1


class LongerKey(paramiko.ECDSAKey):
    """Presents its public key with more bytes, which make it another line of a file."""

    def asbytes(self) -> bytes:
        return bytes(super().asbytes()) + b"more"


def test_a_revoked_key_in_another_encoding_is_refused(
    transport: SshTransport, tmp_path: Path
) -> None:
    own = paramiko.ECDSAKey.generate()
    path = known_hosts(tmp_path, f"@revoked * {own.get_name()} {own.get_base64()}\n")
    shown = LongerKey(vals=(own.signing_key, own.verifying_key))
    with SshServer(b"", shown) as server:
        ssh = Ssh(port=server.port, known_hosts=path, host_keys="accept-new")
        with pytest.raises(HostKeyError, match="not in the standard encoding"):
            transport.connect(Host("gpu01", "127.0.0.1", ssh=ssh))


def test_a_server_that_changes_its_key_while_connected(
    transport: SshTransport, tmp_path: Path
) -> None:
    key = generate_key(tmp_path / "key")
    public = base64.b64decode(Path(f"{key}.pub").read_text().split()[1])
    with SshServer(public) as server:
        path = known_hosts(tmp_path, server.host_key_line)
        ssh = Ssh(port=server.port, known_hosts=path, identity=str(key))
        connection = transport.connect(Host("gpu01", "127.0.0.1", ssh=ssh))
        process = connection.start("exec cat")
        (served,) = server._transports
        served.add_server_key(paramiko.ECDSAKey.generate())
        with suppress(paramiko.SSHException, EOFError):
            served.renegotiate_keys()
        with pytest.raises(ConnectError, match="its host key changed during the connection"):
            process.read()


def test_accept_new_records_the_key_for_next_time(
    make_transport: Callable[..., SshTransport], sshd: Sshd, home: Path, notices: list[str]
) -> None:
    host = host_on(sshd, known_hosts=None, host_keys="accept-new")
    make_transport().connect(host).close()
    path = home / ".ssh" / "known_hosts"
    assert path.read_text() == f"[127.0.0.1]:{sshd.port} {sshd.host_key()}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    shown = fingerprint(sshd.folder / "host_ed25519.pub")
    assert notices == [
        f"gpu01: accepted the new host key ssh-ed25519 {shown} and recorded it in {path}"
    ]
    make_transport().connect(host_on(sshd, known_hosts=None)).close()


def test_accept_new_hashes_when_ssh_is_configured_to(
    transport: SshTransport, sshd: Sshd, home: Path
) -> None:
    (home / ".ssh" / "config").write_text("HashKnownHosts yes\n")
    host = host_on(sshd, known_hosts=None, host_keys="accept-new")
    transport.connect(host).close()
    path = home / ".ssh" / "known_hosts"
    assert path.read_text().startswith("|1|")
    # ssh-keygen finds it there.
    name = f"[127.0.0.1]:{sshd.port}"
    subprocess.run(["ssh-keygen", "-F", name, "-f", path], check=True, capture_output=True)


def test_many_hosts_accepted_at_once_make_one_line_each(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "known_hosts"
    path.parent.mkdir()
    # The last line has no newline, as in files edited by hand.
    path.write_text("unrelated ssh-ed25519 AAAA")
    config = tmp_path / "config"
    # Sixteen hosts under eight names: two threads race for each line.
    aliases = (f"Host gpu{n:02}\n  HostKeyAlias alias{n // 2:02}\n" for n in range(16))
    config.write_text("".join(aliases))
    hosts = [
        host_on(
            sshd,
            f"gpu{n:02}",
            known_hosts=str(path),
            host_keys="accept-new",
            config=str(config),
        )
        for n in range(16)
    ]
    with ThreadPoolExecutor(16) as pool:
        for connection in pool.map(transport.connect, hosts):
            connection.close()
    first, *rest = path.read_text().splitlines()
    assert first == "unrelated ssh-ed25519 AAAA"
    assert sorted(rest) == [f"alias{n:02} {sshd.host_key()}" for n in range(8)]


def test_a_key_that_cannot_be_recorded_is_not_accepted(
    transport: SshTransport, sshd: Sshd, tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(HostKeyError, match=r"cannot (record|read)"):
        transport.connect(
            host_on(sshd, known_hosts=str(tmp_path / "folder"), host_keys="accept-new")
        )


@pytest.mark.parametrize(
    ("patterns", "host", "expected"),
    [
        ("*", "anything", True),
        ("gpu0?", "gpu01", True),
        ("gpu0?", "gpu10", False),
        ("GPU01", "gpu01", True),
        ("gpu* !gpu07", "gpu07", False),
        ("!gpu07 gpu*", "gpu08", True),
        ("!gpu07", "gpu08", False),
        ("gpu[01]", "gpu0", False),
        ("[gpu01]:2201", "[gpu01]:2201", True),
    ],
)
def test_host_patterns(patterns: str, host: str, expected: bool) -> None:
    assert matches(host, patterns.split()) is expected

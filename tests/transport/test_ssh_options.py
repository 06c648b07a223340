"""How dtrain treats each option: applied, refused by name, or ignored with a notice."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import paramiko
import pytest

from dtrain.diagnostics import AuthError, ConnectError, HostKeyError
from dtrain.spec.model import Host, Ssh
from dtrain.transport.endpoint import Resolver
from dtrain.transport.ssh import SshTransport
from dtrain.transport.ssh_options import NAMES
from dtrain.transport.ssh_transport import ClientTransport
from support.limits import HANG
from support.sshd import Sshd, generate_key, host_on, running_sshd


def resolve(tmp_path: Path, config: str, notices: list[str] | None = None) -> None:
    (tmp_path / "config").write_text(config)
    say = (notices if notices is not None else []).append
    resolver = Resolver(tmp_path, say)
    resolver.resolve(Host("gpu01", "gpu01", ssh=Ssh(config="config")))


def test_every_option_that_ssh_prints_is_in_a_group() -> None:
    command = ["ssh", "-G", "-F", "none", "host"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    printed = {line.split()[0].lower() for line in done.stdout.decode().splitlines()}
    assert len(printed) > 60
    assert [keyword for keyword in printed if keyword not in NAMES] == []


@pytest.mark.parametrize(
    "line",
    [
        "BindInterface lo",
        "CheckHostIP yes",
        "KnownHostsCommand /bin/true",
        "PKCS11Provider /usr/lib/token.so",
        "PreferredAuthentications password",
        "ProxyUseFdpass yes\nProxyCommand nc %h %p",
        "PermitLocalCommand yes\nLocalCommand true",
        "PubkeyAuthentication no",
        "RekeyLimit 1M",
        "RemoteCommand tmux",
        "SessionType none",
        "Tunnel yes",
    ],
)
def test_an_option_that_dtrain_does_not_support_is_refused_by_name(
    tmp_path: Path, line: str
) -> None:
    with pytest.raises(ConnectError) as caught:
        resolve(tmp_path, line + "\n")
    assert line.split()[0] in caught.value.reason
    assert caught.value.hint
    resolve(tmp_path, f"Host other\n{line}\n")


def test_ignored_options_give_a_notice(tmp_path: Path) -> None:
    notices: list[str] = []
    resolve(tmp_path, "ForwardAgent yes\nLocalForward 80 x:80\nForwardX11 no\n", notices)
    assert sorted(re.findall(r"gpu01: (\w+) in ssh's configuration", "".join(notices))) == [
        "ForwardAgent",
        "LocalForward",
    ]


HOSTILE = ["$(touch ran)", "`touch ran`", "a;touch ran", "-oProxyCommand=x", "a|b", "a\nb", "'a'"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused_on_every_route(tmp_path: Path, name: str) -> None:
    quoted = '"' + name.replace('"', "") + '"'
    (tmp_path / "config").write_text("ProxyCommand nc %r %h %p\n")
    resolver = Resolver(tmp_path, print)
    settings = [
        Host("gpu01", "gpu01", ssh=Ssh(config="config", user=name)),
        Host("gpu01", name, ssh=Ssh(config="config")),
        Host("gpu01", "gpu01", ssh=Ssh(config="config", jump=f"{name}@gate")),
        Host("gpu01", "gpu01", ssh=Ssh(config="config", jump=f"inner,{name}")),
    ]
    for host in settings:
        with pytest.raises(ConnectError):
            resolver.resolve(host)
    if "\n" not in name:
        for line in ("User", "HostName", "HostKeyAlias"):
            with pytest.raises(ConnectError, match="OpenSSH refuses"):
                resolve(tmp_path, f"{line} {quoted}\nProxyCommand nc %r %h %k\n")
        with pytest.raises(ConnectError):
            resolve(tmp_path, f"ProxyJump {name}@gate\n")


@pytest.fixture
def connect(transport: SshTransport, sshd: Sshd, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Connects with a configuration. Returns a status and the client address."""

    def connect(config: str, sshd: Sshd = sshd, **ssh: object) -> tuple[int, str]:
        (tmp_path / "config").write_text(config)
        connection = transport.connect(host_on(sshd, config=str(tmp_path / "config"), **ssh))
        process = connection.start("echo ${SSH_CONNECTION%% *}; exit 7")
        shown = process.read().decode().strip()
        status = process.wait(HANG)
        connection.close()
        return status, shown

    return connect


@pytest.mark.sshd
def test_options_of_the_connection(connect: Callable[..., tuple[int, str]], sshd: Sshd) -> None:
    config = "BindAddress 127.0.0.2\nCompression yes\nCiphers aes256-ctr\nMACs hmac-sha2-512\n"
    assert connect(config + "KexAlgorithms ecdh-sha2-nistp384\n") == (7, "127.0.0.2")
    with pytest.raises(ConnectError, match=r"none of the Ciphers .*chacha20"):
        connect("Ciphers chacha20-poly1305@openssh.com\n")
    with pytest.raises(ConnectError, match=r"cannot use BindAddress 192\.0\.2\.1"):
        connect("BindAddress 192.0.2.1\n")


@pytest.mark.sshd
def test_weak_algorithms_are_not_offered(
    connect: Callable[..., tuple[int, str]], tmp_path: Path, sshd: Sshd
) -> None:
    settings = {"Ciphers": "aes128-cbc,aes256-cbc"}
    with (
        running_sshd(tmp_path, identity=sshd.identity, settings=settings) as weak,
        pytest.raises(ConnectError, match="the server allows only Ciphers aes128-cbc,") as refused,
    ):
        connect("", weak)
    assert "in its sshd_config: Ciphers aes128-" in refused.value.hint


@pytest.mark.sshd
@pytest.mark.parametrize("name", ["curve25519-sha256", "curve25519-sha256@libssh.org"])
def test_both_names_of_a_key_exchange(
    connect: Callable[..., tuple[int, str]], tmp_path: Path, sshd: Sshd, name: str
) -> None:
    settings = {"KexAlgorithms": name}
    with running_sshd(tmp_path, identity=sshd.identity, settings=settings) as strict:
        assert connect("", strict)[0] == 7


def test_key_exchanges_keep_their_order() -> None:
    """Since OpenSSH 10.6, sshd warns of each login without its first method, which resists quantum
    computers."""
    own = list(ClientTransport._preferred_kex)
    assert own.index("curve25519-sha256") + 1 == own.index("curve25519-sha256@libssh.org")
    own.remove("curve25519-sha256")
    assert own == list(paramiko.Transport._preferred_kex)  # type: ignore[attr-defined]


def test_openssl_in_fips_mode_leaves_out_the_key_exchange() -> None:
    code = """
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

def generate():
    raise UnsupportedAlgorithm("X25519 is not supported")

X25519PrivateKey.generate = generate
from dtrain.transport.ssh_transport import ClientTransport
print(*ClientTransport._preferred_kex)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "ecdh-sha2-nistp256" in done.stdout
    assert "curve25519" not in done.stdout


@pytest.mark.sshd
@pytest.mark.parametrize("form", ["text", "krl", "krl of others"])
def test_revoked_host_keys(
    connect: Callable[..., tuple[int, str]], sshd: Sshd, tmp_path: Path, form: str
) -> None:
    revoked = tmp_path / "revoked"
    revoked.write_text(f"# stolen\n{sshd.host_key()}\n")
    if form != "text":
        keys = f"{generate_key(tmp_path / 'other')}.pub" if "others" in form else str(revoked)
        krl = tmp_path / "krl"
        subprocess.run(["ssh-keygen", "-q", "-k", "-f", krl, keys], check=True)
        krl.rename(revoked)
    if form == "krl of others":
        assert connect(f"RevokedHostKeys {revoked}\n")[0] == 7
        return
    with pytest.raises(HostKeyError, match=r"its host key .* is revoked"):
        connect(f"RevokedHostKeys {revoked}\n", host_keys="accept-new")
    revoked.unlink()
    with pytest.raises(HostKeyError, match=r"cannot check RevokedHostKeys"):
        connect(f"RevokedHostKeys {revoked}\n")


@pytest.mark.sshd
def test_small_rsa_keys(connect: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    with running_sshd(tmp_path, host_key_types=("rsa",)) as rsa:
        assert connect("RequiredRSASize 2048\n", rsa)[0] == 7
        with pytest.raises(HostKeyError, match=r"2048 bits.*requires 3072 \(RequiredRSASize"):
            connect("RequiredRSASize 3072\n", rsa)


@pytest.mark.sshd
def test_keys_that_the_configuration_excludes(
    connect: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    with pytest.raises(AuthError, match="its type is not in PubkeyAcceptedAlgorithms"):
        connect("PubkeyAcceptedAlgorithms rsa-sha2-512\n")
    small = str(generate_key(tmp_path / "small", "rsa"))
    with pytest.raises(AuthError, match="2048 bits are less than RequiredRSASize 3072"):
        connect("RequiredRSASize 3072\n", identity=small)

"""Logins with the host key of this machine, with the real ssh-keysign and a real sshd.

Both read /etc/ssh. Each sees a folder of the test there.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtrain.diagnostics import AuthError
from dtrain.spec.model import Host
from dtrain.transport import host_login
from dtrain.transport.ssh import SshTransport
from support.sshd import Sshd, generate_key, host_on, mounted, running_sshd

# Root is needed to mount folders.
pytestmark = [pytest.mark.sshd, pytest.mark.netns]

# The account of the tests has no line of its own in shosts.equiv if it is root.
USER = "nobody"
NAMES = ("localhost", socket.gethostname())
SETTINGS = {
    "HostbasedAuthentication": "yes",
    # Or the addresses of the tests would need names.
    "HostbasedUsesNameFromPacketOnly": "yes",
}
ONLY_HOSTS = {**SETTINGS, "AuthenticationMethods": "hostbased"}


@pytest.fixture
def etc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The /etc/ssh of ssh-keysign and sshd: each trusts this machine, and root on it."""
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "ssh_config").write_text("EnableSSHKeysign yes\n")
    (folder / "shosts.equiv").write_text("".join(f"{name} root\n" for name in NAMES))
    known = []
    for kind in ("ed25519", "rsa"):
        key = generate_key(folder / f"ssh_host_{kind}_key", kind)
        known.append(Path(f"{key}.pub").read_text())
    authority = generate_key(tmp_path / "authority")
    names = ["-h", "-I", "here", "-n", ",".join(NAMES), f"{folder}/ssh_host_ed25519_key.pub"]
    subprocess.run(["ssh-keygen", "-q", "-s", str(authority), *names], check=True)
    lines = [f"{','.join(NAMES)} {key}" for key in known]
    lines.append(f"@cert-authority * {Path(f'{authority}.pub').read_text()}")
    (folder / "ssh_known_hosts").write_text("".join(lines))
    program = next(path for path in host_login.PROGRAMS if Path(path).exists())
    wrapper = tmp_path / "ssh-keysign"
    wrapper.write_text(f"#!/bin/sh\nexec {shlex.join(mounted(folder, '/etc/ssh'))} {program}\n")
    wrapper.chmod(0o755)
    monkeypatch.setattr(host_login, "PROGRAMS", (str(wrapper),))
    monkeypatch.setattr(host_login, "FOLDER", folder)
    return folder


@pytest.fixture
def server(etc: Path, tmp_path: Path) -> Iterator[Sshd]:
    """An sshd that accepts only host keys of its clients."""
    with running_sshd(tmp_path, settings=ONLY_HOSTS, etc=etc) as found:
        yield found


@pytest.fixture(autouse=True)
def permitted(home: Path) -> None:
    configure(home, "HostbasedAuthentication yes")


def configure(home: Path, *lines: str) -> None:
    (home / ".ssh" / "config").write_text("\n".join(("HashKnownHosts no", *lines)) + "\n")


def on(sshd: Sshd) -> Host:
    return host_on(sshd, user=USER, identity=None)


@pytest.mark.parametrize(
    ("algorithms", "used"),
    [
        ("ssh-ed25519,rsa-sha2-512", "ED25519 public key"),
        ("rsa-sha2-512,ssh-ed25519", "RSA public key"),
        ("ssh-ed25519-cert-v01@openssh.com", "certificate ID"),
    ],
)
def test_the_host_key_of_this_machine_logs_in(
    transport: SshTransport, server: Sshd, home: Path, algorithms: str, used: str
) -> None:
    configure(home, "HostbasedAuthentication yes", f"HostbasedAcceptedAlgorithms {algorithms}")
    transport.connect(on(server)).close()
    server.wait_for_log(rf"Accepted {used} .* from root@localhost\s+Accepted hostbased for {USER} ")


def test_behind_a_jump_host_the_name_of_this_machine_counts(
    transport: SshTransport, server: Sshd, sshd: Sshd, home: Path
) -> None:
    """As in ssh."""
    command = f"ProxyCommand {relay(sshd)}"
    configure(home, "HostbasedAuthentication yes", command)
    transport.connect(on(server)).close()
    server.wait_for_log(rf"Accepted .* from root@{NAMES[1]}\s+Accepted hostbased for {USER} ")


def relay(sshd: Sshd) -> str:
    return (
        f"ssh -F none -i {sshd.identity} -o UserKnownHostsFile={sshd.known_hosts} -W %h:%p"
        f" -p {sshd.port} {sshd.user}@{sshd.address}"
    )


@pytest.mark.parametrize("relayed", [False, True])
def test_a_server_that_does_not_trust_this_machine(
    transport: SshTransport, server: Sshd, sshd: Sshd, home: Path, etc: Path, relayed: bool
) -> None:
    (etc / "shosts.equiv").write_text("elsewhere\n")
    if relayed:
        configure(home, "HostbasedAuthentication yes", f"ProxyCommand {relay(sshd)}")
    name = NAMES[relayed]
    refusal = f"only hostbased \\(host-based: the server refused the host key of {name}, this m"
    with pytest.raises(AuthError, match=refusal) as caught:
        transport.connect(on(server))
    assert f"/etc have {name}, and" in caught.value.hint
    assert ("`HostbasedUsesNameFromPacketOnly yes`" in caught.value.hint) == relayed


def no_permission(etc: Path) -> None:
    (etc / "ssh_config").write_text("")


def unreadable_keys(etc: Path) -> None:
    for path in etc.glob("ssh_host_*_key"):
        path.unlink()


def other_keys(etc: Path) -> None:
    for path in etc.glob("ssh_host_*"):
        path.unlink()
    generate_key(etc / "ssh_host_other_key", "ecdsa")
    generate_key(etc / "ssh_host_rsa_key", "rsa")


def no_keys(etc: Path) -> None:
    for path in etc.glob("ssh_host_*"):
        path.unlink()


def no_program(_etc: Path) -> None:
    Path(host_login.PROGRAMS[0]).unlink()


def silent_program(etc: Path) -> None:
    """A second run would sign."""
    program = Path(host_login.PROGRAMS[0])
    signs = etc / "signs"
    program.rename(signs)
    program.write_text(f"#!/bin/sh\nmv {signs} $0; exec sleep 1000\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("fault", "problem", "hint"),
    [
        (no_permission, "ssh-keysign does not sign: ssh-keysign not enabled", "EnableSSHKeysign"),
        # As for a program without its set-uid bit, which is no matter for root.
        (unreadable_keys, "could not open any host key", "must be set-uid root"),
        (other_keys, "no matching hostkey found for key ECDSA", "check whether `ssh "),
        (no_keys, "this machine has no host keys", "ssh-keygen -A"),
        (no_program, "ssh-keysign is not installed", "openssh-client on Debian"),
        (silent_program, "ssh-keysign did not answer within 0.1 s", "check the name server"),
    ],
)
def test_without_a_signature_the_error_says_why(
    transport: SshTransport,
    server: Sshd,
    etc: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: object,
    problem: str,
    hint: str,
) -> None:
    assert callable(fault)
    if fault is silent_program:
        monkeypatch.setattr(host_login, "TIMEOUT", 0.1)
    fault(etc)
    with pytest.raises(AuthError, match=rf"only hostbased \(host-based: .*{problem}") as caught:
        transport.connect(on(server))
    assert hint in caught.value.hint


def test_without_permission_no_host_key_is_used(
    transport: SshTransport, server: Sshd, home: Path
) -> None:
    configure(home)
    with pytest.raises(AuthError, match=r"it accepts no keys, only hostbased$") as caught:
        transport.connect(on(server))
    assert caught.value.hint == "set `HostbasedAuthentication yes` in ssh's configuration"


def test_without_a_common_algorithm_the_error_names_the_option(
    transport: SshTransport, server: Sshd, home: Path
) -> None:
    configure(
        home, "HostbasedAuthentication yes", "HostbasedAcceptedAlgorithms ecdsa-sha2-nistp256"
    )
    with pytest.raises(AuthError, match="HostbasedAcceptedAlgorithms excludes the host keys"):
        transport.connect(on(server))


def test_a_key_logs_in_after_a_refused_host_key(
    transport: SshTransport, etc: Path, tmp_path: Path
) -> None:
    with running_sshd(tmp_path, settings=SETTINGS, etc=etc) as sshd:
        transport.connect(host_on(sshd)).close()
        sshd.wait_for_log("Failed hostbased for root(?s:.*)Accepted publickey")


def test_the_order_of_methods_is_that_of_ssh(
    transport: SshTransport, etc: Path, tmp_path: Path, home: Path
) -> None:
    order = "PreferredAuthentications publickey,hostbased"
    configure(home, "HostbasedAuthentication yes", order)
    with running_sshd(tmp_path, settings=SETTINGS, etc=etc) as sshd:
        transport.connect(host_on(sshd)).close()
        sshd.wait_for_log("Accepted publickey")
        assert "hostbased for" not in sshd.log()


def test_a_server_may_require_another_method_as_well(
    transport: SshTransport, etc: Path, tmp_path: Path
) -> None:
    both = {**SETTINGS, "AuthenticationMethods": "hostbased,publickey"}
    with running_sshd(tmp_path, settings=both, etc=etc) as sshd:
        accepted = "it accepted the host key of this machine but also requires publickey"
        with pytest.raises(AuthError, match=accepted):
            transport.connect(on(sshd))

"""Host certificates on a real sshd, compared with the verdict of the real ssh."""

from __future__ import annotations

import base64
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from dtrain.diagnostics import HostKeyError
from dtrain.transport.server_key import CertificateError, read_host_key
from dtrain.transport.ssh import SshTransport
from support.limits import HANG
from support.sshd import Sshd, generate_key, host_on, running_sshd

pytestmark = pytest.mark.sshd


@dataclass
class Keys:
    """Two CAs, and the host keys that they sign."""

    folder: Path

    def path(self, name: str, kind: str = "ed25519") -> Path:
        path = self.folder / f"{name}_{kind}"
        return path if path.exists() else generate_key(path, kind)

    def public(self, name: str, kind: str = "ed25519") -> str:
        return " ".join(Path(f"{self.path(name, kind)}.pub").read_text().split()[:2])

    def fingerprint(self, name: str, kind: str = "ed25519") -> str:
        command = ["ssh-keygen", "-l", "-f", f"{self.path(name, kind)}.pub"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[1]

    def sign(
        self, *options: str, ca: str = "ca", ca_kind: str = "ed25519", kind: str = "ed25519"
    ) -> Path:
        """Sign the host key. ``options`` are options of ssh-keygen."""
        command = ["ssh-keygen", "-q", "-s", str(self.path(ca, ca_kind)), "-I", "the id", "-z", "7"]
        subprocess.run([*command, *options, f"{self.path('host', kind)}.pub"], check=True)
        return Path(f"{self.path('host', kind)}-cert.pub")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


@contextmanager
def certified_sshd(
    tmp_path: Path,
    keys: Keys,
    certificate: Path,
    kind: str = "ed25519",
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Sshd]:
    with running_sshd(
        tmp_path,
        host_key_types=(),
        identity=keys.path("user"),
        settings={
            "HostKey": str(keys.path("host", kind)),
            "HostCertificate": str(certificate),
            **settings,
        },
    ) as sshd:
        yield sshd


def ssh_connects(sshd: Sshd, known_hosts: Path, *options: str) -> bool:
    """The verdict of OpenSSH's client."""
    settings = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": str(known_hosts),
        "GlobalKnownHostsFile": "/dev/null",
        "IdentityAgent": "none",
    }
    words = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    command = ["ssh", "-F", "none", *words, *options, "-i", str(sshd.identity)]
    command += ["-p", str(sshd.port), f"{sshd.user}@{sshd.address}", "true"]
    return subprocess.run(command, check=False, capture_output=True, timeout=HANG).returncode == 0


NAME = ("-h", "-n", "127.0.0.1,other")
TRUSTED = "@cert-authority * {ca}\n"


@pytest.fixture
def known(tmp_path: Path) -> Path:
    return tmp_path / "known"


@pytest.mark.parametrize(
    "names", ["*", "[127.0.0.1]:{port}", "127.0.0.1", "[127.*]:{port}", "hashed"]
)
def test_names_of_an_authority(
    transport: SshTransport, tmp_path: Path, keys: Keys, known: Path, names: str
) -> None:
    with certified_sshd(tmp_path, keys, keys.sign(*NAME)) as sshd:
        written = names.replace("hashed", "127.0.0.1").format(port=sshd.port)
        known.write_text(f"{written} {keys.public('ca')}\n")
        if names == "hashed":
            # ssh-keygen does not hash a line with a marker, but ssh reads such a line.
            command = ["ssh-keygen", "-q", "-H", "-f", str(known)]
            subprocess.run(command, check=True, capture_output=True)
            assert "127.0" not in known.read_text()
        known.write_text(f"@cert-authority {known.read_text()}")
        assert ssh_connects(sshd, known)
        transport.connect(host_on(sshd, known_hosts=str(known))).close()


@pytest.mark.parametrize(
    ("kind", "ca_kind", "signature"),
    [
        ("rsa", "rsa", "rsa-sha2-256"),
        ("ecdsa", "rsa", "rsa-sha2-512"),
        ("ed25519", "ecdsa", None),
    ],
)
def test_types_of_keys(
    transport: SshTransport,
    tmp_path: Path,
    keys: Keys,
    known: Path,
    kind: str,
    ca_kind: str,
    signature: str | None,
) -> None:
    chosen = ("-t", signature) if signature else ()
    certificate = keys.sign(*NAME, *chosen, kind=kind, ca_kind=ca_kind)
    known.write_text(TRUSTED.format(ca=keys.public("ca", ca_kind)))
    with certified_sshd(tmp_path, keys, certificate, kind) as sshd:
        assert ssh_connects(sshd, known)
        connection = transport.connect(host_on(sshd, known_hosts=str(known)))
        assert connection.start("exit 5").wait(HANG) == 5
        connection.close()


def test_a_signature_that_the_user_excludes(
    transport: SshTransport, tmp_path: Path, keys: Keys, known: Path, home: Path
) -> None:
    known.write_text(TRUSTED.format(ca=keys.public("ca")))
    (home / ".ssh" / "config").write_text("CASignatureAlgorithms rsa-sha2-512\n")
    with certified_sshd(tmp_path, keys, keys.sign(*NAME)) as sshd:
        excluded = "signed it with ssh-ed25519, which CASignatureAlgorithms excludes"
        with pytest.raises(HostKeyError, match=excluded):
            transport.connect(host_on(sshd, known_hosts=str(known)))


@dataclass(frozen=True)
class Refused:
    """A certificate, the contents of known_hosts, and why dtrain refuses."""

    reason: str
    options: tuple[str, ...] = NAME
    lines: str = TRUSTED
    ca: str = "ca"
    ca_kind: str = "ed25519"
    host_keys: str = "accept-new"
    revoked: bool = False
    newer_ssh_differs: bool = False


REFUSED = {
    "expired": Refused("it expired on 20", (*NAME, "-V", "-2d:-1d")),
    "not yet valid": Refused("it is not valid before 20", (*NAME, "-V", "+1d:+2d")),
    "another host": Refused("it is valid for a, b, not for 127.0.0.1", ("-h", "-n", "a,b")),
    "name of the cluster": Refused(
        "it is valid for gpu01, not for 127.0.0.1", ("-h", "-n", "gpu01")
    ),
    "another CA": Refused(r"its CA is not a CA of this host \(.*known:1\)", ca="rogue"),
    "user certificate": Refused("it is a user certificate", ("-n", "127.0.0.1")),
    "critical option": Refused("critical options.*: x", (*NAME, "-O", "critical:x=y")),
    "SHA-1": Refused(
        "its CA signed it with ssh-rsa, which CASignatureAlgorithms",
        (*NAME, "-t", "ssh-rsa"),
        "@cert-authority * {rsa_ca}\n",
        ca_kind="rsa",
    ),
    "wildcard principal": Refused(
        "does not match wildcards", ("-h", "-n", "127.*"), newer_ssh_differs=True
    ),
    "revoked CA": Refused(
        r"the CA of its certificate 'the id' \(serial 7, .* is revoked \(.*known:2\)",
        lines=TRUSTED + "@revoked * {ca}\n",
        revoked=True,
    ),
    "revoked key": Refused(
        r"its host key .* is revoked \(.*known:2\)",
        lines=TRUSTED + "@revoked * {host}\n",
        revoked=True,
    ),
    "revoked certificate": Refused(
        r"its host key .* is revoked \(.*known:2\)",
        lines=TRUSTED + "@revoked * {certificate}\n",
        revoked=True,
    ),
    "excluded host": Refused(
        "key is unknown", lines="@cert-authority *,!*127.0.0.1* {ca}\n", host_keys="strict"
    ),
    "another port": Refused(
        "key is unknown", lines="@cert-authority [127.0.0.1]:1 {ca}\n", host_keys="strict"
    ),
    "not an authority": Refused("key is unknown", lines="127.0.0.1 {ca}\n", host_keys="strict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(
    make_transport: Callable[..., SshTransport],
    tmp_path: Path,
    keys: Keys,
    known: Path,
    name: str,
) -> None:
    case = REFUSED[name]
    public = {
        "ca": keys.public("ca"),
        "rsa_ca": keys.public("ca", "rsa"),
        "host": keys.public("host"),
    }
    # A line with another certificate of the same key.
    public["certificate"] = keys.sign("-h", "-n", "another").read_text().strip()
    certificate = keys.sign(*case.options, ca=case.ca, ca_kind=case.ca_kind)
    with certified_sshd(tmp_path, keys, certificate) as sshd:
        known.write_text(case.lines.format(**public))
        host = host_on(sshd, known_hosts=str(known), host_keys=case.host_keys)
        assert case.newer_ssh_differs or not ssh_connects(sshd, known)
        with pytest.raises(HostKeyError, match=case.reason) as caught:
            make_transport().connect(host)
        assert caught.value.hint
        # Nothing was recorded. A line with the plain key still makes the host known, unless
        # something is revoked.
        assert known.read_text() == case.lines.format(**public)
        known.write_text(known.read_text() + f"127.0.0.1 {keys.public('host')}\n")
        if case.revoked:
            with pytest.raises(HostKeyError, match="is revoked"):
                make_transport().connect(host)
        else:
            make_transport().connect(host).close()
        assert ssh_connects(sshd, known) != case.revoked


def test_a_refusal_names_the_certificate(
    transport: SshTransport, tmp_path: Path, keys: Keys, known: Path
) -> None:
    known.write_text(TRUSTED.format(ca=keys.public("ca")))
    with (
        certified_sshd(tmp_path, keys, keys.sign("-h", "-n", "gpu01")) as sshd,
        pytest.raises(HostKeyError) as caught,
    ):
        transport.connect(host_on(sshd, known_hosts=str(known)))
    assert caught.value.reason == (
        f"its certificate 'the id' (serial 7, CA ssh-ed25519 {keys.fingerprint('ca')}) does not "
        "prove that it is this host: it is valid for gpu01, not for 127.0.0.1; its key is also "
        f"unknown: ssh-ed25519 {keys.fingerprint('host')}"
    )
    assert "`HostKeyAlias gpu01`" in caught.value.hint


@pytest.mark.parametrize("kind", ["CA", "key", "serial", "CA in a KRL", "other serial"])
def test_revoked_host_keys(
    transport: SshTransport, tmp_path: Path, keys: Keys, known: Path, home: Path, kind: str
) -> None:
    known.write_text(TRUSTED.format(ca=keys.public("ca")))
    revoked = tmp_path / "revoked"
    if kind in {"CA", "key"}:
        revoked.write_text(keys.public("ca" if kind == "CA" else "host"))
    else:
        (tmp_path / "list").write_text(
            {"serial": "serial: 7", "other serial": "serial: 8"}.get(kind, keys.public("ca"))
        )
        command = ["ssh-keygen", "-q", "-k", "-f", str(revoked), "-s", f"{keys.path('ca')}.pub"]
        subprocess.run([*command, str(tmp_path / "list")], check=True)
    (home / ".ssh" / "config").write_text(f"RevokedHostKeys {revoked}\n")
    with certified_sshd(tmp_path, keys, keys.sign(*NAME)) as sshd:
        host = host_on(sshd, known_hosts=str(known))
        accepted = kind == "other serial"
        option = ("-o", f"RevokedHostKeys={revoked}")
        assert ssh_connects(sshd, known, *option) == accepted
        if accepted:
            transport.connect(host).close()
            return
        with pytest.raises(HostKeyError, match=rf"is revoked \({revoked}\)"):
            transport.connect(host)


def test_an_alias_replaces_the_name(
    transport: SshTransport, tmp_path: Path, keys: Keys, known: Path, home: Path
) -> None:
    (home / ".ssh" / "config").write_text("HostKeyAlias gpu01\n")
    known.write_text(f"@cert-authority gpu* {keys.public('ca')}\n")
    with certified_sshd(tmp_path, keys, keys.sign("-h", "-n", "gpu01")) as sshd:
        assert ssh_connects(sshd, known, "-o", "HostKeyAlias=gpu01")
        transport.connect(host_on(sshd, known_hosts=str(known))).close()


def test_a_certificate_without_principals_is_valid_for_no_host(
    transport: SshTransport, tmp_path: Path, keys: Keys, known: Path
) -> None:
    # OpenSSH before 10.3 accepts it for every host.
    known.write_text(TRUSTED.format(ca=keys.public("ca")))
    with (
        certified_sshd(tmp_path, keys, keys.sign("-h")) as sshd,
        pytest.raises(HostKeyError, match=r"its list of principals .* is empty"),
    ):
        transport.connect(host_on(sshd, known_hosts=str(known)))


def test_a_host_without_a_certificate_is_known_by_its_key(
    transport: SshTransport, sshd: Sshd, keys: Keys, known: Path
) -> None:
    known.write_text(TRUSTED.format(ca=keys.public("ca")) + sshd.known_hosts.read_text())
    assert ssh_connects(sshd, known)
    transport.connect(host_on(sshd, known_hosts=str(known))).close()


def test_without_an_authority_the_key_in_the_certificate_is_checked(
    transport: SshTransport, tmp_path: Path, keys: Keys, known: Path
) -> None:
    known.write_text(f"127.0.0.1 {keys.public('host')}\n")
    settings = {"HostKeyAlgorithms": "ssh-ed25519-cert-v01@openssh.com"}
    with certified_sshd(tmp_path, keys, keys.sign(*NAME), settings=settings) as sshd:
        assert ssh_connects(sshd, known)
        transport.connect(host_on(sshd, known_hosts=str(known))).close()


def test_damaged_certificates_are_refused(keys: Keys) -> None:
    for kind in ("ed25519", "ecdsa", "rsa"):
        text = keys.sign(*NAME, kind=kind, ca_kind=kind).read_text()
        blob = base64.b64decode(text.split()[1])
        assert read_host_key(blob).certificate
        name = struct.unpack(">I", blob[:4])[0] + 4
        for position in range(name, len(blob)):
            flipped = bytearray(blob)
            flipped[position] ^= 1
            for damaged in (bytes(flipped), blob[:position], blob + bytes(1)):
                with pytest.raises(CertificateError):
                    read_host_key(damaged)

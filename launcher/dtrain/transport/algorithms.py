"""The algorithms and key sizes that a connection may use.

These are the algorithms of ssh's configuration that paramiko supports, without those that
OpenSSH's defaults exclude.
"""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import paramiko
from paramiko.ssh_exception import IncompatiblePeer

from dtrain.diagnostics import ConnectError, HostKeyError
from dtrain.framing import clean
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.memory_file import STDIN, memory_file
from dtrain.transport.server_key import HostKey
from dtrain.transport.ssh_transport import ClientTransport

# paramiko also offers CBC ciphers and MD5, which OpenSSH does not by default.
# GCM first: a separate MAC takes four times as long as the cipher.
CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "aes128-ctr",
    "aes192-ctr",
    "aes256-ctr",
)
MACS = (
    "hmac-sha2-256-etm@openssh.com",
    "hmac-sha2-512-etm@openssh.com",
    "hmac-sha2-256",
    "hmac-sha2-512",
    "hmac-sha1",
)
_KRL = b"SSHKRL\n\0"


def allow(transport: paramiko.Transport, endpoint: Endpoint, host_keys: tuple[str, ...]) -> None:
    """Restrict ``transport`` before its handshake. ``host_keys`` are the host key algorithms to
    request. Raises ConnectError if paramiko supports none of the allowed algorithms."""
    allowed = endpoint.algorithms
    options = transport.get_security_options()

    def choose(option: str, wanted: Iterable[str] | None, known: Sequence[str]) -> tuple[str, ...]:
        if wanted is None:
            return tuple(known)
        chosen = tuple(name for name in wanted if name in known)
        if not chosen:
            raise endpoint.error(
                ConnectError,
                f"paramiko supports none of the {option} that ssh's configuration allows: "
                + ", ".join(wanted),
                hint=f"allow one of these for this host: {option} {','.join(known)}",
            )
        return chosen

    options.ciphers = choose("Ciphers", allowed.ciphers or CIPHERS, options.ciphers)
    options.digests = choose("MACs", allowed.macs or MACS, options.digests)
    options.kex = choose("KexAlgorithms", allowed.kex, options.kex)
    known = options.key_types
    if allowed.host_keys is not None:
        # Known keys come first in `host_keys`, regardless of the configured order.
        choose("HostKeyAlgorithms", allowed.host_keys, known)
        host_keys = tuple(name for name in host_keys if name in allowed.host_keys)
    options.key_types = host_keys
    user_keys = choose("PubkeyAcceptedAlgorithms", allowed.user_keys, _user_keys(transport))
    transport.disabled_algorithms = {
        "pubkeys": [name for name in _user_keys(transport) if name not in user_keys]
    }
    if endpoint.compression:
        transport.use_compression()


def mismatch(transport: ClientTransport, failure: IncompatiblePeer) -> tuple[str, str]:
    """Why there is no common algorithm, and the remedy: each names a line of sshd_config."""
    ours = transport.get_security_options()
    for option, offered, known in (
        ("KexAlgorithms", "kex_algo_list", ours.kex),
        ("HostKeyAlgorithms", "server_key_algo_list", ours.key_types),
        ("Ciphers", "server_encrypt_algo_list", ours.ciphers),
        ("MACs", "server_mac_algo_list", ours.digests),
    ):
        theirs = transport.offered.get(offered)
        if theirs and not set(theirs) & set(known):
            # The names may be hostile.
            names = ",".join(clean(name)[:40] for name in theirs[:8])
            return (
                f"no common algorithm: the server allows only {option} {names}",
                f"allow one of these in its sshd_config: {option} {','.join(known)}",
            )
    return clean(str(failure))[:200], "the server's SSH is too old, or its settings are too strict"


def _user_keys(transport: paramiko.Transport) -> tuple[str, ...]:
    return tuple(transport._preferred_pubkeys)  # type: ignore[attr-defined]


def check_host_key(endpoint: Endpoint, key: HostKey, shown: bytes) -> None:
    """Check the key against RevokedHostKeys and RequiredRSASize.

    ``shown`` is the key or the certificate as the server sent it. Raises HostKeyError if a file of
    RevokedHostKeys is unreadable or lists ``key``, its certificate or the certificate's CA, and
    if an RSA key is smaller than RequiredRSASize.
    """
    bits = paramiko.RSAKey(data=key.blob).get_bits() if key.kind == "ssh-rsa" else None
    if bits is not None and bits < endpoint.algorithms.rsa_bits:
        raise endpoint.error(
            HostKeyError,
            f"its RSA host key has {bits} bits, and ssh's configuration requires "
            f"{endpoint.algorithms.rsa_bits} (RequiredRSASize)",
            hint="give the host a longer RSA key, or an ed25519 key",
        )
    for path in endpoint.revoked_host_keys:
        try:
            revoked = _lists(path, key, shown)
        except (OSError, subprocess.SubprocessError) as error:
            raise endpoint.error(
                HostKeyError,
                f"cannot check RevokedHostKeys {path}: {error}",
                hint="make the file readable, or remove RevokedHostKeys for this host",
            ) from error
        if revoked:
            raise endpoint.error(
                HostKeyError,
                f"its host key {key} or its certificate is revoked ({path})"
                if key.certificate
                else f"its host key {key} is revoked ({path})",
                hint="do not connect; ask the administrator of the host for its new key",
            )


def _lists(path: Path, key: HostKey, shown: bytes) -> bool:
    """Whether a file of revoked keys lists the server's key or certificate. Raises OSError."""
    data = path.read_bytes()
    encoded = base64.b64encode(shown).decode()
    if not data.startswith(_KRL):
        wanted = {encoded, base64.b64encode(key.blob).decode()}
        if key.certificate:
            wanted.add(base64.b64encode(key.certificate.authority.blob).decode())
        lines = data.decode(errors="replace").splitlines()
        return any(wanted.intersection(line.split()) for line in lines if line[:1] != "#")
    kind = paramiko.Message(shown).get_text()
    with memory_file(f"{kind} {encoded}\n".encode()) as public:
        command = ["ssh-keygen", "-Q", "-f", str(path), STDIN]
        answer = subprocess.run(
            command, stdin=public, capture_output=True, text=True, timeout=30, check=False
        )
    if answer.returncode not in {0, 1} or (answer.returncode and "REVOKED" not in answer.stdout):
        raise OSError((answer.stderr or answer.stdout).strip())
    return answer.returncode == 1

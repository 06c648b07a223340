"""The user's keys: key files with their passphrases, and the keys of the ssh agent.

dtrain asks for a passphrase at most once per key and launch (three times if it is wrong), and
only for a key that the server would accept. It keeps the decrypted key, never the passphrase.
"""

from __future__ import annotations

import base64
import binascii
import copy
import io
import os
import re
import select
import shlex
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
    load_ssh_private_key,
)
from paramiko.agent import AgentKey, AgentSSH
from paramiko.pkey import PublicBlob

from dtrain.records import dataclass
from dtrain.transport.endpoint import Algorithms, Endpoint
from dtrain.transport.questions import Ask
from dtrain.transport.server_key import CERTIFICATE_SUFFIX, RSA_SIGNATURES, fingerprint

PASSPHRASE_TRIES = 3
MAX_SIZE = 1 << 20
"""Maximum size of a key file, in bytes."""
AGENT_TIMEOUT = 60.0
"""Seconds for one reply of the agent: the user may have to touch a key or confirm."""
AGENT_ONLY = "dtrain can use this type of key only through the ssh agent (ssh-add)"
NOT_SIGNED = "the agent did not sign: the user declined, or it is locked or gone"

_MAGIC = b"openssh-key-v1\x00"
_FORMATS: dict[type, tuple[type[paramiko.PKey], PrivateFormat]] = {
    Ed25519PrivateKey: (paramiko.Ed25519Key, PrivateFormat.OpenSSH),
    RSAPrivateKey: (paramiko.RSAKey, PrivateFormat.TraditionalOpenSSL),
    EllipticCurvePrivateKey: (paramiko.ECDSAKey, PrivateFormat.TraditionalOpenSSL),
}


class UnusableKeyError(Exception):
    """A key that cannot be used. The message is the reason, in a few words."""


@dataclass(frozen=True, slots=True)
class PublicKey:
    kind: str
    """``ssh-ed25519``, …, or a certificate's type."""
    blob: bytes


@dataclass(frozen=True, slots=True)
class OfferedKey:
    """A key to offer to a server."""

    label: str
    """The name in messages: the path or the agent's comment, with the fingerprint."""
    public: PublicKey | None
    """None if it is known only after decryption."""
    load: Callable[[], paramiko.PKey]
    """The key itself, ready to sign. May ask for a passphrase; raises UnusableKeyError."""
    may_ask: Callable[[], bool]
    """Whether a login with it may ask the user."""
    path: Path | None = None
    from_agent: bool = False
    """Whether the agent signs. It may ask the user (``ssh-add -c``), or wait for a touch."""
    turn: AbstractContextManager[object] = nullcontext()
    """Held while the agent signs: it serves one login at a time."""


class Keyring:
    """The keys of one launch, shared by all its connections.

    ``ask`` asks the user for a passphrase. If it is None, encrypted keys are usable only through
    the agent.
    """

    def __init__(self, ask: Ask | None) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._files: dict[Path, _KeyFile | UnusableKeyError] = {}
        self._agents: dict[str, _Agent | None] = {}
        self._prompting = threading.Lock()
        self._closed = False

    def candidates(self, endpoint: Endpoint) -> tuple[list[OfferedKey], list[str]]:
        """Keys in the order to offer them, and why other keys are left out.

        A key set in the cluster file comes first: a server disconnects after a few refused keys,
        so an agent with many keys must not use up the attempts. Otherwise the order is ssh's:
        certificates of CertificateFile, configured keys that the agent holds, the agent's other
        keys, then the remaining files.
        """
        left_out: list[str] = []
        agent = self._agent(endpoint.agent, left_out)
        offered = {key.blob: key for key in agent.keys} if agent else {}
        files = [
            candidate
            for path in endpoint.identities
            for candidate in self._from_file(path, endpoint, offered, left_out, named=True)
        ]
        for path in endpoint.default_identities:
            files += self._from_file(path, endpoint, offered, left_out, named=False)
        others: list[OfferedKey] = []
        if agent and not endpoint.identities_only:
            for key in agent.keys:
                name = f"agent key {key.comment!r}"
                others += _agent_candidates(key, name, endpoint.certificates)
        found = [*files, *others]
        if not endpoint.identities_first:
            found = _in_order_of_ssh(files, others, [*offered], endpoint.certificates)
        unique: dict[object, OfferedKey] = {}
        for candidate in found:
            reason = _not_allowed(candidate.public, endpoint.algorithms)
            if reason:
                left_out.append(f"{candidate.label}: {reason}")
                continue
            unique.setdefault(candidate.public.blob if candidate.public else candidate, candidate)
        return list(unique.values()), list(dict.fromkeys(left_out))

    def close(self) -> None:
        # Without the lock: an agent that does not answer holds it for a minute.
        self._closed = True
        for agent in list(self._agents.values()):
            if agent:
                agent.close()

    def _from_file(
        self,
        path: Path,
        endpoint: Endpoint,
        offered: Mapping[bytes, AgentKey],
        left_out: list[str],
        *,
        named: bool,
    ) -> Iterator[OfferedKey]:
        file = self._file(path)
        # If only the public key file exists, IdentityFile selects a key of the agent.
        known = _public_file(path) if isinstance(file, UnusableKeyError) else file.public
        certificates = (Path(f"{path}-cert.pub"), *endpoint.certificates)
        if known and known.blob in offered:
            yield from _agent_candidates(offered[known.blob], str(path), certificates)
            return
        if isinstance(file, UnusableKeyError):
            if named or path.exists():
                left_out.append(f"{path}: {file}")
            return
        if file.public:
            for certificate in _certificates(file.public, certificates):
                yield self._candidate(file, certificate)
        if file.encrypted and file.key is None and (self._ask is None or endpoint.batch_mode):
            why = "without a terminal" if self._ask is None else "with BatchMode"
            left_out.append(
                f"{_label(str(path), file.public)}: encrypted, and dtrain cannot ask for its "
                f"passphrase {why}"
            )
            return
        yield self._candidate(file, file.public)

    def _candidate(self, file: _KeyFile, public: PublicKey | None) -> OfferedKey:
        def load() -> paramiko.PKey:
            key = self._unlock(file)
            if public and public.kind.endswith(CERTIFICATE_SUFFIX):
                key = copy.copy(key)
                key.public_blob = PublicBlob(public.kind, public.blob)
            return key

        return OfferedKey(
            _label(str(file.path), public),
            public,
            load,
            lambda: file.encrypted and file.key is None,
            file.path,
        )

    def _unlock(self, file: _KeyFile) -> paramiko.PKey:
        # One prompt at a time. Threads that wait for it then find the key decrypted.
        with self._prompting if file.encrypted else file.lock:
            if file.failure:
                raise file.failure
            if file.key is not None:
                return file.key
            try:
                file.key = self._decrypt(file) if file.encrypted else file.load(None)
            except UnusableKeyError as failure:
                file.failure = failure
                raise
            return file.key

    def _decrypt(self, file: _KeyFile) -> paramiko.PKey:
        if self._ask is None:
            raise UnusableKeyError("encrypted, and there is no terminal to ask for a passphrase")
        prompt = f"Passphrase for {file.path}: "
        for _ in range(PASSPHRASE_TRIES):
            passphrase = self._ask(prompt)
            if not passphrase:
                raise UnusableKeyError("encrypted, and the user gave no passphrase")
            try:
                return file.load(passphrase)
            except UnusableKeyError:
                prompt = f"Wrong passphrase. Passphrase for {file.path}: "
        raise UnusableKeyError(f"encrypted, and {PASSPHRASE_TRIES} passphrases were wrong")

    def _file(self, path: Path) -> _KeyFile | UnusableKeyError:
        with self._lock:
            if path not in self._files:
                try:
                    self._files[path] = _KeyFile(path)
                except UnusableKeyError as problem:
                    self._files[path] = problem
            return self._files[path]

    def _agent(self, path: str | None, left_out: list[str]) -> _Agent | None:
        if not path:
            return None
        with self._lock:
            if path not in self._agents:
                try:
                    self._agents[path] = _Agent(path)
                except (OSError, paramiko.SSHException, struct.error):
                    self._agents[path] = None
            agent = self._agents[path]
        if agent is not None and self._closed:  # it answered too late
            agent.close()
        if agent is None:
            left_out.append(f"the ssh agent at {path} does not answer")
        return agent


class _KeyFile:
    """A private key file. Raises UnusableKeyError if it is missing, accessible by other users, or
    not a private key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = threading.Lock()
        self.key: paramiko.PKey | None = None
        self.failure: UnusableKeyError | None = None
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._data = file.read(MAX_SIZE)
        except FileNotFoundError:
            raise UnusableKeyError("no such file") from None
        except OSError as error:
            raise UnusableKeyError(str(error.strerror)) from None
        text = self._data.decode("ascii", errors="replace")
        header = re.search(r"-----BEGIN ([A-Z ]*)PRIVATE KEY-----", text)
        if not header:
            raise UnusableKeyError("not a private key")
        # As in OpenSSH, the rule applies only to the user's own files.
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            raise UnusableKeyError(
                f"its mode {status.st_mode & 0o777:04o} gives other users access: "
                f"chmod 600 {shlex.quote(str(path))}"
            )
        if header[1] == "OPENSSH ":
            self.public, self.encrypted = _openssh_header(text)
            return
        self.public = _public_file(path)
        self.encrypted = header[1] == "ENCRYPTED " or "Proc-Type: 4,ENCRYPTED" in text
        if not self.public and not self.encrypted:
            self.key = self.load(None)
            self.public = PublicKey(self.key.get_name(), self.key.asbytes())

    def load(self, passphrase: str | None) -> paramiko.PKey:
        """Load the key with the cryptography package, and pass it to paramiko unencrypted, in
        memory. paramiko's loader misreads some keys without a comment and supports few formats."""
        password = None if passphrase is None else passphrase.encode()
        try:
            data = self._data
            read = load_ssh_private_key if b"BEGIN OPENSSH" in data else load_pem_private_key
            loaded = read(data, password)
            kind = next(kind for kind in _FORMATS if isinstance(loaded, kind))
            key_class, form = _FORMATS[kind]
            plain = loaded.private_bytes(Encoding.PEM, form, NoEncryption())
            return key_class.from_private_key(io.StringIO(plain.decode()))
        except Exception as error:  # noqa: BLE001 (a wrong passphrase fails in a dozen ways)
            # Drop the cause: it could contain the passphrase.
            what = AGENT_ONLY
            if not isinstance(error, (StopIteration, UnsupportedAlgorithm)):
                what = f"cannot be loaded ({type(error).__name__})"
            raise UnusableKeyError(what) from None


class _Agent(AgentSSH):
    """A shared connection to an ssh agent. It sends one request at a time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self.turn = threading.RLock()
        self._closed = False
        self._agent_socket = self._open()
        try:
            self._connect(self._agent_socket)  # type: ignore[attr-defined]
        except BaseException:
            self._agent_socket.close()
            raise
        self.keys = [_SigningKey(self, key.blob, key.comment) for key in self.get_keys()]

    def close(self) -> None:
        self._closed = True
        self._agent_socket.close()

    def _open(self) -> socket.socket:
        opened = socket.socket(socket.AF_UNIX)
        try:
            opened.settimeout(AGENT_TIMEOUT)
            opened.connect(self._path)
        except BaseException:
            opened.close()
            raise
        return opened

    def _send_message(self, message: object) -> object:
        with self.turn:
            if self._has_ended() and not self._closed:
                self._agent_socket.close()
                self._conn = self._agent_socket = self._open()
            try:
                return super()._send_message(message)  # type: ignore[misc]
            except Exception:
                # The next request would get the reply to this one, if it still comes.
                self._agent_socket.close()
                raise

    def _has_ended(self) -> bool:
        """Whether this end was closed after a failure, or the agent has ended: it may have a
        successor. An agent says nothing unasked."""
        fd = self._agent_socket.fileno()
        if fd < 0:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)  # not the socket, which `close` may close just now
        return bool(poll.poll(0))


class _SigningKey(AgentKey):
    """An agent's key. Signing raises UnusableKeyError if the agent fails, or the user declines."""

    # paramiko before 5 has no default for keys of kinds that it does not know, such as FIDO's.
    public_blob: PublicBlob | None = None  # type: ignore[assignment]

    def sign_ssh_data(self, data: object, algorithm: str | None = None) -> object:  # type: ignore[override]
        try:
            return super().sign_ssh_data(data, algorithm)  # type: ignore[arg-type]
        except (paramiko.SSHException, OSError):
            raise UnusableKeyError(NOT_SIGNED) from None


def _in_order_of_ssh(
    files: Sequence[OfferedKey],
    others: Sequence[OfferedKey],
    held: Sequence[bytes],
    certificates: Iterable[Path],
) -> list[OfferedKey]:
    """Some keys come several times. ``others`` are those of the agent that no file names; ``held``
    are the public keys of all that the agent has, in its order."""
    place = {blob: index for index, blob in enumerate(held)}
    by_agent = [file for file in files if file.public and file.public.blob in place]
    by_agent.sort(key=lambda file: place[file.public.blob] if file.public else 0)
    chosen = {public.blob for public in map(read_public, certificates) if public}
    certified = [key for key in (*files, *others) if key.public and key.public.blob in chosen]
    return [*certified, *by_agent, *others, *files]


def _agent_candidates(key: AgentKey, name: str, files: Iterable[Path]) -> Iterator[OfferedKey]:
    """The agent's key with each certificate for it among the files, and without."""
    plain = PublicKey(key.name, key.blob)
    for public in (*_certificates(plain, files), plain):
        yield _agent_candidate(key, name, public)


def _agent_candidate(key: AgentKey, name: str, public: PublicKey) -> OfferedKey:
    if public.kind.endswith(CERTIFICATE_SUFFIX):
        key = _SigningKey(key.agent, key.blob, key.comment)
        key.public_blob = PublicBlob(public.kind, public.blob)
    suffix = "" if name.startswith("agent key") else " (from the agent)"
    label = _label(name, public) + suffix
    turn = key.agent.turn  # type: ignore[attr-defined]
    return OfferedKey(label, public, lambda: key, lambda: True, None, True, turn)


def _certificates(key: PublicKey, files: Iterable[Path]) -> Iterator[PublicKey]:
    """The certificates for the key among the files."""
    for public in map(read_public, files):
        if public and _certifies(public, key):
            yield public


def _label(name: str, public: PublicKey | None) -> str:
    if not public:
        return name
    kind = " certificate" if "-cert-" in public.kind else ""
    return f"{name}{kind} ({fingerprint(public.blob)})"


def _openssh_header(text: str) -> tuple[PublicKey | None, bool]:
    """The public key, which is never encrypted, and whether the private key is encrypted."""
    body = re.search(r"BEGIN OPENSSH PRIVATE KEY-----(.*?)-----END", text, re.DOTALL)
    try:
        data = base64.b64decode(body[1] if body else "")
        if not data.startswith(_MAGIC):
            raise UnusableKeyError("the private key is malformed")
        message = paramiko.Message(data[len(_MAGIC) :])
        cipher = message.get_text()
        message.get_binary()
        message.get_binary()
        message.get_int()
        blob = message.get_binary()
        return PublicKey(paramiko.Message(blob).get_text(), blob), cipher != "none"
    except (binascii.Error, struct.error, UnicodeDecodeError):
        raise UnusableKeyError("the private key is malformed") from None


def _public_file(path: Path) -> PublicKey | None:
    return read_public(path if path.suffix == ".pub" else Path(f"{path}.pub"))


def read_public(path: Path) -> PublicKey | None:
    try:
        kind, encoded, *_ = path.read_text(errors="replace").split(None, 2)
        return PublicKey(kind, base64.b64decode(encoded))
    except (OSError, ValueError):
        return None


def _certifies(certificate: PublicKey, key: PublicKey) -> bool:
    """Whether a certificate is for this key: it repeats the key's fields after a nonce."""
    if not certificate.kind.endswith(CERTIFICATE_SUFFIX):
        return False
    try:
        message = paramiko.Message(certificate.blob)
        plain = paramiko.Message(key.blob)
        kind = plain.get_text()
        message.get_text()
        message.get_binary()
        return certificate.kind.startswith(kind) and message.get_remainder().startswith(
            plain.get_remainder()
        )
    except (struct.error, UnicodeDecodeError):
        return False


def _not_allowed(public: PublicKey | None, allowed: Algorithms) -> str:
    """Why ssh's configuration excludes a key, or ""."""
    if not public:
        return ""
    kinds = {public.kind}
    if public.kind.startswith("ssh-rsa"):
        kinds = {public.kind.replace("ssh-rsa", name) for name in RSA_SIGNATURES}
    if allowed.user_keys is not None and not kinds.intersection(allowed.user_keys):
        return "its type is not in PubkeyAcceptedAlgorithms"
    if public.kind == "ssh-rsa":
        try:
            bits = paramiko.RSAKey(data=public.blob).get_bits()
        except (paramiko.SSHException, ValueError, struct.error):
            return "the public key is malformed"
        if bits < allowed.rsa_bits:
            return f"its {bits} bits are less than RequiredRSASize {allowed.rsa_bits}"
    return ""

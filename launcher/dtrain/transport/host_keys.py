"""Host keys: what known_hosts files say, and whether a server's key is acceptable.

A host that is known must prove one of the keys that it is known by. A key of another type does
not count as "new", as it does for ssh: whoever sits in between could otherwise offer a type
that was never recorded.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import hashlib
import hmac
import os
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dtrain.diagnostics import HostKeyError
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.ssh_config import matches

_PREFERENCE = {
    "ssh-ed25519": ("ssh-ed25519",),
    "ecdsa-sha2-nistp256": ("ecdsa-sha2-nistp256",),
    "ecdsa-sha2-nistp384": ("ecdsa-sha2-nistp384",),
    "ecdsa-sha2-nistp521": ("ecdsa-sha2-nistp521",),
    "ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256"),
}
"""Signature algorithms of each key type, in the order in which unknown hosts are asked."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """A server's public key."""

    kind: str
    """``ssh-ed25519``, ``ssh-rsa``, …"""
    blob: bytes

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"


def fingerprint(blob: bytes) -> str:
    """As ``ssh-keygen -l`` prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


@dataclass(frozen=True, slots=True)
class _Line:
    file: Path
    number: int
    marker: str
    """Empty, ``@revoked`` or ``@cert-authority``."""
    names: tuple[str, ...]
    key: HostKey

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"

    def is_about(self, name: str) -> bool:
        if self.names[0].startswith("|1|"):
            return _hash_matches(self.names[0], name.lower())
        return matches(name, self.names)


class KnownHosts:
    """The known_hosts files of a launch; read again only when they change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[tuple[int, int, int], tuple[_Line, ...]]] = {}

    def algorithms(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Host key algorithms to ask for, those of known keys first, so that a server with
        several keys shows one that can be checked."""
        known = [line.key.kind for line in self._about(endpoint) if not line.marker]
        return tuple(
            algorithm
            for kind in dict.fromkeys([*known, *_PREFERENCE])
            for algorithm in _PREFERENCE.get(kind, ())
        )

    def check(self, endpoint: Endpoint, key: HostKey) -> str:
        """Accept ``key``, or raise HostKeyError.

        Returns what a person should be told: where an accepted new key was written, or "".
        """
        lines = self._about(endpoint)
        for line in self._lines(endpoint):
            if line.marker == "@revoked" and line.key.blob == key.blob:
                raise HostKeyError(
                    endpoint.host,
                    endpoint.attempted,
                    f"its host key {key} is revoked ({line.place})",
                    hint="do not connect; ask whoever runs the host for its new key",
                )
        plain = [line for line in lines if not line.marker]
        if any(line.key.blob == key.blob for line in plain):
            return ""
        if plain:
            raise self._changed(endpoint, key, plain)
        if not endpoint.accept_new:
            raise self._unknown(endpoint, key, lines)
        return self._accept(endpoint, key)

    def _changed(self, endpoint: Endpoint, key: HostKey, known: list[_Line]) -> HostKeyError:
        same_kind = [line for line in known if line.key.kind == key.kind]
        line = (same_kind or known)[0]
        name = next(name for name in endpoint.known_names if line.is_about(name))
        return HostKeyError(
            endpoint.host,
            endpoint.attempted,
            f"its host key has changed: it is known by {line.key} ({line.place}) "
            f"and now shows {key}",
            hint="someone may be intercepting the connection. If the host was reinstalled, "
            f"check the new fingerprint on it and remove the old key: "
            f"ssh-keygen -f {line.file} -R '{name}'",
        )

    def _unknown(self, endpoint: Endpoint, key: HostKey, lines: list[_Line]) -> HostKeyError:
        reason = f"its host key is unknown: {key}"
        authority = next((line for line in lines if line.marker == "@cert-authority"), None)
        if authority:
            reason += f" (host certificates are not supported: @cert-authority {authority.place})"
        return HostKeyError(
            endpoint.host,
            endpoint.attempted,
            reason,
            hint=f"compare the fingerprint while you run `{endpoint.command}` once, or set "
            "`host_keys: accept-new` under `ssh` in the cluster file to accept keys of hosts "
            "that are not known yet",
        )

    def _accept(self, endpoint: Endpoint, key: HostKey) -> str:
        if not endpoint.user_known_hosts:
            raise self._unknown(endpoint, key, [])
        path = endpoint.user_known_hosts[0]
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                # Other threads, and other launches, may be accepting keys at this moment.
                fcntl.flock(file, fcntl.LOCK_EX)
                plain = [line for line in self._about(endpoint) if not line.marker]
                if any(line.key.blob == key.blob for line in plain):
                    return ""
                if plain:
                    raise self._changed(endpoint, key, plain)
                existing = file.read()
                name = endpoint.known_names[0]
                written = _hashed(name) if endpoint.hash_known_hosts else name
                line = f"{written} {key.kind} {base64.b64encode(key.blob).decode()}\n"
                separator = b"" if not existing or existing.endswith(b"\n") else b"\n"
                file.write(separator + line.encode())
        except OSError as error:
            raise HostKeyError(
                endpoint.host,
                endpoint.attempted,
                f"its new host key cannot be recorded in {path}: {error.strerror}",
                hint="make the file writable, or name another one as `known_hosts`",
            ) from error
        return f"{endpoint.host}: accepted the new host key {key} into {path}"

    def _about(self, endpoint: Endpoint) -> list[_Line]:
        """Lines about the endpoint by the best of its names that any line mentions."""
        lines = self._lines(endpoint)
        for name in endpoint.known_names:
            if found := [line for line in lines if line.is_about(name)]:
                return found
        return []

    def _lines(self, endpoint: Endpoint) -> list[_Line]:
        files = dict.fromkeys((*endpoint.user_known_hosts, *endpoint.global_known_hosts))
        try:
            return [line for path in files for line in self._read(path)]
        except OSError as error:
            raise HostKeyError(
                endpoint.host,
                endpoint.attempted,
                f"{error.filename} cannot be read: {error.strerror}",
                hint="make it readable: dtrain checks every host's key",
            ) from error

    def _read(self, path: Path) -> tuple[_Line, ...]:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ()
        state = (status.st_mtime_ns, status.st_size, status.st_ino)
        with self._lock:
            known = self._files.get(path)
            if known is None or known[0] != state:
                text = path.read_text(encoding="utf-8", errors="replace")
                known = state, tuple(_parse(path, text.splitlines()))
                self._files[path] = known
        return known[1]


def _parse(path: Path, lines: Iterable[str]) -> Iterable[_Line]:
    for number, line in enumerate(lines, 1):
        match = re.match(r"\s*(?:(@\S+)\s+)?([^\s#@]\S*)\s+(\S+)\s+([A-Za-z0-9+/=]+)(?:\s|$)", line)
        if not match:
            continue
        try:
            blob = base64.b64decode(match[4], validate=True)
        except binascii.Error:
            continue
        key = HostKey(match[3], blob)
        yield _Line(path, number, match[1] or "", tuple(match[2].split(",")), key)


def _hash_matches(hashed: str, name: str) -> bool:
    try:
        _, _, salt, digest = hashed.split("|")
        expected = hmac.new(base64.b64decode(salt), name.encode(), hashlib.sha1).digest()
        return hmac.compare_digest(expected, base64.b64decode(digest))
    except (ValueError, binascii.Error):
        return False


def _hashed(name: str) -> str:
    salt = os.urandom(20)
    digest = hmac.new(salt, name.lower().encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"

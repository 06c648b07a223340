"""Checks a server's host key against the known_hosts files.

A known host must present one of its recorded keys. Unlike ssh, dtrain does not treat a key of
another type as "new": otherwise a man in the middle could offer a type that was never recorded.

A certificate from an authority of the host (``@cert-authority``) also proves its identity. If the
certificate is invalid, its key counts like a key without a certificate, as in ssh, with one
exception: ``host_keys: accept-new`` does not accept it.
"""

from __future__ import annotations

import base64
import binascii
import fcntl
import fnmatch
import os
import re
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from paramiko.hostkeys import HostKeys

from dtrain.diagnostics import HostKeyError
from dtrain.records import dataclass
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.server_key import (
    CERTIFICATE_SUFFIX,
    SIGNATURES,
    Certificate,
    CertificateError,
    HostKey,
    key_type,
    read_host_key,
)


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

    def covers(self, name: str) -> bool:
        if self.names[0].startswith("|1|"):
            return _hash_matches(self.names[0], name.lower())
        return matches(name, self.names)


class _File:
    """The lines of one file. Looking up a host does not take longer with more hosts, unless their
    names are hashed."""

    def __init__(self, lines: Iterable[_Line] = ()) -> None:
        self.marked: list[_Line] = []
        """Revoked keys and authorities."""
        self._named: dict[str, list[_Line]] = {}
        self._others: list[_Line] = []
        """Lines with patterns or a hash."""
        self._found: dict[str, list[_Line]] = {}
        for line in lines:
            if line.marker:
                self.marked.append(line)
            elif re.search("[*?!|]", ",".join(line.names)):
                self._others.append(line)
            else:
                for name in {name.lower() for name in line.names}:
                    self._named.setdefault(name, []).append(line)

    def keys_of(self, name: str) -> list[_Line]:
        """The lines with a key of the host ``name``, in order."""
        name = name.lower()
        if name not in self._found:
            others = (line for line in self._others if line.covers(name))
            lines = [*self._named.get(name, ()), *others]
            self._found[name] = sorted(lines, key=lambda line: line.number)
        return self._found[name]


class KnownHosts:
    """The known_hosts files of a launch. Reads a file again only if it changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[tuple[int, int, int], _File]] = {}

    def algorithms(self, endpoint: Endpoint) -> tuple[str, ...]:
        """Host key algorithms to request, preferred first.

        The algorithms of known keys come first, so that a server with several keys presents a
        known one. If the host has an authority, certificates come before all keys.
        """
        names = sorted(endpoint.known_names, key=partial(_lacks_port, endpoint))
        files = self._files_of(endpoint)
        known = [line.key.kind for name in names for file in files for line in file.keys_of(name)]
        kinds = [*known, *map(key_type, SIGNATURES)]
        plain = tuple(sorted(SIGNATURES, key=lambda one: kinds.index(key_type(one))))
        certified = tuple(algorithm + CERTIFICATE_SUFFIX for algorithm in plain)
        return certified + plain if self._authorities(endpoint) else plain + certified

    def check(self, endpoint: Endpoint, key: HostKey) -> str:
        """Accept ``key`` with its certificate, or raise HostKeyError.

        Returns a notice for the user if a new key was accepted and recorded, else "".
        """
        self._refuse_revoked(endpoint, key)
        fault = ""
        if key.certificate and (authorities := self._authorities(endpoint)):
            signatures = endpoint.algorithms.authorities or SIGNATURES
            fault = _fault(key.certificate, authorities, signatures)
            if not fault:
                return ""
            fault = f"its {key.certificate} does not prove that it is this host: {fault}"
        if self._is_recorded(endpoint, key, fault):
            return ""
        if fault:
            raise endpoint.error(
                HostKeyError,
                f"{fault}; its key is also unknown: {key}",
                hint=_certificate_hint(endpoint, key),
            )
        if not endpoint.accept_new:
            raise self._unknown(endpoint, key)
        return self._accept(endpoint, key)

    def _refuse_revoked(self, endpoint: Endpoint, key: HostKey) -> None:
        authority = key.certificate.authority if key.certificate else None
        for line in self._marked(endpoint, "@revoked"):
            if line.key.blob == key.blob:
                what, owner = f"its host key {key}", "the host"
            elif authority and line.key.blob == authority.blob:
                what, owner = f"the CA of its {key.certificate}", "the CA"
            else:
                continue
            raise endpoint.error(
                HostKeyError,
                f"{what} is revoked ({line.place})",
                hint=f"do not connect; ask the administrator of {owner} for its new key",
            )

    def _is_recorded(self, endpoint: Endpoint, key: HostKey, fault: str = "") -> bool:
        """Whether known_hosts has this key. Raises HostKeyError if it only has other keys of the
        host. ``fault``: why the certificate of ``key`` does not count."""
        known = self._known(endpoint, key)
        if any(line.key.blob == key.blob for line in known):
            return True
        if known:
            raise self._changed(endpoint, key, known, fault)
        return False

    def _changed(
        self, endpoint: Endpoint, key: HostKey, known: list[_Line], fault: str
    ) -> HostKeyError:
        if not {line.key.kind for line in known} & {*map(key_type, SIGNATURES)}:
            return endpoint.error(
                HostKeyError,
                f"known_hosts has only {known[0].key} ({known[0].place}), a type of key that "
                f"dtrain does not support; the server has {key}" + (f"; {fault}" if fault else ""),
                hint="check this fingerprint on the host, and add the key: ssh-keyscan -t "
                f"{key.kind} -p {endpoint.port} {endpoint.address} >>{known[0].file}",
            )
        same_kind = [line for line in known if line.key.kind == key.kind]
        line = (same_kind or known)[0]
        name = next(name for name in endpoint.known_names if line.covers(name))
        return endpoint.error(
            HostKeyError,
            f"its host key has changed: known_hosts has {line.key} ({line.place}), "
            f"but the server has {key}" + (f"; {fault}" if fault else ""),
            hint="the connection may be intercepted. If the host was reinstalled, "
            f"check the new fingerprint on it and remove the old key: "
            f"ssh-keygen -f {line.file} -R '{name}'",
        )

    def _unknown(self, endpoint: Endpoint, key: HostKey) -> HostKeyError:
        reason = f"its host key is unknown: {key}"
        if authorities := self._authorities(endpoint):
            reason += f"; it has no certificate from the CA in {authorities[0][1].place}"
        return endpoint.error(
            HostKeyError,
            reason,
            hint=f"run `{endpoint.command}` once and compare the fingerprint, or set "
            "`host_keys: accept-new` under `ssh` in the cluster file to accept the keys of "
            "unknown hosts",
        )

    def _accept(self, endpoint: Endpoint, key: HostKey) -> str:
        if not endpoint.user_known_hosts:
            raise self._unknown(endpoint, key)
        path = endpoint.user_known_hosts[0]
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "r+b") as file:
                # Other threads and other launches may accept keys at the same time.
                fcntl.flock(file, fcntl.LOCK_EX)
                if self._is_recorded(endpoint, key):
                    return ""
                existing = file.read()
                name = endpoint.known_names[0]
                written = HostKeys.hash_host(name.lower()) if endpoint.hash_known_hosts else name
                line = f"{written} {key.kind} {base64.b64encode(key.blob).decode()}\n"
                separator = b"" if not existing or existing.endswith(b"\n") else b"\n"
                file.write(separator + line.encode())
        except OSError as error:
            raise endpoint.error(
                HostKeyError,
                f"cannot record its new host key in {path}: {error.strerror}",
                hint="make the file writable, or set `known_hosts` under `ssh` to another file",
            ) from error
        return f"{endpoint.host}: accepted the new host key {key} and recorded it in {path}"

    def _known(self, endpoint: Endpoint, key: HostKey) -> list[_Line]:
        """The recorded keys of the host, for the first of its names that has any.

        As in ssh, a name without the host's port counts only if it has ``key``: otherwise it may
        belong to a server on another port, such as the sshd outside a container.
        """
        files = self._files_of(endpoint)
        for name in endpoint.known_names:
            found = [line for file in files for line in file.keys_of(name)]
            if _lacks_port(endpoint, name):
                found = [line for line in found if line.key.blob == key.blob]
            if found:
                return found
        return []

    def _authorities(self, endpoint: Endpoint) -> list[tuple[str, _Line]]:
        """Each name of the host, without its port, with each authority that may certify it.

        A line with a key covers one host, so the host's name in the cluster file is good enough.
        An authority certifies many hosts, so the name must be the one that ssh checks.
        """
        lines = self._marked(endpoint, "@cert-authority")
        names = {name: re.sub(r"^\[(.*)\]:\d+$", r"\1", name) for name in endpoint.known_names}
        address = endpoint.address.lower()
        if address in names:  # Otherwise HostKeyAlias replaces it.
            names = {name: bare for name, bare in names.items() if bare == address}
        return [(bare, line) for name, bare in names.items() for line in lines if line.covers(name)]

    def _marked(self, endpoint: Endpoint, marker: str) -> list[_Line]:
        files = self._files_of(endpoint)
        return [line for file in files for line in file.marked if line.marker == marker]

    def _files_of(self, endpoint: Endpoint) -> list[_File]:
        paths = dict.fromkeys((*endpoint.user_known_hosts, *endpoint.global_known_hosts))
        try:
            return [self._read(path) for path in paths]
        except OSError as error:
            raise endpoint.error(
                HostKeyError,
                f"cannot read {error.filename}: {error.strerror}",
                hint="make it readable: dtrain needs it to check host keys",
            ) from error

    def _read(self, path: Path) -> _File:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return _File()
        state = (status.st_mtime_ns, status.st_size, status.st_ino)
        with self._lock:
            known = self._files.get(path)
            if known is None or known[0] != state:
                text = path.read_text(encoding="utf-8", errors="replace")
                known = state, _File(_parse(path, text.split("\n")))
                self._files[path] = known
        return known[1]


def _lacks_port(endpoint: Endpoint, name: str) -> bool:
    """Whether another of the host's names has its port, too."""
    return f"[{name}]:{endpoint.port}" in endpoint.known_names


def _fault(
    certificate: Certificate, authorities: list[tuple[str, _Line]], signatures: tuple[str, ...]
) -> str:
    """Why a certificate is valid for none of a host's names, or ""."""
    now = time.time()
    fault = ""
    for name, line in authorities:
        if line.key.blob == certificate.authority.blob:
            problem = certificate.problem(name, now, signatures)
            if not problem:
                return ""
            fault = fault or problem
    places = ", ".join(dict.fromkeys(line.place for _, line in authorities))
    return fault or f"its CA is not a CA of this host ({places})"


def _certificate_hint(endpoint: Endpoint, key: HostKey) -> str:
    if key.certificate and endpoint.host in key.certificate.principals:
        return (
            f"if this is the right host, set `HostKeyAlias {endpoint.host}` for it in "
            "~/.ssh/config, or set its `address` to that name"
        )
    return (
        "the administrator of the host must replace its certificate (ssh-keygen -s CA -h -I ID -n "
        "NAMES KEY.pub), or the @cert-authority line is wrong; compare with the output of "
        f"`{endpoint.command}`"
    )


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
        if match[1] == "@revoked":
            # As for ssh, a certificate here revokes its key.
            try:
                key = read_host_key(blob)
            except CertificateError:
                continue
        yield _Line(path, number, match[1] or "", tuple(match[2].split(",")), key)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` matches a pattern list of OpenSSH, in any case.

    ``*`` and ``?`` are wildcards. A name that matches a pattern with ``!`` does not match the
    list.
    """
    found = False
    for pattern in patterns:
        # fnmatch supports [...], OpenSSH does not.
        text = pattern.removeprefix("!").lower().replace("[", "[[]")
        if fnmatch.fnmatchcase(name.lower(), text):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def _hash_matches(hashed: str, name: str) -> bool:
    try:
        return HostKeys.hash_host(name, hashed) == hashed
    except (ValueError, AssertionError):  # no base64, or a salt of another length
        return False

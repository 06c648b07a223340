"""A server's proof of identity: a public key, or a certificate for one."""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Container

import paramiko
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    SSHCertificate,
    SSHCertificateType,
    load_ssh_public_identity,
)

from dtrain.framing import clean
from dtrain.records import dataclass

CERTIFICATE_SUFFIX = "-cert-v01@openssh.com"
RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")
SIGNATURES = (
    "ssh-ed25519",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    *RSA_SIGNATURES,
)
"""Algorithms that a host or a CA may sign with, preferred first: OpenSSH's default, without
SHA-1."""
_SHOWN = 100
"""Characters that a message shows of each text in a certificate."""
_KEY_FIELDS = {"ssh-rsa": 2, "ssh-ed25519": 1}
"""Number of fields after the name, by key type. The ECDSA types, not listed, have 2."""


class CertificateError(Exception):
    """A certificate that is malformed, or whose CA signature is invalid."""


@dataclass(frozen=True, slots=True)
class HostKey:
    """A server's public key."""

    kind: str
    """``ssh-ed25519``, ``ssh-rsa``, …"""
    blob: bytes
    certificate: Certificate | None = None
    """The certificate for the key, if the server presents one."""

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.blob)

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """An OpenSSH certificate with a correct signature. `problem` checks whether it is valid."""

    authority: HostKey
    """The CA key that signed it."""
    signature: str
    """The signature algorithm."""
    serial: int
    key_id: str
    for_hosts: bool
    principals: tuple[str, ...]
    valid_after: int
    valid_before: int
    critical_options: tuple[str, ...]

    def __str__(self) -> str:
        return f"certificate {_shown(self.key_id)!r} (serial {self.serial}, CA {self.authority})"

    def problem(self, name: str, now: float, signatures: Container[str]) -> str:
        """Why the certificate does not prove that a server is the host ``name``, or "".
        ``signatures`` are the algorithms that a CA may use.

        Follows OpenSSH's rules. If its versions differ, the stricter rule applies: since 10.3,
        OpenSSH refuses a certificate without principals; before 10.3, wildcards match nothing.
        """
        if not self.for_hosts:
            return "it is a user certificate, not a host certificate"
        if now < self.valid_after:
            return f"it is not valid before {_date(self.valid_after)}"
        if now >= self.valid_before:
            return f"it expired on {_date(self.valid_before)}"
        if not self.principals:
            return "its list of principals (host names) is empty"
        if name not in self.principals:
            named = ", ".join(map(_shown, self.principals[:8]))
            more = ", …" if len(self.principals) > 8 else ""
            wildcard = any(set("*?") & set(principal) for principal in self.principals)
            note = " (dtrain does not match wildcards in certificates)" if wildcard else ""
            return f"it is valid for {named}{more}, not for {name}{note}"
        if self.critical_options:
            options = ", ".join(map(_shown, self.critical_options[:8]))
            return f"it has critical options, which a host certificate cannot have: {options}"
        if self.signature not in signatures:
            return f"its CA signed it with {self.signature}, which CASignatureAlgorithms excludes"
        return ""


def read_host_key(blob: bytes) -> HostKey:
    """Parse the key or certificate that a server presents. Raises CertificateError."""
    kind = _text(paramiko.Message(blob).get_binary())
    if not kind.endswith(CERTIFICATE_SUFFIX):
        return HostKey(kind, blob)
    try:
        identity = load_ssh_public_identity(f"{kind} {base64.b64encode(blob).decode()}".encode())
        if not isinstance(identity, SSHCertificate):
            raise ValueError("not a certificate")
        identity.verify_cert_signature()
    except InvalidSignature:
        raise CertificateError("the signature of its CA is invalid") from None
    except Exception as error:
        raise CertificateError(f"cannot parse it: {clean(str(error))}") from error
    line = identity.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    certified = base64.b64decode(line.split()[1])
    authority, signature = _signer(blob, kind)
    return HostKey(
        kind.removesuffix(CERTIFICATE_SUFFIX),
        certified,
        Certificate(
            authority,
            signature,
            identity.serial,
            _text(identity.key_id),
            identity.type is SSHCertificateType.HOST,
            tuple(map(_text, identity.valid_principals)),
            identity.valid_after,
            identity.valid_before,
            tuple(map(_text, identity.critical_options)),
        ),
    )


def key_type(algorithm: str) -> str:
    """The type of the keys that sign with ``algorithm``."""
    return re.sub("^rsa-sha2-(256|512)", "ssh-rsa", algorithm)


def fingerprint(blob: bytes) -> str:
    """The SHA-256 fingerprint, as ``ssh-keygen -l`` prints it."""
    digest = base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def _signer(blob: bytes, kind: str) -> tuple[HostKey, str]:
    """The CA key of a well-formed certificate and the signature algorithm.

    The cryptography package does not provide the algorithm. For the fields see OpenSSH's
    PROTOCOL.certkeys.
    """
    fields = paramiko.Message(blob)
    for _ in range(2 + _KEY_FIELDS.get(kind.removesuffix(CERTIFICATE_SUFFIX), 2)):
        fields.get_binary()
    fields.get_bytes(8 + 4)  # The serial number and the type.
    for _ in ("key id", "principals"):
        fields.get_binary()
    fields.get_bytes(8 + 8)  # The validity.
    for _ in ("critical options", "extensions", "reserved"):
        fields.get_binary()
    authority, signature = fields.get_binary(), fields.get_binary()
    return (
        HostKey(paramiko.Message(authority).get_text(), authority),
        paramiko.Message(signature).get_text(),
    )


def _text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _shown(text: str) -> str:
    return clean(text[:_SHOWN]) + ("…" if len(text) > _SHOWN else "")


def _date(seconds: int) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "the end of time"

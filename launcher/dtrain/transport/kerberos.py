"""The client's side of a login with a Kerberos ticket: calls of the GSSAPI library (RFC 2744) that
`ssh` uses too.

Python packages for it are compiled when they are installed, with headers that few machines have.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, Structure, byref, c_char_p, c_size_t, c_uint32, c_void_p, string_at
from typing import Any

from dtrain.framing import clean
from dtrain.transport.login_methods import LoginMethodError

LIBRARY = "libgssapi_krb5.so.2"
MECHANISM = bytes.fromhex("2a864886f712010202")
"""Kerberos 5, 1.2.840.113554.1.2.2, as the library takes it (RFC 1964, section 1)."""
_HOST_SERVICE = bytes.fromhex("2a864886f71201020104")
"""The kind of names such as ``host@gpu01``: 1.2.840.113554.1.2.1.4 (RFC 2743, section 4.1)."""

_DELEGATE, _MUTUAL, _INTEGRITY = 1, 2, 32
_COMPLETE, _ERRORS = 0, 0xFFFF0000
_NO_TICKET, _FAILURE = 7 << 16, 13 << 16
"""GSS_S_NO_CRED and GSS_S_FAILURE, for which Kerberos has a reason of its own."""
_EXPIRED = -1765328352 & 0xFFFFFFFF
"""KRB5KRB_AP_ERR_TKT_EXPIRED, one of these reasons."""
_MAJOR_CODE, _MECHANISM_CODE = 1, 2
MAX_REASON = 300


class KerberosError(LoginMethodError):
    """There is no ticket for the host, for the reason that the library gives."""


class _Given(Structure):
    """A buffer for the library to read."""

    _fields_ = (("length", c_size_t), ("value", c_char_p))


class _Made(Structure):
    """A buffer that the library fills."""

    _fields_ = (("length", c_size_t), ("value", c_void_p))


class _Oid(Structure):
    _fields_ = (("length", c_uint32), ("elements", c_char_p))


class Context:
    """A security context with the sshd of ``host``. ``delegate``: give the host a ticket as well.

    Raises KerberosError if the library is not installed or does not know such a host.
    """

    def __init__(self, host: str, *, delegate: bool) -> None:
        self._context, self._name = c_void_p(), c_void_p()
        self._library = _library()
        self._flags = _MUTUAL | _INTEGRITY | (_DELEGATE if delegate else 0)
        self._mechanism = _Oid(len(MECHANISM), MECHANISM)
        self.complete = False
        """Whether host and user have proved who they are to each other."""
        service = f"host@{host}".encode()
        name, kind = _Given(len(service), service), _Oid(len(_HOST_SERVICE), _HOST_SERVICE)
        self._call("gss_import_name", byref(name), byref(kind), byref(self._name))

    def step(self, token: bytes) -> bytes:
        """The token to send in reply to the host's, which is empty at first; empty if none is
        needed. Raises KerberosError: without a ticket, for example."""
        given, reply = _Given(len(token), token), _Made()
        try:
            status = self._call(
                "gss_init_sec_context",
                None,  # the user's default ticket
                byref(self._context),
                self._name,
                byref(self._mechanism),
                c_uint32(self._flags),
                c_uint32(0),
                None,
                byref(given),
                None,
                byref(reply),
                None,
                None,
            )
        finally:  # a failure may have a token, too
            token = self._taken(reply)
        self.complete = status == _COMPLETE
        return token

    def sign(self, data: bytes) -> bytes:
        """The message integrity code of ``data``."""
        given, code = _Given(len(data), data), _Made()
        self._call("gss_get_mic", self._context, c_uint32(0), byref(given), byref(code))
        return self._taken(code)

    def __del__(self) -> None:
        # Not earlier: the thread of a connection that took too long may still use it.
        minor = c_uint32()
        if self._context:
            self._library.gss_delete_sec_context(byref(minor), byref(self._context), None)
        if self._name:
            self._library.gss_release_name(byref(minor), byref(self._name))

    def _call(self, function: str, *arguments: Any) -> int:
        minor, called = c_uint32(), getattr(self._library, function)
        called.restype = c_uint32
        status = int(called(byref(minor), *arguments))
        if status & _ERRORS:
            explained = status in (_NO_TICKET, _FAILURE)
            code = (minor.value, _MECHANISM_CODE) if explained else (status, _MAJOR_CODE)
            outdated = status == _NO_TICKET or code == (_EXPIRED, _MECHANISM_CODE)
            hint = "get a ticket with `kinit`" if outdated else ""
            raise KerberosError(clean(self._text(*code))[:MAX_REASON], hint)
        return status

    def _text(self, code: int, kind: int) -> str:
        minor, more, text = c_uint32(), c_uint32(), _Made()
        self._library.gss_display_status(
            byref(minor),
            c_uint32(code),
            kind,
            byref(self._mechanism),
            byref(more),
            byref(text),
        )
        return self._taken(text).decode(errors="replace")

    def _taken(self, buffer: _Made) -> bytes:
        """What the library has stored in ``buffer``, which it then frees."""
        data = string_at(buffer.value, buffer.length) if buffer.length else b""
        self._library.gss_release_buffer(byref(c_uint32()), byref(buffer))
        return data


@functools.cache
def _library() -> CDLL:
    try:
        return CDLL(LIBRARY)
    except OSError:
        hint = "install the library (package libgssapi-krb5-2 on Debian, krb5-libs on Red Hat)"
        raise KerberosError(f"{LIBRARY} is not installed", hint) from None

"""Proving to a server who the user is: public keys only, in the order of `keys`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import paramiko
from paramiko.auth_handler import AuthHandler
from paramiko.common import cMSG_USERAUTH_REQUEST
from paramiko.ssh_exception import BadAuthenticationType

from dtrain.diagnostics import AuthError
from dtrain.transport.endpoint import Endpoint
from dtrain.transport.keys import Candidate, Keyring, PublicKey, UnusableKeyError, permissions_hint
from dtrain.transport.retry import DroppedError, Transient

_PK_OK = 60
"""SSH_MSG_USERAUTH_PK_OK; paramiko knows the number only under its other meaning."""


def authenticate(
    transport: paramiko.Transport,
    endpoint: Endpoint,
    keyring: Keyring,
    timeout: float,
    explain: Callable[[], str],
) -> None:
    """Log in as ``endpoint.user`` within ``timeout`` seconds, not counting passphrase prompts.

    ``explain`` tells why the connection ended, when it has. Raises AuthError when no key is
    accepted, and DroppedError when the server went away.
    """
    attempt = _Attempt(transport, endpoint, timeout, explain)
    if attempt.accepts_anyone():
        return
    candidates, left_out = keyring.candidates(endpoint)
    tried: list[str] = []
    for candidate in candidates:
        try:
            if attempt.with_key(candidate):
                return
        except UnusableKeyError as problem:
            left_out.append(f"{candidate.label}: {problem}")
            continue
        tried.append(candidate.label)
        if attempt.hung_up:
            break
    raise _refused(endpoint, candidates, tried, left_out, attempt)


class _Attempt:
    def __init__(
        self,
        transport: paramiko.Transport,
        endpoint: Endpoint,
        timeout: float,
        explain: Callable[[], str],
    ) -> None:
        self._transport = transport
        self._endpoint = endpoint
        self._deadline = time.monotonic() + timeout
        self._explain = explain
        self._tries = 0
        self._excused = 0.0
        self.methods: list[str] = []
        """What the server accepts instead, if not keys."""
        self.partial: list[str] = []
        """What the server wants in addition to a key."""
        self.hung_up = ""
        """Why the server ended the connection after a refused key."""

    def accepts_anyone(self) -> bool:
        """Some servers (Tailscale's) know who connects; others answer with their methods."""
        try:
            self._set_timeout()
            self._transport.auth_none(self._endpoint.user)
            return True
        except BadAuthenticationType as refusal:
            self.methods = list(refusal.allowed_types)
            return False
        except (paramiko.SSHException, EOFError, OSError):
            self._raise_if_gone()
            return False

    def with_key(self, candidate: Candidate) -> bool:
        if self.methods and "publickey" not in self.methods:
            return False
        if candidate.needs_passphrase() and candidate.public and not self._wanted(candidate.public):
            return False
        started = time.monotonic()
        key = candidate.load()
        taken = time.monotonic() - started
        self._excused += taken
        self._deadline += taken
        try:
            self._set_timeout()
            self.partial = self._transport.auth_publickey(self._endpoint.user, key)
            return not self.partial
        except BadAuthenticationType as refusal:
            self.methods = list(refusal.allowed_types)
        except (paramiko.SSHException, EOFError, OSError):
            self._raise_if_gone()
        self._tries += 1
        return False

    def _wanted(self, public: PublicKey) -> bool:
        """Ask the server whether it would accept a key, without a signature."""
        handler = _Query(self._transport, self._endpoint.user, public)
        answered = threading.Event()
        self._transport.auth_handler = handler
        try:
            self._set_timeout()
            handler.auth_publickey(self._endpoint.user, handler.placeholder, answered)
            handler.wait_for_response(answered)
        except (paramiko.SSHException, EOFError, OSError):
            self._raise_if_gone()
        if not handler.acceptable:
            self._tries += 1
        return handler.acceptable

    def _set_timeout(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DroppedError(
                Transient.SILENT,
                f"authentication took more than {self._endpoint.timeout:g} s",
            )
        self._transport.auth_timeout = left

    def _raise_if_gone(self) -> None:
        if self._transport.is_active():
            if time.monotonic() >= self._deadline:
                self._set_timeout()
            return
        reason = self._explain()
        if self._tries and "authentication failures" in reason.lower():
            self.hung_up = reason
            return
        # sshd's LoginGraceTime may have run out while a person looked for the passphrase.
        raise DroppedError(
            Transient.DROPPED,
            f"the server hung up during authentication ({reason})",
            excused=self._excused,
        )


class _Query(AuthHandler):
    """paramiko's client only ever sends signed requests. This sends the unsigned kind, which
    the server answers with PK_OK or a failure (RFC 4252, section 7)."""

    def __init__(self, transport: paramiko.Transport, user: str, public: PublicKey) -> None:
        super().__init__(transport)
        self._user = user
        self._public = public
        self.acceptable = False
        self.placeholder = paramiko.PKey()

    def _parse_service_accept(self, message: paramiko.Message) -> None:
        message.get_text()
        request = paramiko.Message()
        request.add_byte(cMSG_USERAUTH_REQUEST)
        request.add_string(self._user)
        request.add_string("ssh-connection")
        request.add_string("publickey")
        request.add_boolean(False)
        algorithm = self._finalize_pubkey_algorithm(self._public.kind)  # type: ignore[attr-defined]
        request.add_string(algorithm)
        request.add_string(self._public.blob)
        self.transport._send_message(request)  # type: ignore[attr-defined]

    def _parse_pk_ok(self, _message: paramiko.Message) -> None:
        self.acceptable = True
        self.abort()  # Wakes whoever waits for the answer.

    @property
    def _client_handler_table(self) -> dict[int, Callable[[paramiko.Message], None]]:
        table = dict(super()._client_handler_table)  # type: ignore[misc]
        table[_PK_OK] = self._parse_pk_ok
        return table


def _refused(
    endpoint: Endpoint,
    candidates: list[Candidate],
    tried: list[str],
    left_out: list[str],
    attempt: _Attempt,
) -> AuthError:
    paths = [candidate.path for candidate in candidates if candidate.path]
    hint = f"see whether `{endpoint.command}` gets in; if not, install a key with "
    hint += f"`{endpoint.copy_id(paths[0] if paths else None)}` or load one with `ssh-add`"
    if attempt.methods and "publickey" not in attempt.methods:
        others = ", ".join(filter(None, attempt.methods))
        reason = f"it accepts no keys, only {others}" if others else "it allows no way to log in"
        hint = "dtrain logs in with keys alone; allow them in the host's sshd_config"
    elif attempt.partial:
        reason = f"it accepted a key but wants {' and '.join(attempt.partial)} as well"
        hint = "dtrain logs in with keys alone; let this user in with a key only"
    elif attempt.hung_up:
        reason = f"it hung up after {len(tried)} refused keys: {'; '.join(tried)}"
        hint = "name the right key as `identity` under `ssh` in the cluster file"
    elif tried:
        reason = f"it refused every key: {'; '.join(tried)}"
    else:
        reason = "there is no key to offer"
        hint = f"make one with `ssh-keygen` and install it with `{endpoint.copy_id(None)}`"
        hint += ", or load one with `ssh-add`"
    if left_out:
        reason += f" (not tried: {'; '.join(left_out)})"
        if any("encrypted" in entry for entry in left_out):
            hint = f"load the encrypted key first: `ssh-add`; then {hint}"
    hint += "".join(dict.fromkeys(permissions_hint(path) for path in paths))
    return AuthError(endpoint.host, endpoint.attempted, reason, hint=hint)

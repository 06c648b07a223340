"""A login with a Kerberos ticket: gssapi-with-mic (RFC 4462, section 3)."""

from __future__ import annotations

import threading
from collections.abc import Callable

import paramiko
from paramiko.common import cMSG_USERAUTH_REQUEST

from dtrain.transport.kerberos import MECHANISM, Context, KerberosError
from dtrain.transport.login_handler import LoginHandler
from dtrain.transport.login_methods import TICKET

_RESPONSE, _TOKEN, _MIC = 60, 61, 66
"""The numbers of SSH_MSG_USERAUTH_GSSAPI_RESPONSE, _TOKEN and _MIC."""
_DER = b"\x06" + bytes([len(MECHANISM)]) + MECHANISM
"""The mechanism's name in SSH."""


class TicketLogin(LoginHandler):
    """One attempt. ``first`` is the first token of ``context``."""

    def __init__(self, transport: paramiko.Transport, context: Context, first: bytes) -> None:
        super().__init__(transport)
        self._context = context
        self._first = first
        self.problem = ""
        """Why the attempt ended on this side."""

    def request(self, user: str, done: threading.Event) -> None:
        """Sets ``done`` once the server has accepted or refused."""
        with self.transport.lock:
            self.auth_event = done
            self.auth_method = TICKET
            self.username = user
            self._request_auth()

    def _request_login(self, _accepted: paramiko.Message) -> None:
        request = paramiko.Message()
        self._add_request(request)
        request.add_int(1)
        request.add_string(_DER)
        self._send(request)

    def _add_request(self, message: paramiko.Message) -> None:
        message.add_byte(cMSG_USERAUTH_REQUEST)
        message.add_string(self.username or "")
        message.add_string("ssh-connection")
        message.add_string(TICKET)

    def _parse_response(self, message: paramiko.Message) -> None:
        if message.get_binary() == _DER:
            self._send_token(self._first)
        else:
            self._give_up("the server chose another mechanism")

    def _parse_token(self, message: paramiko.Message) -> None:
        if self._context.complete:
            self._give_up("the server sent too many tokens")
            return
        try:
            reply = self._context.step(message.get_binary())
            if reply:
                self._send_token(reply)
            if self._context.complete:
                self._send_code()
        except KerberosError as problem:
            self._give_up(str(problem))

    def _send_token(self, token: bytes) -> None:
        message = paramiko.Message()
        message.add_byte(bytes([_TOKEN]))
        message.add_string(token)
        self._send(message)

    def _send_code(self) -> None:
        """Sign this connection's number and the request, so that no other server can use them."""
        signed = paramiko.Message()
        signed.add_string(self.transport.session_id or b"")
        self._add_request(signed)
        message = paramiko.Message()
        message.add_byte(bytes([_MIC]))
        message.add_string(self._context.sign(signed.asbytes()))
        self._send(message)

    def _send(self, message: paramiko.Message) -> None:
        self.transport._send_message(message)  # type: ignore[attr-defined]

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self.abort()

    @property
    def _client_handler_table(self) -> dict[int, Callable[[paramiko.Message], None]]:
        table = dict(super()._client_handler_table)  # type: ignore[misc]
        return {**table, _RESPONSE: self._parse_response, _TOKEN: self._parse_token}

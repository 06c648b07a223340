"""A login with a Kerberos ticket: gssapi-with-mic (RFC 4462, section 3)."""

from __future__ import annotations

from collections.abc import Callable

import paramiko

from dtrain.transport.kerberos import MECHANISM, Context, KerberosError
from dtrain.transport.login_handler import MethodHandler
from dtrain.transport.login_methods import TICKET

_RESPONSE, _TOKEN, _MIC = 60, 61, 66
"""The numbers of SSH_MSG_USERAUTH_GSSAPI_RESPONSE, _TOKEN and _MIC."""
_DER = b"\x06" + bytes([len(MECHANISM)]) + MECHANISM
"""The mechanism's name in SSH."""


class TicketLogin(MethodHandler):
    """One attempt. ``first`` is the first token of ``context``."""

    method = TICKET

    def __init__(
        self, transport: paramiko.Transport, user: str, context: Context, first: bytes
    ) -> None:
        super().__init__(transport, user)
        self._context = context
        self._first = first

    def _request_login(self, _accepted: paramiko.Message) -> None:
        request = paramiko.Message()
        self.begin_request(request)
        request.add_int(1)
        request.add_string(_DER)
        self.send(request)

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
        self.send(message)

    def _send_code(self) -> None:
        """Sign this connection's number and the request, so that no other server can use them."""
        signed = paramiko.Message()
        signed.add_string(self.transport.session_id or b"")
        self.begin_request(signed)
        message = paramiko.Message()
        message.add_byte(bytes([_MIC]))
        message.add_string(self._context.sign(signed.asbytes()))
        self.send(message)

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self.abort()

    @property
    def _client_handler_table(self) -> dict[int, Callable[[paramiko.Message], None]]:
        table = dict(super()._client_handler_table)  # type: ignore[misc]
        return {**table, _RESPONSE: self._parse_response, _TOKEN: self._parse_token}

"""Requests of a login, as paramiko sends and reads them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar, cast

import paramiko
from paramiko.auth_handler import AuthHandler
from paramiko.common import cMSG_USERAUTH_REQUEST

if TYPE_CHECKING:
    from dtrain.transport.ssh_transport import ClientTransport


class LoginHandler(AuthHandler):
    """Requests the authentication service once for each connection.

    paramiko requests it again with each method and each key. That costs a round trip, and some
    servers (asyncssh) close the connection.
    """

    def _request_auth(self) -> None:
        if cast("ClientTransport", self.transport).service_accepted:
            accepted = paramiko.Message()
            accepted.add_string("ssh-userauth")
            accepted.rewind()
            self._request_login(accepted)
        else:
            super()._request_auth()  # type: ignore[misc]

    def _parse_service_accept(self, message: paramiko.Message) -> None:
        cast("ClientTransport", self.transport).service_accepted = True
        self._request_login(message)

    def _request_login(self, accepted: paramiko.Message) -> None:
        """Send the request, now that the server has ``accepted`` the service."""
        super()._parse_service_accept(accepted)  # type: ignore[misc]


class MethodHandler(LoginHandler):
    """Logs in with a method that paramiko does not have. A subclass sends its own request."""

    method: ClassVar[str]

    def __init__(self, transport: paramiko.Transport, user: str) -> None:
        super().__init__(transport)
        self.username = user
        self.problem = ""
        """Why the attempt ended on this side."""

    def request(self, done: threading.Event) -> None:
        """Sets ``done`` once the server has accepted or refused."""
        with self.transport.lock:
            self.auth_event = done
            self.auth_method = self.method
            self._request_auth()

    def begin_request(self, message: paramiko.Message) -> None:
        """Add what all requests begin with to ``message``."""
        message.add_byte(cMSG_USERAUTH_REQUEST)
        message.add_string(self.username or "")
        message.add_string("ssh-connection")
        message.add_string(self.method)

    def send(self, message: paramiko.Message) -> None:
        self.transport._send_message(message)  # type: ignore[attr-defined]

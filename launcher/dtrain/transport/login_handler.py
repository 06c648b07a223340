"""Requests of a login, as paramiko sends and reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import paramiko
from paramiko.auth_handler import AuthHandler

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

"""Serves the metrics of a run over HTTP, for Prometheus."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6, SHUT_RDWR, SO_REUSEADDR, SOL_SOCKET
from typing import Any
from urllib.parse import urlsplit

from dtrain.diagnostics import UsageError
from dtrain.messages.decode import excerpt
from dtrain_cli.views import open_metrics

CLIENT_LIMIT = 5.0
"""Seconds for the request of one client."""
MOST_CLIENTS = 16
"""Others are disconnected: each has a thread and an open file of the launcher."""


class MetricsServer(ThreadingHTTPServer):
    """Answers with what ``metrics`` returns."""

    def __init__(self, host: str, port: int, metrics: Callable[[], str]) -> None:
        """Raises OSError if it cannot listen."""
        self.metrics = metrics
        self.host = host
        self._room = threading.BoundedSemaphore(MOST_CLIENTS)
        if ":" in host:
            self.address_family = AF_INET6
        super().__init__((host, port), _Handler)

    def verify_request(self, *_: object) -> bool:
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, *_: object) -> None:
        """A client that disconnects is no error."""

    def server_bind(self) -> None:
        # HTTPServer asks DNS for the name of the address. The next launch may use the port at once.
        self.socket.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = CLIENT_LIMIT

    def do_GET(self) -> None:
        if not self._names_this_machine():
            self.send_error(403, "use localhost or an IP address")
            return
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        body = self.server.metrics().encode()
        self.send_response(200)
        self.send_header("Content-Type", open_metrics.CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _names_this_machine(self) -> bool:
        """Whether the URL may be one of a user of this machine, if only they can connect.

        A web page may resolve a name of its own to 127.0.0.1 (DNS rebinding), and read the answer.
        """
        if not ipaddress.ip_address(str(self.server.server_address[0])).is_loopback:
            return True
        with contextlib.suppress(ValueError):
            name = urlsplit(f"//{self.headers.get('Host', 'localhost')}").hostname or ""
            known = name in ("localhost", self.server.host.lower())
            return known or bool(ipaddress.ip_address(name))
        return False

    def setup(self) -> None:
        super().setup()
        # A client that sends a byte now and then never reaches the timeout of a read.
        self._end = threading.Timer(CLIENT_LIMIT, self._hang_up)
        self._end.daemon = True
        self._end.start()

    def finish(self) -> None:
        self._end.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Print nothing: the terminal shows the run."""


def serve(text: str, metrics: Callable[[], str]) -> MetricsServer:
    """A server of what ``metrics`` returns, at ``[ADDRESS:]PORT``. Raises UsageError."""
    host, _, digits = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not (digits.isdecimal() and len(digits) <= 5 and int(digits) <= 65535):
        raise UsageError(
            f"--metrics-port {excerpt(text)}: not a port", hint="write 9400 or 0.0.0.0:9400"
        )
    try:
        return MetricsServer(host, int(digits), metrics)
    except OSError as error:
        raise UsageError(
            f"--metrics-port {excerpt(text)}: cannot listen: {error.strerror}",
            hint="choose another port (0 takes a free one), or an address of this machine",
        ) from None

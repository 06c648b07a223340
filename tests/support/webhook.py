"""A webhook on this machine: a real HTTP server that keeps what it gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0/B1/very-secret"  # noqa: S105 - of no real server


class Webhook:
    def __init__(self, status: int = 200, silent: bool = False) -> None:
        self.received: list[dict[str, Any]] = []
        self.released = threading.Event()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.received.append(json.loads(body))
                if silent:
                    webhook.released.wait()
                self.send_response(status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/{SECRET}"


@contextmanager
def webhook(status: int = 200, *, silent: bool = False) -> Iterator[Webhook]:
    """``silent``: it reads requests and never answers."""
    one = Webhook(status, silent)
    thread = threading.Thread(target=one.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        one.released.set()
        one.server.shutdown()
        one.server.server_close()
        thread.join()

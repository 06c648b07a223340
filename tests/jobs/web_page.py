"""Rank 0 serves a page like TensorBoard; with ``once`` it announces the port and ends."""

import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from dtrain.runtime.progress import tell

TEXT = f"a page of {os.environ['DTRAIN_HOST']} ".ljust(200_000, ".").encode()


class Page(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(TEXT)))
        self.end_headers()
        self.wfile.write(TEXT)

    def log_message(self, *args):
        pass


if os.environ["RANK"] == "0":
    server = HTTPServer(("127.0.0.1", 0), Page)
    tell("tensorboard", port=server.server_port)
    if sys.argv[1:] != ["once"]:
        assert os.environ["DTRAIN_TENSORBOARD"] == "1"
        server.serve_forever()
elif sys.argv[1:] != ["once"]:
    threading.Event().wait()

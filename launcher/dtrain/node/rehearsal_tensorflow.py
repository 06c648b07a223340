"""A TensorFlow server that contacts all other servers: one task of `dtrain check --rendezvous`.

`dtrain.node.ranks` starts it for every task of the job. It serves at its port of TF_CONFIG, and
waits until the servers of all other tasks answer.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from importlib import import_module

from dtrain.node.ranks import finish, first_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

    from dtrain.node.importer import Importer

    Json = dict[str, Any]

SETTINGS = b"\0\0\0\4\0\0\0\0\0"
"""An empty HTTP/2 frame of type 4."""
ALL = 60.0
"""Seconds that the servers' starts may differ: importing TensorFlow is slow. The training runtime
reads the same variable as we do, DTRAIN_START_TIMEOUT."""
STAY = 5.0
"""Seconds that a server stays up once it has reached all other servers, so that they reach it."""


def greets(place: str) -> bool:
    """Whether a gRPC server answers the HTTP/2 preface with its settings.

    TensorFlow's own clients wait for a server without a limit and block the interpreter.
    """
    host, _, port = place.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), 2.0) as sock:
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
            return sock.recv(9)[3:4] == SETTINGS[3:4]
    except OSError:
        return False


def rehearse() -> Json:
    """The report: which servers did not answer this task."""
    config = json.loads(os.environ["TF_CONFIG"])
    own = [config["task"]["type"], int(config["task"]["index"])]
    report: Json = {"task": own, "failed": "import", "silent": []}
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        tf: Any = import_module("tensorflow")
        report["failed"] = "server"
        places = config["cluster"]
        at = places[own[0]][own[1]]
        server = tf.distribute.Server({"alone": [at]}, "alone", 0, start=True)
        report["failed"] = ""
    except BaseException as failure:  # noqa: BLE001 - reported to the launcher
        report["error"] = first_line(failure)
        return report
    answered: set[tuple[str, int]] = set()

    def ask(kind: str, index: int, place: str) -> None:
        while not greets(place):
            time.sleep(0.1)
        answered.add((kind, index))

    peers = [
        (kind, index, place)
        for kind, where in places.items()
        for index, place in enumerate(where)
        if [kind, index] != own
    ]
    for peer in peers:
        threading.Thread(target=ask, args=peer, daemon=True).start()
    deadline = time.monotonic() + float(os.environ.get("DTRAIN_START_TIMEOUT") or ALL)
    while len(answered) < len(peers) and time.monotonic() < deadline:
        time.sleep(0.05)
    report["silent"] = [[kind, index] for kind, index, _ in peers if (kind, index) not in answered]
    if not report["silent"]:
        time.sleep(STAY)
    del server
    return report


def main(stream: BinaryIO, importer: Importer) -> None:
    finish(rehearse())

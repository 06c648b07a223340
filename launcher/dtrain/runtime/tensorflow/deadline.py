"""Wait for peers for minutes, not for the hour or more that TensorFlow waits in silence."""

from __future__ import annotations

import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dtrain.runtime.tensorflow.cluster import Cluster

START_TIMEOUT = 300.0
"""Seconds. Hosts of one launch start within seconds of each other, importing from a cold shared
file system within a minute or two."""


@contextmanager
def start_deadline(cluster: Cluster) -> Iterator[None]:
    """Within, this process is ended, with a message that names the missing peers, unless it gets
    through in ``DTRAIN_START_TIMEOUT`` seconds (300 where it is not set; 0 waits for ever).

    Raises ValueError for a peer whose host name does not resolve: TensorFlow would wait for it.
    """
    seconds = float(os.environ.get("DTRAIN_START_TIMEOUT") or START_TIMEOUT)
    if not cluster.peers or not seconds:
        yield
        return
    _resolve(cluster)
    # Not run from its path: a launch brings this package in a zip file.
    program = pkgutil.get_data("dtrain.runtime.tensorflow", "start_watchdog.py") or b""
    arguments = [str(seconds), str(os.getpid()), cluster.name, json.dumps(cluster.peers)]
    # -I: nothing of the script's folder or environment is to get in the way.
    command = [sys.executable, "-I", "-c", program.decode(), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as watchdog:
        try:
            yield
        finally:
            watchdog.communicate()


def _resolve(cluster: Cluster) -> None:
    for name, address in cluster.peers.items():
        host, _, port = address.rpartition(":")
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
        except (OSError, ValueError):
            raise ValueError(
                f"{name} is at {address} in TF_CONFIG, which this host cannot resolve:"
                " give numeric addresses"
            ) from None

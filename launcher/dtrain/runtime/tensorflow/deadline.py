"""Limits the wait for peers to minutes. TensorFlow itself waits an hour or more, silently."""

from __future__ import annotations

import json
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dtrain.runtime.tensorflow.cluster import TfConfig

START_TIMEOUT = 300.0
"""Seconds. The hosts of one launch start within seconds of each other; an import from a cold shared
file system takes a minute or two."""


@contextmanager
def start_deadline(cluster: TfConfig) -> Iterator[None]:
    """Ends this process, with a message that names the missing peers, if the block takes longer
    than ``DTRAIN_START_TIMEOUT`` seconds (default 300; 0 waits forever).

    Raises ValueError for a peer whose host name does not resolve: TensorFlow would wait for it.
    """
    seconds = float(os.environ.get("DTRAIN_START_TIMEOUT") or START_TIMEOUT)
    if not cluster.peers or not seconds:
        yield
        return
    _resolve(cluster)
    # Passed as code, not run from its path: a launch ships this package as a zip file.
    program = pkgutil.get_data("dtrain.runtime.tensorflow", "start_watchdog.py") or b""
    arguments = [str(seconds), str(os.getpid()), cluster.name, json.dumps(cluster.peers)]
    # -I: the script's folder and environment must not interfere.
    command = [sys.executable, "-I", "-c", program.decode(), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as watchdog:
        try:
            yield
        finally:
            watchdog.communicate()


def _resolve(cluster: TfConfig) -> None:
    for name, address in cluster.peers.items():
        host, _, port = address.rpartition(":")
        try:
            socket.getaddrinfo(host.strip("[]"), int(port))
        except (OSError, ValueError):
            raise ValueError(
                f"{name} is at {address} in TF_CONFIG, which this host cannot resolve:"
                " use IP addresses"
            ) from None

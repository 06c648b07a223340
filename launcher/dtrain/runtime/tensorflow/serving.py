"""The worker and ps tasks under parameter servers, which only serve."""

from __future__ import annotations

import socket
import time

import tensorflow as tf

from dtrain.runtime.job import current_job
from dtrain.runtime.stopping import catch_sigterm, stop_requested
from dtrain.runtime.tensorflow.cluster import TfConfig, connect_directly, current_cluster
from dtrain.runtime.tensorflow.strategies import strategy_name

_BETWEEN_LOOKS = 0.5
"""Seconds."""


def serve() -> bool:
    """Serve, if this task is a worker or a ps under parameter servers; else return False.

        if distributed.serve():
            return

    It serves until SIGTERM, and then until the chief exits: all tasks of a stopped job get TERM at
    once, and the chief can save only variables that still exist.
    """
    cluster = current_cluster()
    name = strategy_name(current_job().strategy, cluster)
    if name != "parameter_server" or cluster.role not in ("worker", "ps"):
        return False
    connect_directly(cluster)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(dict(cluster.tasks)),
        job_name=cluster.role,
        task_index=cluster.index,
        protocol="grpc",
        start=True,
    )
    catch_sigterm()
    # The server's own threads do the work. Its join() would block signal handlers.
    while not stop_requested():
        time.sleep(_BETWEEN_LOOKS)
    while _chief_is_there(cluster):
        time.sleep(_BETWEEN_LOOKS)
    del server
    return True


def _chief_is_there(cluster: TfConfig) -> bool:
    host, _, port = cluster.tasks["chief"][0].rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return False
    return True

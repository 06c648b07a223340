"""End while a thread of the coordinator holds its lock."""

import threading
from typing import Any

import tensorflow as tf

from dtrain.runtime import tensorflow as distributed


def hold(lock: Any, held: threading.Event) -> None:
    with lock:
        held.set()
        threading.Event().wait()


def main() -> None:
    if distributed.serve():
        return
    run = distributed.init()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(run.strategy)
    lock, held = coordinator._cluster.closure_queue._queue_lock, threading.Event()
    threading.Thread(target=hold, args=(lock, held), daemon=True).start()
    held.wait()
    print("ends", flush=True)


main()

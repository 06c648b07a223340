"""Where the program starts: orders in, answers out."""

from __future__ import annotations

import json
import os
import queue
import threading
import time

from dtrain.node.facts.files import PREAMBLE
from dtrain.node.facts.gather import gather
from dtrain.node.facts.job import in_job
from dtrain.node.facts.ports import dial, stop_listening
from dtrain.node.facts.probing import guarded
from dtrain.node.facts.programs import leave

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.facts.files import Json


def answer(order: Json) -> Json:
    if order["op"] == "clock":
        return {"time": time.time()}
    if order["op"] == "gather":
        return gather(order)
    if order["op"] == "dial":
        return {"dialed": dial(order)}
    stop_listening()
    return guarded(lambda order: in_job(order, order["argv"], order["limit"]), order)


def main() -> None:
    """``boot`` was left in our globals by what loaded this file: the stream that it came from."""
    boot: BinaryIO = globals()["boot"]
    orders: queue.SimpleQueue[Json] = queue.SimpleQueue()

    def listen() -> None:
        for line in iter(boot.readline, b""):
            orders.put(json.loads(line))
        leave()

    out = os.fdopen(os.dup(1), "wb")
    out.write(PREAMBLE)
    out.flush()
    threading.Thread(target=listen, daemon=True).start()
    while True:
        out.write(json.dumps(answer(orders.get())).encode() + b"\n")
        out.flush()


if __name__ == "__main__":
    main()

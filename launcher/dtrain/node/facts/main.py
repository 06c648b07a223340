"""The facts program: reads orders and writes answers."""

from __future__ import annotations

import json
import os
import queue
import threading
import time

from dtrain.node.facts.gather import gather
from dtrain.node.facts.job import in_job
from dtrain.node.facts.ports import dial, stop_listening
from dtrain.node.facts.probing import guarded
from dtrain.node.facts.programs import leave
from dtrain.node.facts.wire import PREAMBLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import Order
    from dtrain.node.importer import Importer


def answer(order: Order) -> Json:
    if order["op"] == "clock":
        return {"time": time.time()}
    if order["op"] == "gather":
        return gather(order)
    if order["op"] == "dial":
        return {"dialed": dial(order)}
    stop_listening()
    return guarded(lambda: in_job(order, order["program"], order["limit"]))


def main(stream: BinaryIO, importer: Importer) -> None:
    orders: queue.SimpleQueue[Order] = queue.SimpleQueue()

    def listen() -> None:
        try:
            for line in iter(stream.readline, b""):
                orders.put(json.loads(line))
        finally:  # the end of the stream may cut an order
            leave()

    out = os.fdopen(os.dup(1), "wb")
    out.write(PREAMBLE)
    out.flush()
    threading.Thread(target=listen, daemon=True).start()
    while True:
        out.write(json.dumps(answer(orders.get())).encode() + b"\n")
        out.flush()

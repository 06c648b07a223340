"""The facts program: reads orders and writes answers."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque

from dtrain.node.facts.dialing import dial
from dtrain.node.facts.gather import gather
from dtrain.node.facts.job import in_job
from dtrain.node.facts.probing import guarded
from dtrain.node.facts.programs import leave
from dtrain.node.facts.socket_loop import SocketLoop
from dtrain.node.facts.wire import PREAMBLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import Order
    from dtrain.node.importer import Importer


def answer(order: Order, loop: SocketLoop) -> Json:
    if order["op"] == "clock":
        return {"time": time.time()}
    if order["op"] == "gather":
        return gather(order, loop)
    if order["op"] == "dial":
        return {"dialed": dial(order, loop)}
    loop.close()
    return guarded(lambda: in_job(order, order["program"], order["limit"]))


def main(stream: BinaryIO, importer: Importer) -> None:
    orders: deque[Order] = deque()  # `queue` takes longer to import
    arrived = threading.Semaphore(0)

    def listen() -> None:
        try:
            for line in iter(stream.readline, b""):
                orders.append(json.loads(line))
                arrived.release()
        finally:  # the end of the stream may cut an order
            leave()

    out = os.fdopen(os.dup(1), "wb")
    out.write(PREAMBLE)
    out.flush()
    threading.Thread(target=listen, daemon=True).start()
    loop = SocketLoop()
    while arrived.acquire():
        out.write(json.dumps(answer(orders.popleft(), loop)).encode() + b"\n")
        out.flush()

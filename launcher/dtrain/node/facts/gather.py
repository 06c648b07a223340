"""Collects all facts in parallel, each with a time limit."""

from __future__ import annotations

import queue
import threading
import time

from dtrain.node.facts.code import script
from dtrain.node.facts.containers import containers
from dtrain.node.facts.gpus import gpus
from dtrain.node.facts.job import interpreter
from dtrain.node.facts.machine import leftovers, machine, memory
from dtrain.node.facts.network import infiniband, names, network
from dtrain.node.facts.ports import Listener, ports
from dtrain.node.facts.probing import LIMIT, guarded
from dtrain.node.facts.storage import storage
from dtrain.node.waiting import next_item

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from dtrain.node.facts.files import Json
    from dtrain.node.facts.orders import GatherOrder
    from dtrain.node.facts.socket_loop import SocketLoop

PROBES: dict[str, Callable[[GatherOrder], Json]] = {
    "machine": machine,
    "memory": memory,
    "leftovers": leftovers,
    "storage": storage,
    "script": script,
    "names": names,
    "network": network,
    "infiniband": infiniband,
    "gpus": gpus,
    "interpreter": interpreter,
    "container": containers,
}


def gather(request: GatherOrder, loop: SocketLoop) -> Json:
    """All requested facts. Ports come first, because they stay open for other hosts to dial, until
    the loop is closed."""
    listener = Listener(request["host"], request["token"], loop)
    facts: Json = {"ports": guarded(lambda: ports(request, listener))}
    answers: queue.SimpleQueue[tuple[str, Json]] = queue.SimpleQueue()
    limits = dict.fromkeys(request["probes"], LIMIT)
    if "gpus" in limits:
        limits["gpus"] = 45.0
    if "interpreter" in limits:
        limits["interpreter"] = request["interpreter"]["limit"] + 5.0
    is_set_up = threading.Event()
    if "script" in limits and "interpreter" in limits and request["setup"]:
        limits["script"] += limits["interpreter"]
    else:
        is_set_up.set()
    for name in limits:

        def work(name: str = name) -> None:
            if name == "script":
                is_set_up.wait()  # the setup lines may create it
            answers.put((name, guarded(lambda: PROBES[name](request))))
            if name == "interpreter":
                is_set_up.set()

        threading.Thread(target=work, daemon=True).start()
    begun = time.monotonic()
    while len(facts) <= len(limits):
        late = [begun + limits[name] for name in limits if name not in facts]
        try:
            name, fact = next_item(answers, min(late) - time.monotonic())
        except queue.Empty:
            for name in limits:
                if name not in facts and time.monotonic() >= begun + limits[name]:
                    facts[name] = {"error": "no answer within %g s" % limits[name]}
            continue
        facts.setdefault(name, fact)
    listening = guarded(lambda: {"port": listener.open(0)})
    return {"facts": facts, "listening": listening}
